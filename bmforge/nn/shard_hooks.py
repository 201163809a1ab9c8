"""Interfaces of the hooks that parallel layouts set; without a layout a hook is the identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = [
    "JoinTokens",
    "TensorFn",
    "PickTokens",
    "HeadRows",
    "TokenCut",
    "TokenAssignment",
    "VocabCut",
    "identity",
]

TensorFn = Callable[[Tensor], Tensor]
# (tokens (M, D), labels (M,), divisor of the summed loss) -> the same three values for this rank
PickTokens = Callable[[Tensor, Tensor, float | Tensor], tuple[Tensor, Tensor, float | Tensor]]
# (scores of this rank's tokens (K, m), number of all tokens M) -> (K, M)
JoinTokens = Callable[[Tensor, int], Tensor]


def identity(x: Tensor) -> Tensor:
    """Return `x` unchanged; the default hook without parallelism."""
    return x


class HeadRows(Protocol):
    """Weight of a head: a (V, D) tensor, or an object that returns rows when sliced."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight, (V, D)."""

    def __getitem__(self, rows: slice) -> Tensor: ...

    def detach(self) -> HeadRows:
        """Return the rows without the autograd graph."""


class VocabCut(Protocol):
    """Sharding of a head's weight over the vocabulary.

    Attributes:
        rows: vocabulary size over all ranks.
        first: index of this rank's first row in the whole weight.
        width: largest number of rows on a rank.
        is_last: True if this rank has the last row.
    """

    rows: int
    first: int
    width: int
    is_last: bool

    def sum_backward(self, x: Tensor) -> Tensor:
        """Return the replicated `x` unchanged; its gradient is summed over the ranks."""

    def gather(self, logits: Tensor) -> Tensor:
        """All-gather the ranks' logits; return those of the whole vocabulary, (..., V)."""

    def sum_(self, values: Tensor) -> Tensor:
        """Sum values over the ranks, in place."""

    def max_(self, values: Tensor) -> Tensor:
        """Take the maximum of values over the ranks, in place."""


class TokenAssignment(Protocol):
    """Sharding of sequences over ranks (context parallelism)."""

    def shard_inputs(
        self, x: Tensor, masks: dict[Any, Any], inputs: dict[str, Any]
    ) -> tuple[Tensor, dict[Any, Any], dict[str, Any]]:
        """Select this rank's tokens of a stack's inputs: hidden states, masks, other arguments."""

    def gather(self, x: Tensor) -> Tensor:
        """All-gather the ranks' tokens; return whole sequences, (B, T, ...)."""


# Sequence length -> this rank's tokens; None if sequences are not sharded.
TokenCut = Callable[[int], TokenAssignment | None]
