"""Folds per-channel scales into a norm or linear layer, and the inverse into its consumers.

Dividing a layer's input channels by s and multiplying its weight columns by s leaves the output
unchanged. The division is applied to the module that produces the channels: a norm's weight, or the
rows of a linear layer. A fold that changes the block's output (because the norm has other
consumers, or an activation is in between) is reverted.
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
from bmforge.device import accumulation_dtype
from bmforge.nn.low_rank import linear_sizes
from bmforge.nn.moe import Experts

__all__ = ["Fold", "find_folds", "fold_", "use_fp32_copies"]

# Last name parts of (producer, consumer); the producer's output rows are the consumer's input
# columns.
_PAIRS = (("v_proj", "o_proj"), ("up_proj", "down_proj"))
_TOLERANCE = 1e-3  # relative to the largest output


@dataclass
class Fold:
    """A layer and the matrices that read its output; scales of channels can be moved between them.

    Args:
        source: norm or linear layer.
        targets: matrices with one column per channel.
        head_dim: head size if several heads of `targets` share a head of `source`; otherwise 0.
    """

    source: nn.Module
    targets: list[Matrix]
    head_dim: int = 0

    def settle(self, scales: Tensor) -> Tensor:
        """Return scales, (columns,), that are equal for heads that share source channels.

        The common value is the maximum over these heads.
        """
        shared = self._by_source(scales)
        if shared.numel() == scales.numel():
            return scales
        heads = shared.view(-1, 1, self.head_dim)
        return heads.expand(-1, scales.numel() // shared.numel(), -1).reshape(-1)

    def _by_source(self, scales: Tensor) -> Tensor:
        """Return the divisor of each source channel, the maximum over the heads that share it."""
        weight: Any = self.source.weight
        rows = weight.shape[0] if not hasattr(self.source, "nf") else weight.shape[1]
        if rows == scales.numel():
            return scales
        times = scales.numel() // rows
        return scales.view(-1, times, self.head_dim).amax(1).flatten()

    def tensors(self) -> list[Tensor]:
        """Return all tensors that `scale_` changes."""
        matrices = [matrix.parameter for matrix in self.targets]
        return [t.detach() for t in (*matrices, *self.source.parameters(recurse=False))]

    def scale_(self, scales: Tensor) -> None:
        """Multiply the targets' columns and divide the source's channels by the scales."""
        for matrix in self.targets:
            matrix.read().mul_(scales.to(matrix.read().dtype))
        divisor = self._by_source(scales)
        for key, parameter in self.source.named_parameters(recurse=False):
            values = parameter.detach()
            is_rows = key == "weight" and values.dim() == 2 and not hasattr(self.source, "nf")
            each = divisor.to(values.dtype)
            values.div_(each[:, None] if is_rows else each)


def find_folds(run: BlockRun) -> list[Fold]:
    """Return the possible folds of a block: from norms, from v to o, and from up to down_proj."""
    linear = {m.owner: m for m in run.matrices if not isinstance(m.module, (Experts, nn.Embedding))}
    outputs: list[tuple[Tensor, nn.Module]] = []
    taken: list[tuple[Tensor, Matrix]] = []
    handles = []
    for module in run.block.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 1 and not list(module.children()):
            handles.append(
                module.register_forward_hook(lambda own, args, out: outputs.append((out, own)))
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
        return []  # a layer that did not run may have the same input in another call
    folds = [
        Fold(source, targets)
        for out, source in outputs
        if (targets := [m for x, m in taken if x is out and m.read().shape[1] == out.shape[-1]])
    ]
    return folds + _find_pairs(run, linear)


def _find_pairs(run: BlockRun, linear: dict[str, Matrix]) -> list[Fold]:
    folds = []
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
                folds.append(Fold(source.module, [matrix]))
            elif width and columns % rows == 0 and rows % width == 0:
                folds.append(Fold(source.module, [matrix], width))
    return folds


@torch.no_grad()
def fold_(run: BlockRun, fold: Fold, scales: Tensor) -> bool:
    """Scale a block's weights unless that changes its output; return True if they were scaled.

    Outputs are compared in fp32, within a tolerance: in bf16, the rounding errors of the scaled
    weights would exceed any useful tolerance.

    Shape:
        scales: (columns,), above 0
    """
    if bool((scales == 1).all()):
        return True
    with use_fp32_copies(run.block):
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
def use_fp32_copies(block: nn.Module) -> Iterator[None]:
    """Context manager that replaces a block's 16-bit tensors with fp32 copies."""
    tensors = [*block.parameters(), *block.buffers()]
    originals = [(t, t.data) for t in tensors if t.is_floating_point()]
    try:
        for tensor, data in originals:
            tensor.data = data.to(accumulation_dtype(data.dtype), copy=True)
        yield
    finally:
        for tensor, data in originals:
            tensor.data = data
