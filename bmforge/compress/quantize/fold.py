"""Scales that go through a model without changing it: from a norm, or a layer, into what follows.

If what a layer gets is divided by s, channel by channel, and the columns of its weight are
multiplied by s, nothing changes. The division goes into what made the channels: a norm's weight, or
the rows of a linear layer. Where that is not the same model (a norm whose output goes elsewhere
too, an activation between), the block says so when it is run, and the scale is taken back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.compress.calibrate import BlockRun
from bmforge.compress.matrices import Matrix
from bmforge.device import wide_dtype
from bmforge.nn.low_rank import linear_sizes
from bmforge.nn.moe import Experts

__all__ = ["Fold", "find_folds", "fold_"]

# Last parts of names: whose rows make the columns of which.
_PAIRS = (("v_proj", "o_proj"), ("up_proj", "down_proj"))
_TOLERANCE = 1e-3  # of the largest output


@dataclass
class Fold:
    """What makes channels, and the matrices that they go into.

    Args:
        source: a norm, or a linear layer.
        targets: matrices with as many columns.
        head_dim: width of a head, where heads of `targets` share those of `source`; else 0.
    """

    source: nn.Module
    targets: list[Matrix]
    head_dim: int = 0

    def settle(self, scales: Tensor) -> Tensor:
        """Return scales that heads which share channels have in common: (columns,)."""
        shared = self._by_source(scales)
        if shared.numel() == scales.numel():
            return scales
        heads = shared.view(-1, 1, self.head_dim)
        return heads.expand(-1, scales.numel() // shared.numel(), -1).reshape(-1)

    def _by_source(self, scales: Tensor) -> Tensor:
        """Return what the source is divided by."""
        weight: Any = self.source.weight
        rows = weight.shape[0] if not hasattr(self.source, "nf") else weight.shape[1]
        if rows == scales.numel():
            return scales
        times = scales.numel() // rows
        return scales.view(-1, times, self.head_dim).amax(1).flatten()

    def tensors(self) -> list[Tensor]:
        """Return all that a scale changes."""
        found = [matrix.parameter for matrix in self.targets]
        return [t.detach() for t in (*found, *self.source.parameters(recurse=False))]

    def scale_(self, scales: Tensor) -> None:
        """Multiply the columns of the targets and divide what makes them."""
        for matrix in self.targets:
            matrix.read().mul_(scales.to(matrix.read().dtype))
        divisor = self._by_source(scales)
        for key, parameter in self.source.named_parameters(recurse=False):
            values = parameter.detach()
            is_rows = key == "weight" and values.dim() == 2 and not hasattr(self.source, "nf")
            each = divisor.to(values.dtype)
            values.div_(each[:, None] if is_rows else each)


def find_folds(run: BlockRun) -> list[Fold]:
    """Return where scales may go through a block: from norms, v into o, up into down."""
    linear = {m.owner: m for m in run.matrices if not isinstance(m.module, (Experts, nn.Embedding))}
    made: list[tuple[Tensor, nn.Module]] = []
    taken: list[tuple[Tensor, Matrix]] = []
    handles = []
    for module in run.block.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 1 and not list(module.children()):
            handles.append(
                module.register_forward_hook(lambda own, args, out: made.append((out, own)))
            )
    for matrix in linear.values():
        handles.append(
            matrix.module.register_forward_pre_hook(
                lambda own, args, matrix=matrix: taken.append(((*args, None)[0], matrix))
            )
        )
    try:
        for _ in run.run(1):
            pass
    finally:
        for handle in handles:
            handle.remove()
    if {id(m) for m in linear.values()} - {id(m) for _, m in taken}:
        return []  # what did not run now may take a part another time
    folds = [
        Fold(source, targets)
        for out, source in made
        if (targets := [m for x, m in taken if x is out and m.read().shape[1] == out.shape[-1]])
    ]
    return folds + _find_pairs(run, linear)


def _find_pairs(run: BlockRun, linear: dict[str, Matrix]) -> list[Fold]:
    found = []
    for owner, matrix in linear.items():
        parent, _, last = owner.rpartition(".")
        for first, second in _PAIRS:
            source = linear.get(f"{parent}.{first}")
            if last != second or source is None:
                continue
            sizes = linear_sizes(source.module)
            assert sizes is not None
            rows, columns = sizes[1], matrix.read().shape[1]
            name = parent.removeprefix(f"{run.name}.")
            width = int(getattr(run.block.get_submodule(name), "head_dim", 0) or 0)
            if rows == columns:
                found.append(Fold(source.module, [matrix]))
            elif width and columns % rows == 0 and rows % width == 0:
                found.append(Fold(source.module, [matrix], width))
    return found


@torch.no_grad()
def fold_(run: BlockRun, fold: Fold, scales: Tensor) -> bool:
    """Apply scales to a block if that leaves its output unchanged; return True if they were.

    Whether the output is unchanged is computed in fp32: in bf16 the rounding of the scaled weights
    alone exceeds every useful tolerance.

    Shape:
        scales: (columns,), above 0
    """
    if bool((scales == 1).all()):
        return True
    with _widened(run.block):
        before = next(run.run_wide())
        fold.scale_(scales)
        change = (next(run.run_wide()) - before).abs().max()
    if not bool(change <= _TOLERANCE * before.abs().max()):
        return False
    originals = [tensor.clone() for tensor in fold.tensors()]
    fold.scale_(scales)
    if all(bool(tensor.isfinite().all()) for tensor in fold.tensors()):
        return True
    for tensor, original in zip(fold.tensors(), originals, strict=True):
        tensor.copy_(original)
    return False


@contextmanager
def _widened(block: nn.Module) -> Iterator[None]:
    """Replace the values of a block's 16-bit tensors by fp32 copies inside the context."""
    tensors = [*block.parameters(), *block.buffers()]
    originals = [(t, t.data) for t in tensors if t.is_floating_point()]
    try:
        for tensor, data in originals:
            tensor.data = data.to(wide_dtype(data.dtype), copy=True)
        yield
    finally:
        for tensor, data in originals:
            tensor.data = data
