"""Tasks for Llama: as `gpt2dataset`, where a word's encoding has the start token in front."""

from __future__ import annotations

from bmforge.compat.model_center.dataset.gpt2dataset import GPT2Rows
from bmforge.compat.model_center.dataset.rows import PROMPTS, make_datasets

__all__ = ["DATASET", "LlamaRows"]


class LlamaRows(GPT2Rows):
    """A split of a task for Llama; the answer is not among the targets."""

    adds_answer = False
    place = 1
    space = ""


DATASET = make_datasets(LlamaRows, {name: {} for name in PROMPTS})
