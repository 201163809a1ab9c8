"""Tasks for Llama: as `gpt2dataset`, but a word's encoding begins with the start token."""

from __future__ import annotations

from bmforge.compat.model_center.dataset.gpt2dataset import GPT2Rows
from bmforge.compat.model_center.dataset.rows import PROMPTS, make_datasets

__all__ = ["DATASET", "LlamaRows"]


class LlamaRows(GPT2Rows):
    """A split of a task for Llama; the answer is no target."""

    adds_answer = False
    place = 1
    space = ""


DATASET = make_datasets(LlamaRows, {name: {} for name in PROMPTS})
