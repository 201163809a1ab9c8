"""Which tokens of a row every process has, and how they come together again.

Shares differ by a token where the length does not divide, so that no block ever sees padding; only
what collectives carry is filled up. Used by `context.py`, which says what for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bmforge.errors import ShapeError
from bmforge.parallel.collectives import all_gather, reduce_scatter

__all__ = ["Chunk", "Rows", "TokenCut", "TokenShare"]


class Chunk(NamedTuple):
    """Neighbouring tokens that one process has.

    Args:
        number: of all chunks of the row.
        start: its first token in the row.
        end: behind its last one.
        offset: where it begins among the process's own tokens.
    """

    number: int
    start: int
    end: int
    offset: int

    @property
    def own(self) -> slice:
        """Its place among the process's own tokens."""
        return slice(self.offset, self.offset + self.end - self.start)


@dataclass(frozen=True)
class TokenShare:
    """Which tokens of rows of one length every process has; this is `nn.shard_hooks.TokenShare`.

    Args:
        group: the processes.
        length: T, of whole rows.
        zigzag: two chunks for every process, one counted from each end.
        unit: chunks are multiples of it, where the length is.
        by_heads: attention cuts heads and sees whole rows (the method "ulysses").
    """

    group: dist.ProcessGroup
    length: int
    zigzag: bool = False
    unit: int = 1
    by_heads: bool = False

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """The number of this one."""
        return self.group.rank()

    def chunks_of(self, rank: int) -> list[Chunk]:
        """Return the chunks of a process, without empty ones."""
        count = self.size * (2 if self.zigzag else 1)
        unit = 1 if self.length % self.unit else self.unit
        base, rest = divmod(self.length // unit, count)
        found: list[Chunk] = []
        for number in (rank, count - 1 - rank) if self.zigzag else (rank,):
            start, end = ((n * base + min(n, rest)) * unit for n in (number, number + 1))
            if end > start:
                found.append(Chunk(number, start, end, sum(c.end - c.start for c in found)))
        return found

    @cached_property
    def mine(self) -> list[Chunk]:
        """This process's chunks."""
        return self.chunks_of(self.rank)

    @cached_property
    def counts(self) -> list[int]:
        """How many tokens every process has."""
        return [sum(c.end - c.start for c in self.chunks_of(r)) for r in range(self.size)]

    @property
    def width(self) -> int:
        """The most tokens that a process has: what collectives carry of each."""
        return max(self.counts)

    def pad(self, x: Tensor, dim: int) -> Tensor:
        """Fill up this process's tokens to `width` with zeros."""
        rest = self.width - x.shape[dim]
        if not rest:
            return x
        return torch.cat((x, x.new_zeros(*x.shape[:dim], rest, *x.shape[dim + 1 :])), dim)

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """Pick this process's tokens out of all; backward is a part of the gradient."""
        return torch.cat([x.narrow(dim, c.start, c.end - c.start) for c in self.mine], dim)

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return all tokens from this process's own; the gradients of all are summed.

        Comm: one all-gather forward, one reduce-scatter backward.
        """
        return _Gather.apply(x, self, dim)

    def order(self, x: Tensor, dim: int) -> Tensor:
        """Bring `width` tokens of every process, one behind the other, into the row's order."""
        places = {c.number: (r, c) for r in range(self.size) for c in self.chunks_of(r)}
        parts = [
            x.narrow(dim, rank * self.width + chunk.offset, chunk.end - chunk.start)
            for _, (rank, chunk) in sorted(places.items())
        ]
        return torch.cat(parts, dim)

    def spread(self, x: Tensor, dim: int) -> Tensor:
        """Undo `order`, with zeros where a process has fewer tokens."""
        parts = []
        for rank, count in enumerate(self.counts):
            parts += [x.narrow(dim, c.start, c.end - c.start) for c in self.chunks_of(rank)]
            rest = self.width - count
            if rest:
                parts.append(x.new_zeros(*x.shape[:dim], rest, *x.shape[dim + 1 :]))
        return torch.cat(parts, dim)

    def enter(
        self, x: Tensor, masks: dict[Any, Any], inputs: dict[str, Any]
    ) -> tuple[Tensor, dict[Any, Any], dict[str, Any]]:
        """Cut what goes into a stack of blocks; once for all blocks, which share it.

        Args:
            x: hidden states, (B, T, D).
            masks: any key -> mask (B or 1, 1, T or 1, S), None, or one of another kind.
            inputs: further arguments of the blocks; `rope` is cut, and `bias`, any key -> a bias
                (B or 1, N, T, S).
        """
        inputs, rope = dict(inputs), inputs.get("rope")
        if rope is not None:
            inputs["rope"] = tuple(self.take(table, 2) for table in rope)
        inputs["bias"] = {key: self._cut_bias(bias) for key, bias in inputs["bias"].items()}
        rows = {key: Rows(self._cut_mask(mask), self) for key, mask in masks.items()}
        return self.take(x), rows, inputs

    def _cut_bias(self, bias: Tensor) -> Tensor:
        """Return a bias of this process's tokens, or of all tokens for its heads."""
        if not self.by_heads:
            return self.take(bias, 2)
        heads = bias.shape[1] // self.size
        return bias.narrow(1, self.rank * heads, heads)

    def _cut_mask(self, mask: Any) -> Any:
        """Return a mask's rows of this process's tokens."""
        whole = self.by_heads or not isinstance(mask, Tensor) or mask.shape[2] == 1
        return mask if whole else self.take(mask, 2)


class Rows(NamedTuple):
    """What attention gets as its mask, so that it knows whose tokens it works on.

    Args:
        mask: of this process's queries and all keys; with `by_heads`, and where it is none of
            queries and keys, of all.
        share: of the row.
    """

    mask: Any
    share: TokenShare


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, share: TokenShare, dim: int) -> Tensor:
        ctx.share, ctx.dim = share, dim
        return share.order(all_gather(share.pad(x, dim), share.group, dim), dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        share, dim = ctx.share, ctx.dim
        parts = reduce_scatter(share.spread(grads[0], dim), share.group, dim)
        return parts.narrow(dim, 0, share.counts[share.rank]), None, None


@dataclass(frozen=True)
class TokenCut:
    """How a stack of blocks cuts its tokens; see `TokenShare` for the fields."""

    group: dist.ProcessGroup
    zigzag: bool
    unit: int
    by_heads: bool

    def __call__(self, length: int) -> TokenShare | None:
        """Return the shares of rows of a length; None where there is no token for everyone.

        Raises:
            ShapeError: sequence parallelism cannot divide the shares further.
        """
        if self.unit > 1 and length % self.unit and torch.is_grad_enabled():
            raise ShapeError(
                f"sequence_parallel divides tokens over tp={self.unit}, which does not divide the "
                f"{length} given. Pad the rows, or lay out without sequence_parallel."
            )
        if length < self.group.size() * self.unit:
            return None
        return TokenShare(self.group, length, self.zigzag, self.unit, self.by_heads)
