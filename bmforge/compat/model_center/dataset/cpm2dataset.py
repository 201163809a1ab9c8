"""LCQMC (question paraphrase detection) for CPM-2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bmforge.compat.model_center.dataset.cpm1dataset import first_tokens, fitting
from bmforge.compat.model_center.dataset.cpm2 import CPM2_Dataset
from bmforge.compat.model_center.dataset.rows import PROMPTS, TaskRows, make_datasets, pad_ids
from bmforge.data.tasks import TaskExample

__all__ = ["CPM2_Dataset", "DATASET", "CPM2Rows"]


class CPM2Rows(TaskRows):
    """One split of a task, encoded for CPM-2: as in `T5Rows`, but with CPM-2's sentinel token."""

    length_names = ("max_encoder_length", "max_decoder_length")

    @classmethod
    def get_verbalizer(cls, tokenizer: Any) -> list[int]:
        """Return the first token id of each label's answer word."""
        return first_tokens(cls.task, tokenizer)

    def encode(self, example: TaskExample) -> dict[str, Tensor]:
        """Encode an example as tensors.

        Shape:
            enc_input: (max_encoder_length,); dec_input, index: (max_decoder_length,); the others:
            scalars

        Raises:
            DataError: the text is longer than max_encoder_length.
        """
        longest, width = (self.lengths[name] for name in self.length_names)
        blank = self.tokenizer.get_sentinel_id(0)
        text = PROMPTS[self.task].text.format_map(example.fields)
        ids = fitting([*self.tokenizer.encode(text), blank], longest, example, "max_encoder_length")
        index = torch.zeros(width, dtype=torch.long)
        index[0] = 1
        return {
            "enc_input": pad_ids(ids, longest),
            "enc_length": torch.tensor(len(ids)),
            "dec_input": pad_ids([blank], width),
            "dec_length": torch.tensor(1),
            "targets": torch.tensor(int(example.label or 0)),
            "index": index,
        }


_NAMES = ("LCQMC", "eprstmt", "ocnli", "cmnli", "afqmc", "bustm", "cluewsc2020", "cluewsc")
DATASET = make_datasets(CPM2Rows, {name: {} for name in _NAMES})
