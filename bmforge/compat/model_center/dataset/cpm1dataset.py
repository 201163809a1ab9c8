"""LCQMC (question paraphrase detection) for CPM-1."""

from __future__ import annotations

import torch
from torch import Tensor

from bmforge.compat.model_center.dataset import rows
from bmforge.compat.model_center.dataset.pretraining import CPM1_Dataset, CPM1_Dataset_Merge
from bmforge.data.tasks import TaskExample

__all__ = ["CPM1_Dataset", "CPM1_Dataset_Merge", "DATASET", "CPM1Rows"]

_START = 1


class CPM1Rows(rows.PromptRows):
    """One split of a task, encoded for CPM-1.

    A sample has `input_tokens`, their number `input_length`, `input_context` (all False: attention
    is causal), `input_span`, `index` (1 where the answer is predicted) and the label `targets`.
    """

    length_names = ("max_length",)
    needs_distinct = True

    def encode(self, example: TaskExample) -> dict[str, Tensor]:
        """Encode an example as tensors.

        Shape:
            input_tokens, input_context, input_span, index: (max_length,); input_length,
            targets: scalars

        Raises:
            DataError: the text is longer than max_length.
        """
        width = self.lengths["max_length"]
        ids = self.check_length([_START, *self.prompt_ids(example)], example)
        return {
            "input_tokens": rows.pad_ids(ids, width),
            "input_length": torch.tensor(len(ids)),
            "input_context": torch.zeros(width, dtype=torch.bool),
            "input_span": torch.zeros(width, dtype=torch.long),
            "targets": torch.tensor(int(example.label or 0)),
            "index": rows.one_hot(len(ids) - 1, width),
        }


DATASET = rows.make_datasets(CPM1Rows, {name: {} for name in rows.CHINESE_TASKS})
