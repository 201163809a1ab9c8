"""Text generation with T5, which fills in a sentinel token."""

from __future__ import annotations

import torch
from torch import Tensor

from bmforge.compat.model_center.generation.search import BeamSearch, Generation, RandomSampling

__all__ = ["T5BeamSearch", "T5RandomSampling"]


class _T5(Generation):
    """Generates the text of the first sentinel token, which is appended if it is missing."""

    def end_tokens(self) -> tuple[int, ...]:
        """Return the next sentinel token and the EOS token."""
        return (self._blank(1), self.tokenizer.eos_token_id)

    def _blank(self, number: int) -> int:
        return int(self.tokenizer.convert_tokens_to_ids(f"<extra_id_{number}>"))

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of one text with a sentinel and an EOS token."""
        ids = [i for i in self.tokenizer.encode(text) if i != self.tokenizer.eos_token_id]
        blank = [] if self._blank(0) in ids else [self._blank(0)]
        return [*ids, *blank, self.tokenizer.eos_token_id]

    def begin(self, start: Tensor) -> Tensor:
        """Return the decoder's start token and the sentinel token."""
        return torch.cat((start, torch.full_like(start[:, :1], self._blank(0))), 1)


class T5BeamSearch(_T5, BeamSearch):
    """Beam search with T5; see `BeamSearch`."""


class T5RandomSampling(_T5, RandomSampling):
    """Sampling with T5; see `RandomSampling`."""
