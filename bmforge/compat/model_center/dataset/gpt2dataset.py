"""Tasks for decoders: a prompt, and the word that answers the prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from bmforge.compat.model_center.dataset import rows
from bmforge.data.tasks import TaskExample

__all__ = ["DATASET", "GPT2Rows"]


class GPT2Rows(rows.PromptRows):
    """One split of a task, encoded for a decoder.

    A sample has `input_ids`, their number `input_length`, `targets` (the next tokens, then the
    answer), `index` (1 where the answer is predicted) and `labels`. Texts that are too long are
    truncated at the beginning.

    Attributes:
        adds_answer: True if the answer's token is a target.
    """

    length_names = ("max_decoder_length",)
    adds_answer = True
    space = " "

    def encode(self, example: TaskExample) -> dict[str, Tensor]:
        """Encode an example as tensors.

        Shape:
            input_ids, targets, index: (max_decoder_length,); input_length, labels: scalars
        """
        width, label = self.lengths["max_decoder_length"], int(example.label or 0)
        ids = self.prompt_ids(example)[-width:]
        answer = self.get_verbalizer(self.tokenizer)[label] if self.adds_answer else -100
        return {
            "input_ids": rows.pad_ids(ids, width),
            "input_length": torch.tensor(len(ids)),
            "targets": rows.pad_ids([*ids[1:], answer], width, -100),
            "index": rows.one_hot(len(ids) - 1, width),
            "labels": torch.tensor(label),
        }


DATASET = rows.make_datasets(GPT2Rows, {name: {} for name in rows.PROMPTS})
