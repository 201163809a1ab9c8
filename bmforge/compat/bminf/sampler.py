"""BMInf 1.0's sampling, with frequency and presence penalties that include the prompt.

Source: BMInf 1.0.2's sampler: scores / temperature, minus `frequency_penalty` per earlier
occurrence (prompt included) and `presence_penalty` for tokens that occurred; then sampling from the
`top_n` most probable tokens within `top_p`.
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
    """Convert BMInf's sampling options to bmforge's."""
    return {
        "do_sample": True,
        "temperature": temperature,
        "top_k": top_n,
        "top_p": top_p,
        "max_new_tokens": max_tokens,
        **more,
    }


class _Penalized:
    """Decoder mixin that penalizes tokens that occurred before.

    Args:
        temperature: divisor that the sampler applies to the scores afterwards.
        penalties: frequency and presence penalty.
        never: ids that are never generated.
        free: ids without penalty.
        seen: ids that are penalized from the first step, as if they had occurred.
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
        """Return the scores of the base decoder minus the penalties."""
        scores: Tensor = super().run(tokens)  # type: ignore[misc]
        if self._seen is None:
            self._seen = tokens[:, :0]
        penalized = tokens
        if self._is_begun and self._free:
            penalized = tokens[:, ~torch.isin(tokens[0], tokens.new_tensor(self._free))]
        self._seen, self._is_begun = torch.cat((self._seen, penalized), 1), True
        counts = torch.zeros_like(scores).scatter_add_(
            1, self._seen, torch.ones_like(self._seen, dtype=scores.dtype)
        )
        each, once = self._penalties
        scores = scores - self._temperature * (each * counts + once * (counts > 0))
        scores[:, self._never] = -torch.inf
        return scores


class LoweredDecoder(_Penalized, Decoder):
    """Causal decoder with frequency and presence penalties."""


class LoweredSeq2Seq(_Penalized, Seq2SeqDecoder):
    """Encoder-decoder with frequency and presence penalties, which also count tokens of the
    source.
    """

    def __init__(self, model: Any, source: Tensor, *args: Any, **options: Any) -> None:
        super().__init__(model, source, *args, seen=source, **options)
