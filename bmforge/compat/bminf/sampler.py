"""How BMInf 1.0 drew tokens: decoders whose scores sink for what is there already.

Source: BMInf 1.0.2's sampler: scores / temperature, less `frequency_penalty` for every time a token
is there already, prompt included, and `presence_penalty` for being there at all; then a draw among
the `top_n` likeliest that make up `top_p`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bmforge.infer.decoder import Decoder, Seq2SeqDecoder

__all__ = ["LoweredDecoder", "LoweredSeq2Seq", "draw_options"]


def draw_options(
    temperature: float, top_n: int | None, top_p: float | None, max_tokens: int, **more: Any
) -> dict[str, Any]:
    """Return options of a draw in this package's words."""
    return {
        "do_sample": True,
        "temperature": temperature,
        "top_k": top_n,
        "top_p": top_p,
        "max_new_tokens": max_tokens,
        **more,
    }


class _Lowered:
    """A decoder whose scores sink for what is there already; a mixin.

    Args:
        temperature: what scores will be divided by.
        penalties: of every time a token is there, and of being there at all.
        never: ids that are not written.
        free: ids that may come as often as they like.
        seen: ids that count from the start.
    """

    def __init__(
        self,
        *args: Any,
        temperature: float,
        penalties: tuple[float, float],
        never: Sequence[int] = (),
        free: Sequence[int] = (),
        seen: Tensor | None = None,
    ) -> None:
        super().__init__(*args)
        self._temperature, self._penalties = temperature, penalties
        self._never, self._free = list(never), list(free)
        self._seen = seen
        self._is_begun = False

    def run(self, tokens: Tensor) -> Tensor:
        """As in the base, lower."""
        scores: Tensor = super().run(tokens)  # type: ignore[misc]
        if self._seen is None:
            self._seen = tokens[:, :0]
        wanted = tokens
        if self._is_begun and self._free:
            wanted = tokens[:, ~torch.isin(tokens[0], tokens.new_tensor(self._free))]
        self._seen, self._is_begun = torch.cat((self._seen, wanted), 1), True
        counts = torch.zeros_like(scores).scatter_add_(
            1, self._seen, torch.ones_like(self._seen, dtype=scores.dtype)
        )
        each, once = self._penalties
        scores = scores - self._temperature * (each * counts + once * (counts > 0))
        scores[:, self._never] = -torch.inf
        return scores


class LoweredDecoder(_Lowered, Decoder):
    """Goes on with a text."""


class LoweredSeq2Seq(_Lowered, Seq2SeqDecoder):
    """Writes a target; what the encoder reads counts as there."""

    def __init__(self, model: Any, source: Tensor, *args: Any, **options: Any) -> None:
        super().__init__(model, source, *args, seen=source, **options)
