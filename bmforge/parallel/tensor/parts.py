"""How each style of module computes where tensor parallelism has cut it; see `tensor.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
from bmforge.surgery import wrap_forward_

__all__ = ["APPLY", "TensorGroup", "draw_apart_", "hide", "is_mixture", "view_here"]


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
    wrap_forward_(module, partial(_mix_all_tokens, tensor), "part")


def _mix_all_tokens(tensor: TensorGroup, inner: Callable[..., Any], x: Tensor) -> Any:
    if tensor.tokens is None:
        return inner(x)
    out, logits = inner(tensor.restore(x))
    return tensor.take(out), logits


def draw_apart_(module: nn.Module, tensor: TensorGroup) -> None:
    """Let a module draw its own random numbers on every process, and leave the rest in step.

    The seed comes from the common generator, so recomputing draws the same again.
    """
    wrap_forward_(module, partial(_draw_apart, module, tensor.rank), "draws")


def _draw_apart(
    module: nn.Module, rank: int, inner: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    if not module.training:
        return inner(*args, **kwargs)
    with fork_random(rank):
        return inner(*args, **kwargs)


def hide(parameter: Tensor) -> None:
    """What a module sees of its bias where the bias is added after the processes' sum."""


def _apply_row_(module: Any, tensor: TensorGroup) -> None:
    """Sum the processes' products, then add the bias once.

    The module makes its product itself, however its weight is kept, without its bias (`hide`); what
    stands beside it has joined the product when this hook, the last one, runs.
    """
    module.register_forward_hook(partial(_sum_products, tensor))


def _sum_products(tensor: TensorGroup, module: Any, args: Any, out: Tensor) -> Tensor:
    out = tensor.leave(out)
    return out if module.bias is None else out + tensor.view_between(module.bias)


def _apply_embedding_(module: nn.Embedding, tensor: TensorGroup) -> None:
    """Look up the rows that are here; the others' are zeros."""
    width = -(-module.num_embeddings // tensor.size)
    first = tensor.rank * width
    padding = module.padding_idx
    if padding is not None:
        module.padding_idx = padding - first if first <= padding < first + width else None
    wrap_forward_(module, partial(_look_up_here, module, tensor, first), "part")


def _look_up_here(
    module: nn.Embedding, tensor: TensorGroup, first: int, inner: Callable[..., Any], ids: Tensor
) -> Tensor:
    here = (ids >= first) & (ids < first + module.weight.shape[0])
    found = inner((ids - first).where(here, 0))
    return tensor.sum_forward(found * here[..., None])


class _Vocab:
    """See `nn.shard_hooks.VocabCut`."""

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


def _apply_gate_(module: Any, tensor: TensorGroup) -> None:
    """Let gates of what is cut know which share of it is here."""
    module.share = (tensor.rank, tensor.size)


APPLY: dict[str, Callable[[Any, TensorGroup], None]] = {
    "part": _apply_part_,
    "row": _apply_row_,
    "embedding": _apply_embedding_,
    "head": _apply_head_,
    "gate": _apply_gate_,
}
