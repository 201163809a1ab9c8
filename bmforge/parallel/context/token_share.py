"""Assignment of the tokens of a sequence to processes, and collectives that use it.

If the length is not divisible by the number of processes, shares differ by one token. Blocks
therefore never see padding; only the buffers of collectives are padded. `divide.py` uses this
module.
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

__all__ = ["Chunk", "MaskWithShare", "TokenCut", "TokenShare"]


class Chunk(NamedTuple):
    """Contiguous range of tokens that belongs to one process.

    Args:
        number: index among all chunks of the sequence.
        start: index of the first token in the sequence.
        end: index after the last token in the sequence.
        offset: index of the first token among the process's own tokens.
    """

    number: int
    start: int
    end: int
    offset: int

    @property
    def own(self) -> slice:
        """Slice of this chunk within the process's own tokens."""
        return slice(self.offset, self.offset + self.end - self.start)


@dataclass(frozen=True)
class TokenShare:
    """Assignment of a sequence's tokens to processes; implements `nn.shard_hooks.TokenAssignment`.

    Args:
        group: process group.
        length: length T of the whole sequence.
        zigzag: True to assign two chunks to each process, one counted from each end of the
            sequence.
        unit: the chunk lengths are multiples of this number if the sequence length is (the
            tensor-parallel size with sequence parallelism, else 1).
        by_heads: True if attention shards heads and computes whole sequences (the method
            "ulysses").
    """

    group: dist.ProcessGroup
    length: int
    zigzag: bool = False
    unit: int = 1
    by_heads: bool = False

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        return self.group.rank()

    def chunks_of(self, rank: int) -> list[Chunk]:
        """Return the non-empty chunks that are assigned to a rank."""
        count = self.size * (2 if self.zigzag else 1)
        unit = 1 if self.length % self.unit else self.unit
        base, remainder = divmod(self.length // unit, count)
        chunks: list[Chunk] = []
        # An early and a late chunk: with a causal mask, a query's work grows with its position, and
        # the sum over both chunks is equal for all processes.
        for number in (rank, count - 1 - rank) if self.zigzag else (rank,):
            start, end = ((n * base + min(n, remainder)) * unit for n in (number, number + 1))
            if end > start:
                chunks.append(Chunk(number, start, end, sum(c.end - c.start for c in chunks)))
        return chunks

    @cached_property
    def mine(self) -> list[Chunk]:
        """Token chunks of this process."""
        return self.chunks_of(self.rank)

    @cached_property
    def counts(self) -> list[int]:
        """Number of tokens of every process."""
        return [sum(c.end - c.start for c in self.chunks_of(r)) for r in range(self.size)]

    @property
    def width(self) -> int:
        """Padded number of tokens per process in collectives: the largest count of any process."""
        return max(self.counts)

    def pad(self, x: Tensor, dim: int) -> Tensor:
        """Pad this process's tokens to `width` with zeros."""
        missing = self.width - x.shape[dim]
        if not missing:
            return x
        return torch.cat((x, x.new_zeros(*x.shape[:dim], missing, *x.shape[dim + 1 :])), dim)

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """Select this process's tokens of a full sequence; the gradient in backward is partial."""
        return torch.cat([x.narrow(dim, c.start, c.end - c.start) for c in self.mine], dim)

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """All-gather the tokens in sequence order; backward sums the gradients of all processes.

        Comm: one all-gather forward, one reduce-scatter backward.
        """
        return _Gather.apply(x, self, dim)

    def order(self, x: Tensor, dim: int) -> Tensor:
        """Reorder all-gathered tokens (`width` per process) into sequence order."""
        places = {c.number: (r, c) for r in range(self.size) for c in self.chunks_of(r)}
        parts = [
            x.narrow(dim, rank * self.width + chunk.offset, chunk.end - chunk.start)
            for _, (rank, chunk) in sorted(places.items())
        ]
        return torch.cat(parts, dim)

    def spread(self, x: Tensor, dim: int) -> Tensor:
        """Inverse of `order`: split a full sequence into padded shares of `width` tokens each."""
        parts = []
        for rank, count in enumerate(self.counts):
            parts += [x.narrow(dim, c.start, c.end - c.start) for c in self.chunks_of(rank)]
            missing = self.width - count
            if missing:
                parts.append(x.new_zeros(*x.shape[:dim], missing, *x.shape[dim + 1 :]))
        return torch.cat(parts, dim)

    def shard_inputs(
        self, x: Tensor, masks: dict[Any, Any], inputs: dict[str, Any]
    ) -> tuple[Tensor, dict[Any, Any], dict[str, Any]]:
        """Shard the inputs of a stack of blocks: hidden states, masks, biases and rotary tables.

        Args:
            x: hidden states, (B, T, D).
            masks: dict whose values are masks (B or 1, 1, T or 1, S), None, or other mask objects,
                which are not sharded.
            inputs: further arguments of the blocks; `rope`, `local_rope` and `bias`, a dict of
                biases (B or 1, N, T, S), are sharded.
        """
        inputs = dict(inputs)
        for name in ("rope", "local_rope"):
            if inputs.get(name) is not None:
                inputs[name] = tuple(self.take(table, 2) for table in inputs[name])
        inputs["bias"] = {key: self._cut_bias(bias) for key, bias in inputs["bias"].items()}
        rows = {key: MaskWithShare(self._cut_mask(mask), self) for key, mask in masks.items()}
        return self.take(x), rows, inputs

    def _cut_bias(self, bias: Tensor) -> Tensor:
        """Return the part of a bias for this process's tokens or, with `by_heads`, heads."""
        if not self.by_heads:
            return self.take(bias, 2)
        heads = bias.shape[1] // self.size
        return bias.narrow(1, self.rank * heads, heads)

    def _cut_mask(self, mask: Any) -> Any:
        """Return the mask rows of this process's tokens."""
        keeps_all = self.by_heads or not isinstance(mask, Tensor) or mask.shape[2] == 1
        return mask if keeps_all else self.take(mask, 2)


class MaskWithShare(NamedTuple):
    """Attention mask together with the assignment of tokens to processes.

    Args:
        mask: mask of this process's queries and all keys; the whole mask if attention is sharded by
            heads or the mask is the same for all queries.
        share: token assignment of the sequence.
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
    """Creates the `TokenShare` of any sequence length; has all its fields except `length`."""

    group: dist.ProcessGroup
    zigzag: bool
    unit: int
    by_heads: bool

    def __call__(self, length: int) -> TokenShare | None:
        """Return the assignment for `length` tokens; None if there are fewer tokens than processes.

        Raises:
            ShapeError: sequence parallelism cannot divide the shares further.
        """
        if self.unit > 1 and length % self.unit and torch.is_grad_enabled():
            raise ShapeError(
                f"sequence_parallel=True needs a number of tokens divisible by tp={self.unit}, "
                f"but a batch has {length}. Pad the sequences, or leave sequence_parallel out."
            )
        # A process without tokens would run its blocks on empty tensors.
        if length < self.group.size() * self.unit:
            return None
        return TokenShare(self.group, length, self.zigzag, self.unit, self.by_heads)
