"""Hooks for a parallel layout: identity by default, collectives when `parallel` sets them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = [
    "JoinTokens",
    "Pass",
    "PickTokens",
    "Rows",
    "TokenCut",
    "TokenShare",
    "VocabCut",
    "pass_on",
]

Pass = Callable[[Tensor], Tensor]
# (tokens (M, D), labels (M,), divisor of the summed loss) -> those of this rank
PickTokens = Callable[[Tensor, Tensor, float | Tensor], tuple[Tensor, Tensor, float | Tensor]]
# (scores of this rank's tokens (K, m), number of all tokens M) -> (K, M)
JoinTokens = Callable[[Tensor, int], Tensor]


def pass_on(x: Tensor) -> Tensor:
    """Return `x` unchanged: the default for one process."""
    return x


class Rows(Protocol):
    """Weight of a head: a tensor (V, D), or an object that yields rows of it when sliced."""

    @property
    def shape(self) -> torch.Size:
        """(V, D)."""

    def __getitem__(self, rows: slice) -> Tensor: ...

    def detach(self) -> Rows:
        """Return the same without the autograd graph."""


class VocabCut(Protocol):
    """Sharding of a head's weight over the vocabulary.

    Attributes:
        rows: vocabulary size over all ranks.
        first: index of this rank's first row in the whole weight.
        width: largest number of rows on a rank.
        is_last: this rank has the last row.
    """

    rows: int
    first: int
    width: int
    is_last: bool

    def enter(self, x: Tensor) -> Tensor:
        """Return `x`, which is the same on every rank; its gradient is summed over the ranks."""

    def gather(self, logits: Tensor) -> Tensor:
        """All-gather the logits: (..., V) from this rank's rows."""

    def sum_(self, values: Tensor) -> Tensor:
        """Sum over the ranks, in place."""

    def max_(self, values: Tensor) -> Tensor:
        """Take the maximum over the ranks, in place."""


class TokenShare(Protocol):
    """Sharding of sequences over ranks (context parallelism): this rank's tokens."""

    def enter(
        self, x: Tensor, masks: dict[Any, Any], inputs: dict[str, Any]
    ) -> tuple[Tensor, dict[Any, Any], dict[str, Any]]:
        """Select this rank's part of a stack's inputs: hidden states, masks, other arguments."""

    def gather(self, x: Tensor) -> Tensor:
        """All-gather the tokens: (B, T, ...) from those of this rank."""


# Sequence length -> this rank's share; None where sequences are not sharded.
TokenCut = Callable[[int], TokenShare | None]
