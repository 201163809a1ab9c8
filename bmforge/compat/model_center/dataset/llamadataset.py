"""Tasks for Llama, as in `gpt2dataset`, for a tokenizer that puts a start token first."""

from __future__ import annotations

from bmforge.compat.model_center.dataset.gpt2dataset import GPT2Rows
from bmforge.compat.model_center.dataset.rows import PROMPTS, make_datasets

__all__ = ["DATASET", "LlamaRows"]


class LlamaRows(GPT2Rows):
    """One split of a task, encoded for Llama; the answer is not a target."""

    adds_answer = False
    place = 1
    space = ""


DATASET = make_datasets(LlamaRows, {name: {} for name in PROMPTS})
