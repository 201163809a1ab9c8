"""Tensor-parallel computation for each sharding style; see `sharding.py`."""

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

__all__ = [
    "APPLY",
    "TensorGroup",
    "add_up_",
    "use_separate_random_numbers_",
    "hide_bias",
    "is_mixture",
    "view_here",
]


class TensorGroup:
    """Tensor-parallel process group and its collectives.

    Attributes:
        tokens: sequence length while the tokens are sharded between sublayers; None while they
            are replicated.
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

    def gather_input(self, x: Tensor) -> Tensor:
        """All-gather the sharded tokens of `x`: every rank gets the sublayer's full input."""
        if self.tokens is None:
            return sum_backward(x, self.group)
        return gather_tokens(x, self.group, summed=True)[:, : self.tokens]

    def reduce_output(self, x: Tensor) -> Tensor:
        """Return the output of a sublayer: the sum of all partial results."""
        if self.tokens is None:
            return sum_forward(x, self.group)
        # A reduce-scatter needs equal shares; `gather_input` and `restore` cut the padding off
        # again.
        return sum_scatter_tokens(self.pad(x), self.group)

    def take(self, x: Tensor) -> Tensor:
        """Return this rank's shard of a replicated tensor's tokens."""
        return take_tokens(self.pad(x), self.group)

    def restore(self, x: Tensor) -> Tensor:
        """All-gather the tokens, for a module that all ranks compute in full."""
        return gather_tokens(x, self.group, summed=False)[:, : self.tokens]

    def pad(self, x: Tensor) -> Tensor:
        """Pad (B, T, D) with zeros to a length that is divisible by the group size."""
        padding = -x.shape[1] % self.size
        return F.pad(x, (0, 0, 0, padding)) if padding else x

    def view_between(self, parameter: Tensor) -> Tensor:
        """Return a parameter used between sublayers; sums its gradient if tokens are sharded."""
        local = view_here(parameter)
        # Each process uses the parameter for its own tokens only, so its gradient is a partial sum.
        return local if self.tokens is None else sum_backward(local, self.group)

    def view_of_heads(self, parameter: Tensor) -> Tensor:
        """Return a replicated parameter that is used for this rank's heads; sums its gradient."""
        return sum_backward(view_here(parameter), self.group)

    def view_shared_head(self, heads: int, parameter: Tensor) -> Tensor:
        """Return the rows of this rank's KV head if there are fewer heads than processes."""
        rows = parameter.shape[0] // heads
        first = self.rank * heads // self.size * rows
        return self.view_of_heads(parameter)[first : first + rows]


def view_here(parameter: Tensor) -> Tensor:
    """Return the local shard of a sharded parameter, or a replicated parameter unchanged."""
    if not isinstance(parameter, DTensor):
        return parameter
    local = parameter.to_local()
    is_whole = all(placement.is_replicate() for placement in parameter.placements)
    return own_gradient(local) if is_whole else local


def is_mixture(module: nn.Module) -> bool:
    """Return True if a module is an MoE layer, which has its own `output_fn`."""
    return hasattr(module, "output_fn")


def _apply_part_(module: Any, tensor: TensorGroup) -> None:
    """Set the collectives at the input and output of a sublayer."""
    if is_mixture(module):
        _apply_mixture_(module, tensor)
    else:
        module.input_fn = tensor.gather_input
    if hasattr(module, "memory_fn"):
        module.memory_fn = tensor.sum_backward
    if hasattr(module, "head_share"):
        module.head_share = (tensor.rank, tensor.size)
    if getattr(module, "dropout", 0.0):
        use_separate_random_numbers_(module, tensor)


def _apply_mixture_(module: Any, tensor: TensorGroup) -> None:
    """Set the collectives of an MoE layer with replicated routing and sharded experts."""
    module.input_fn, module.output_fn = tensor.sum_backward, tensor.sum_forward
    wrap_forward_(module, partial(_run_mixture_on_all_tokens, tensor), "part")


def _run_mixture_on_all_tokens(tensor: TensorGroup, inner: Callable[..., Any], x: Tensor) -> Any:
    if tensor.tokens is None:
        return inner(x)
    # The router sees all tokens on every process, so that all choose the same experts.
    out, logits = inner(tensor.restore(x))
    return tensor.take(out), logits


def _apply_whole_(module: nn.Module, tensor: TensorGroup) -> None:
    """Make a replicated sublayer read all tokens, and return the tokens of this rank."""
    wrap_forward_(module, partial(_run_all_tokens, tensor), "part")


