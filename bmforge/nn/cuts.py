"""What a layout may put into a block: functions that stand where something is cut over processes.

Every default here does nothing, which is right for one process. `parallel` sets others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Pass", "PickTokens", "Rows", "TokenCut", "TokenShare", "VocabCut", "pass_on"]

Pass = Callable[[Tensor], Tensor]
# (tokens (M, D), labels (M,), what their summed loss is divided by) -> those of this process
PickTokens = Callable[[Tensor, Tensor, float | Tensor], tuple[Tensor, Tensor, float | Tensor]]


def pass_on(x: Tensor) -> Tensor:
    """Return `x` itself: what tokens go through where nothing is cut."""
    return x


class Rows(Protocol):
    """What a head multiplies by: a tensor (V, D), or what makes some rows of it when sliced."""

    @property
    def shape(self) -> torch.Size:
        """(V, D)."""

    def __getitem__(self, rows: slice) -> Tensor: ...

    def detach(self) -> Rows:
        """Return the same without a graph."""


class VocabCut(Protocol):
    """How a head's rows, one per token of the vocabulary, are divided over processes.

    Attributes:
        rows: how many there are over all processes.
        first: the first row here, numbered over all processes.
        width: the largest number of rows that a process holds.
        is_last: whether the last row is here.
    """

    rows: int
    first: int
    width: int
    is_last: bool

    def enter(self, x: Tensor) -> Tensor:
        """Pass on what every process has; its gradient is summed over them."""

    def gather(self, logits: Tensor) -> Tensor:
        """Return the logits of all rows, (..., V), from those here."""

    def sum_(self, values: Tensor) -> Tensor:
        """Sum over the processes, in place."""

    def max_(self, values: Tensor) -> Tensor:
        """Take the maximum over the processes, in place."""


class TokenShare(Protocol):
    """One process's tokens of rows that are divided over processes."""

    def enter(
        self, x: Tensor, masks: dict[Any, Any], inputs: dict[str, Any]
    ) -> tuple[Tensor, dict[Any, Any], dict[str, Any]]:
        """Cut what goes into a stack of blocks: hidden states, masks and further arguments."""

    def gather(self, x: Tensor) -> Tensor:
        """Return all tokens, (B, T, ...), from those of this process."""


# Length of the rows -> this process's share; None where they are not divided.
TokenCut = Callable[[int], TokenShare | None]
