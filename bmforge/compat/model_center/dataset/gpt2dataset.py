"""Tasks for decoders: a prompt, and the word that answers the prompt."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bmforge.compat.model_center.dataset.rows import PROMPTS, TaskRows, make_datasets, unroll
from bmforge.compat.model_center.dataset.rows import pad_ids as _pad
from bmforge.data.tasks import TaskExample

__all__ = ["DATASET", "GPT2Rows"]


class GPT2Rows(TaskRows):
    """One split of a task, encoded for a decoder.

    A sample has `input_ids`, their number `input_length`, `targets` (the next tokens, then the
    answer), `index` (1 where the answer is predicted) and `labels`. Texts that are too long are
    truncated at the beginning.

    Attributes:
        adds_answer: True if the answer's token is a target.
        token_index: index of a word's first token in the tokenizer's output.
        space: text inserted before a word.
    """

    length_names = ("max_decoder_length",)
    adds_answer = True
    token_index = 0
    space = " "

    @classmethod
    def get_verbalizer(cls, tokenizer: Any) -> list[int]:
        """Return the first token id of each label's answer word."""
        words = PROMPTS[cls.task].words
        return [tokenizer.encode(cls.space + word)[cls.token_index] for word in words]

    def arrange(self, examples: list[TaskExample]) -> list[TaskExample]:
        """Convert examples with choices; see `unroll`."""
        return unroll(self.task, examples, self.split == "train")

    def encode(self, example: TaskExample) -> dict[str, Tensor]:
        """Encode an example as tensors.

        Shape:
            input_ids, targets, index: (max_decoder_length,); input_length, labels: scalars
        """
        width, label = self.lengths["max_decoder_length"], int(example.label or 0)
        text = PROMPTS[self.task].text.format_map(example.fields)
        ids = list(self.tokenizer.encode(text))[-width:]
        answer = self.get_verbalizer(self.tokenizer)[label] if self.adds_answer else -100
        index = torch.zeros(width, dtype=torch.long)
        index[len(ids) - 1] = 1
        return {
            "input_ids": _pad(ids, width),
            "input_length": torch.tensor(len(ids)),
            "targets": _pad([*ids[1:], answer], width, -100),
            "index": index,
            "labels": torch.tensor(label),
        }


DATASET = make_datasets(GPT2Rows, {name: {} for name in PROMPTS})
