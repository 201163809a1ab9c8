"""Runs a model over prompts once, then token by token: cache, mask and positions in step."""

from __future__ import annotations

import torch
from torch import Tensor

from bmforge.infer.cache import KVCache
from bmforge.models.causal_lm import CausalLM

__all__ = ["Decoder"]


class Decoder:
    """A batch of rows in the middle of being continued.

    Args:
        model: gives the scores.
        mask: 1 for tokens, 0 for padding on the left; None when there is no padding.
        max_length: tokens in the longest row at the end.

    Shape:
        mask: (B, prompt length)
    """

    def __init__(self, model: CausalLM, mask: Tensor | None, max_length: int) -> None:
        self.model = model
        self.cache = KVCache(len(model.layers), max_length)
        self._mask: Tensor | None = None
        if mask is not None:
            self._mask = mask.new_ones(mask.shape[0], max_length)
            self._mask[:, : mask.shape[1]] = mask

    def run(self, tokens: Tensor) -> Tensor:
        """Feed the prompt, or the tokens chosen last, and return scores of the next token.

        Shape:
            tokens: (B, T) -> (B, V) in fp32
        """
        mask, positions = None, None
        if self._mask is not None:
            start, end = self.cache.length, self.cache.length + tokens.shape[1]
            mask = self._mask[:, :end]
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, start:]
        out = self.model(
            tokens, attention_mask=mask, position_ids=positions, cache=self.cache, logits_to_keep=1
        )
        return out.logits[:, -1].float()

    def reorder(self, rows: Tensor) -> None:
        """Go on with the old rows `rows` (B' of them) as the new rows."""
        self.cache.reorder(rows)
        if self._mask is not None:
            self._mask = self._mask.index_select(0, rows)

    def repeat(self, times: int, scores: Tensor) -> Tensor:
        """Go on with every row `times` times, as neighbours; `scores` are repeated likewise."""
        if times == 1:
            return scores
        rows = torch.arange(scores.shape[0], device=scores.device).repeat_interleave(times)
        self.reorder(rows)
        return scores.index_select(0, rows)
