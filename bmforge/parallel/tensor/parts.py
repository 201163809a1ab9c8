"""How each style of module computes where tensor parallelism has cut it; see `tensor.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from bmforge.device import fork_random
from bmforge.parallel.collectives import (
    all_gather,
    gather_tokens,
    own_gradient,
    sum_backward,
    sum_forward,
    sum_scatter_tokens,
    take_tokens,
)

__all__ = ["APPLY", "TensorGroup", "draw_apart_", "is_mixture", "view_here"]


class TensorGroup:
    """The processes that share blocks, and what goes on between them.

    Attributes:
        tokens: how many a row has, while each process keeps its share of them between parts; None
            while all have all.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.tokens: int | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()

    @property
    def size(self) -> int:
        return self.mesh.size()

    def sum_backward(self, x: Tensor) -> Tensor:
        return sum_backward(x, self.group)

    def sum_forward(self, x: Tensor) -> Tensor:
        return sum_forward(x, self.group)

    def enter(self, x: Tensor) -> Tensor:
        """What a part of a block begins with: all tokens, on every process."""
        if self.tokens is None:
            return sum_backward(x, self.group)
        return gather_tokens(x, self.group, summed=True)[:, : self.tokens]

    def leave(self, x: Tensor) -> Tensor:
        """What a part ends with: the processes' parts summed."""
        if self.tokens is None:
            return sum_forward(x, self.group)
        return sum_scatter_tokens(self.pad(x), self.group)

    def take(self, x: Tensor) -> Tensor:
        """This process's share of tokens that all have."""
        return take_tokens(self.pad(x), self.group)

    def restore(self, x: Tensor) -> Tensor:
        """All tokens from everybody's shares, for what all do alike."""
        return gather_tokens(x, self.group, summed=False)[:, : self.tokens]

    def pad(self, x: Tensor) -> Tensor:
        """Lengthen (B, T, D) by zeros, which nobody looks at, until all shares are equal."""
        rest = -x.shape[1] % self.size
        return F.pad(x, (0, 0, 0, rest)) if rest else x

    def view_between(self, parameter: Tensor) -> Tensor:
        """A parameter used between parts: with divided tokens by each process for its own."""
        local = view_here(parameter)
        return local if self.tokens is None else sum_backward(local, self.group)

    def view_of_heads(self, parameter: Tensor) -> Tensor:
        """A whole parameter that every process uses for its heads."""
        return sum_backward(view_here(parameter), self.group)

    def view_shared_head(self, heads: int, parameter: Tensor) -> Tensor:
        """The rows of the one head, of fewer than processes, that this process needs."""
        rows = parameter.shape[0] // heads
        first = self.rank * heads // self.size * rows
        return self.view_of_heads(parameter)[first : first + rows]


def view_here(parameter: Tensor) -> Tensor:
    """What is here of a parameter that is cut, or all of one that is not."""
    if not isinstance(parameter, DTensor):
        return parameter
    local = parameter.to_local()
    is_whole = all(placement.is_replicate() for placement in parameter.placements)
    return own_gradient(local) if is_whole else local


def is_mixture(module: nn.Module) -> bool:
    """Tell a mixture of experts, which says itself where its parts end, from attention and MLP."""
    return hasattr(module, "leave")


def _apply_part_(module: Any, tensor: TensorGroup) -> None:
    """Set what a part of a block begins with."""
    if is_mixture(module):
        _apply_mixture_(module, tensor)
    else:
        module.enter = tensor.enter
    if hasattr(module, "enter_memory"):
        module.enter_memory = tensor.sum_backward
    if hasattr(module, "head_share"):
        module.head_share = (tensor.rank, tensor.size)
    if getattr(module, "dropout", 0.0):
        draw_apart_(module, tensor)


def _apply_mixture_(module: Any, tensor: TensorGroup) -> None:
    """A mixture of experts routes all tokens alike on every process; only its experts are cut."""
    module.enter, module.leave = tensor.sum_backward, tensor.sum_forward
    inner = module.forward

    def forward(x: Tensor) -> Any:
        if tensor.tokens is None:
            return inner(x)
        out, logits = inner(tensor.restore(x))
        return tensor.take(out), logits

    module.forward = forward


def draw_apart_(module: nn.Module, tensor: TensorGroup) -> None:
    """Let a module draw its own random numbers on every process, and leave the rest in step.

    The seed comes from the common generator, so recomputing draws the same again.
    """
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return inner(*args, **kwargs)
        with fork_random(tensor.rank):
            return inner(*args, **kwargs)

    module.forward = forward  # type: ignore[method-assign]


def _apply_row_(module: Any, tensor: TensorGroup) -> None:
    """Sum the processes' products, then add the bias once."""

    def forward(x: Tensor) -> Tensor:
        out = tensor.leave(F.linear(x, module.weight.to(x.dtype)))
        return out if module.bias is None else out + module.bias

    module.forward = forward


def _apply_embedding_(module: nn.Embedding, tensor: TensorGroup) -> None:
    """Look up the rows that are here; the others' are zeros."""
    first = tensor.rank * -(-module.num_embeddings // tensor.size)

    def forward(ids: Tensor) -> Tensor:
        rows = module.weight.shape[0]
        here = (ids >= first) & (ids < first + rows)
        padding = module.padding_idx
        if padding is not None:
            padding = padding - first if first <= padding < first + rows else None
        found = F.embedding((ids - first).where(here, 0), module.weight, padding)
        return tensor.sum_forward(found * here[..., None])

    module.forward = forward  # type: ignore[method-assign]


class _Vocab:
    """See `nn.cuts.VocabCut`."""

    def __init__(self, rows: int, tensor: TensorGroup) -> None:
        self.group, self.rows, self.width = tensor.group, rows, -(-rows // tensor.size)
        self.first = tensor.rank * self.width
        self.is_last = tensor.rank == tensor.size - 1

    def enter(self, x: Tensor) -> Tensor:
        return sum_backward(x, self.group)

    def gather(self, logits: Tensor) -> Tensor:
        return _GatherLogits.apply(logits, self)

    def sum_(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self.group)
        return values

    def max_(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values


class _GatherLogits(torch.autograd.Function):
    """All columns from those here; processes go on alike, so each keeps its columns' gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, vocab: _Vocab) -> Tensor:
        ctx.vocab, ctx.here = vocab, logits.shape[-1]
        padded = F.pad(logits, (0, vocab.width - ctx.here))
        return all_gather(padded, vocab.group, -1)[..., : vocab.rows]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].narrow(-1, ctx.vocab.first, ctx.here), None


def _apply_head_(module: Any, tensor: TensorGroup) -> None:
    """Let a language model's head know its rows."""
    module.vocab = _Vocab(module.weight.shape[0], tensor)


APPLY: dict[str, Callable[[Any, TensorGroup], None]] = {
    "part": _apply_part_,
    "row": _apply_row_,
    "embedding": _apply_embedding_,
    "head": _apply_head_,
}
