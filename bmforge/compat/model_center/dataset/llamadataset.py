"""Tasks for Llama, as in `gpt2dataset`, for a tokenizer that puts a start token first."""

from __future__ import annotations

from bmforge.compat.model_center.dataset.gpt2dataset import GPT2Rows
from bmforge.compat.model_center.dataset.rows import PROMPTS, make_datasets

__all__ = ["DATASET", "LlamaRows"]


class LlamaRows(GPT2Rows):
    """One split of a task, encoded for Llama.

    The answer's token is not in `targets`: a program compares the logits at `index` with `labels`.
    """

    adds_answer = False
    token_index = 1
    space = ""


DATASET = make_datasets(LlamaRows, {name: {} for name in PROMPTS})