def _run_all_tokens(
    tensor: TensorGroup, inner: Callable[..., Tensor], x: Tensor, /, *args: Any, **kwargs: Any
) -> Tensor:
    if tensor.tokens is None:
        return inner(x, *args, **kwargs)
    return tensor.take(inner(tensor.restore(x), *args, **kwargs))


def use_separate_random_numbers_(module: nn.Module, tensor: TensorGroup) -> None:
    """Make a module use different random numbers on each rank, for example for dropout.

    The seed comes from the default generator, whose state is the same on all ranks; recomputation
    therefore repeats the same numbers.
    """
    wrap_forward_(module, partial(_draw_apart, module, tensor.rank), "draws")


def _draw_apart(
    module: nn.Module, rank: int, inner: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    if not module.training:
        return inner(*args, **kwargs)
    with fork_random(rank):
        return inner(*args, **kwargs)


def hide_bias(parameter: Tensor) -> None:
    """Return None as a layer's bias during its product; the bias is added after the all-reduce."""


def add_up_(module: Any, tensor: TensorGroup) -> None:
    """All-reduce the partial products of a row-sharded layer, then add the bias once.

    The module computes its product without bias (`hide_bias`), in any weight format. This hook runs
    last, after attached adapters have added their outputs.
    """
    module.register_forward_hook(partial(_sum_products, tensor))


def _sum_products(tensor: TensorGroup, module: Any, args: Any, out: Tensor) -> Tensor:
    # The bias comes after the sum; before it, the bias would be added once per process.
    out = tensor.reduce_output(out)
    return out if module.bias is None else out + tensor.view_between(module.bias)


def _apply_embedding_(module: nn.Embedding, tensor: TensorGroup) -> None:
    """Make a vocabulary-sharded embedding look up its own tokens, and all-reduce the results."""
    # Shards are those of a DTensor: ceil(V / size) rows, and fewer on the last processes.
    width = -(-module.num_embeddings // tensor.size)
    first = tensor.rank * width
    padding = module.padding_idx
    if padding is not None:
        module.padding_idx = padding - first if first <= padding < first + width else None
    wrap_forward_(module, partial(_look_up_here, module, tensor, first), "part")


def _look_up_here(
    module: nn.Embedding, tensor: TensorGroup, first: int, inner: Callable[..., Any], ids: Tensor
) -> Tensor:
    is_local = (ids >= first) & (ids < first + module.weight.shape[0])
    # Other processes' tokens read row 0, which is multiplied by 0, as an index must be valid.
    rows = inner((ids - first).where(is_local, 0))
    return tensor.sum_forward(rows * is_local[..., None])


class _Vocab:
    """Vocabulary-parallel output head; implements `nn.shard_hooks.VocabCut`."""

    def __init__(self, rows: int, tensor: TensorGroup) -> None:
        self.group, self.rows, self.width = tensor.group, rows, -(-rows // tensor.size)
        self.first = tensor.rank * self.width
        self.is_last = tensor.rank == tensor.size - 1

    def sum_backward(self, x: Tensor) -> Tensor:
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
    """All-gathers the vocabulary dim; backward keeps the gradient of this rank's columns."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, vocab: _Vocab) -> Tensor:
        ctx.vocab, ctx.here = vocab, logits.shape[-1]
        # The last processes may have fewer columns, and an all-gather needs equal widths.
        padded = F.pad(logits, (0, vocab.width - ctx.here))
        return all_gather(padded, vocab.group, -1)[..., : vocab.rows]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # The gathered logits are used in the same way by all processes, so the gradient is not
        # summed.
        return grads[0].narrow(-1, ctx.vocab.first, ctx.here), None


def _apply_head_(module: Any, tensor: TensorGroup) -> None:
    """Shard the vocabulary of a language model's head."""
    module.vocab = _Vocab(module.weight.shape[0], tensor)


def _apply_gate_(module: Any, tensor: TensorGroup) -> None:
    """Set the shard (rank, size) of a gate, which scales a sharded dim."""
    module.share = (tensor.rank, tensor.size)


APPLY: dict[str, Callable[[Any, TensorGroup], None]] = {
    "part": _apply_part_,
    "whole": _apply_whole_,
    "row": add_up_,
    "embedding": _apply_embedding_,
    "head": _apply_head_,
    "gate": _apply_gate_,
}
