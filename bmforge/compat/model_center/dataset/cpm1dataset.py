"""LCQMC (question paraphrase detection) for CPM-1."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bmforge.compat.model_center.dataset.cpm1 import CPM1_Dataset, CPM1_Dataset_Merge
from bmforge.compat.model_center.dataset.rows import PROMPTS, TaskRows, make_datasets, pad_ids
from bmforge.data.tasks import TaskExample
from bmforge.errors import DataError

__all__ = ["CPM1_Dataset", "CPM1_Dataset_Merge", "DATASET", "CPM1Rows"]

_START = 1


class CPM1Rows(TaskRows):
    """One split of a task, encoded for CPM-1.

    A sample has `input_tokens`, their number `input_length`, `input_context` (all False: attention
    is causal), `input_span`, `index` (1 where the answer is predicted) and the label `targets`.
    """

    length_names = ("max_length",)

    @classmethod
    def get_verbalizer(cls, tokenizer: Any) -> list[int]:
        """Return the first token id of each label's answer word."""
        return first_tokens(cls.task, tokenizer)

    def encode(self, example: TaskExample) -> dict[str, Tensor]:
        """Encode an example as tensors.

        Shape:
            input_tokens, input_context, input_span, index: (max_length,); the others: scalars

        Raises:
            DataError: the text is longer than max_length.
        """
        width = self.lengths["max_length"]
        text = PROMPTS[self.task].text.format_map(example.fields)
        ids = fitting([_START, *self.tokenizer.encode(text)], width, example, "max_length")
        index = torch.zeros(width, dtype=torch.long)
        index[len(ids) - 1] = 1
        return {
            "input_tokens": pad_ids(ids, width),
            "input_length": torch.tensor(len(ids)),
            "input_context": torch.zeros(width, dtype=torch.bool),
            "input_span": torch.zeros(width, dtype=torch.long),
            "targets": torch.tensor(int(example.label or 0)),
            "index": index,
        }


def first_tokens(task: str, tokenizer: Any) -> list[int]:
    """Return the first token id of each label's answer word.

    Raises:
        DataError: the words of two labels begin with the same token.
    """
    firsts = [tokenizer.encode(word)[0] for word in PROMPTS[task].words]
    if len(set(firsts)) < len(firsts):
        raise DataError(
            f"{task}: the words {PROMPTS[task].words} begin with the tokens {firsts}, so the "
            "first token does not distinguish the labels. Use another tokenizer, or your own "
            "words."
        )
    return firsts


def fitting(ids: list[int], width: int, example: TaskExample, name: str) -> list[int]:
    """Return the token ids, after checking that there are at most `width` of them.

    Raises:
        DataError: the example has more token ids.
    """
    if len(ids) > width:
        raise DataError(
            f"example {example.idx} has {len(ids)} tokens, more than {name}={width}. Use a "
            "larger value."
        )
    return ids


_NAMES = ("LCQMC", "eprstmt", "ocnli", "cmnli", "afqmc", "bustm", "cluewsc2020", "cluewsc")
DATASET = make_datasets(CPM1Rows, {name: {} for name in _NAMES})
