"""SmoothQuant and AWQ: scale a layer's input channels before its weights are rounded.

Source: Xiao et al., "SmoothQuant" (2022), equation 4; Lin et al., "AWQ" (2023): the search over
powers of the mean activation magnitude, then for each group's clipping range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.compress.calibrate import BlockRun, calibrate_blocks
from bmforge.compress.quantize.block_error import block_errors
from bmforge.compress.quantize.config import QuantizeConfig
from bmforge.compress.quantize.fold import Fold, find_folds, fold_
from bmforge.compress.quantize.replace_layers import record_quantization_, store_block_
from bmforge.compress.statistics import InputSizes
from bmforge.logging import get_logger
from bmforge.nn.packing import Integers, QuantSpec, quantize_groups

__all__ = ["awq_scales", "quantize_clipped", "quantize_scaled_", "smooth_scales"]

_SMALLEST = 1e-5
# Fractions of each group's range that AWQ's second search tries; values above 1 help symmetric
# 4-bit groups, which have one more negative than positive value.
_RANGE_RATIOS = (1.0, 1.14, 1.07, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
_DAMP = 0.01  # fraction of the diagonal's mean that is added to the diagonal
_LARGEST_SCALE_RATIO = 8.0


def quantize_scaled_(
    model: nn.Module,
    config: QuantizeConfig,
    specs: Mapping[str, QuantSpec],
    batches: Sequence[Any],
) -> None:
    """Quantize a model in place, block by block, with SmoothQuant or AWQ.

    Each block is calibrated on the outputs of the quantized blocks before it. Layers are rounded
    without scaling if no norm or linear layer before them can absorb the inverse scale.

    Args:
        model: model in memory, not parallelized.
        config: method and its hyperparameters.
        specs: dict from module name to scheme.
        batches: calibration batches.
    """
    scaled: set[str] = set()

    def visit(run: BlockRun) -> None:
        scales: dict[str, Tensor] = {}
        for fold in find_folds(run):
            inputs: InputSizes | None = run.statistics.get(fold.targets[0].name)
            if inputs is None:
                continue
            if config.method == "smooth":
                new_scales = fold.settle(smooth_scales(fold, inputs, config.strength))
                unscaled = torch.ones_like(new_scales)
                new_scales = _best_scales(run, fold, specs, [unscaled, new_scales])
            else:
                new_scales = awq_scales(run, fold, inputs, specs, config.grid)
            if bool((new_scales != 1).any()) and fold_(run, fold, new_scales):
                scales |= {matrix.name: new_scales for matrix in fold.targets}
        scaled.update(scales)
        integers = None
        if config.method == "awq" and not any(specs[m.owner].outlier_ratio for m in run.matrices):
            integers = _clip_block(run, specs, scales)
        run.statistics.clear()
        store_block_(model, run.matrices, specs, integers)

    calibrate_blocks(
        model, batches, visit, lambda _: InputSizes(), where=tuple(specs), title="quantize"
    )
    record_quantization_(model, specs)
    log = get_logger().info if scaled else get_logger().warning
    log(
        "%s: scaled the inputs of %d of %d layers; the others are rounded without scaling",
        *(config.method, len(scaled), len(specs)),
    )


def _clip_block(
    run: BlockRun, specs: Mapping[str, QuantSpec], scales: Mapping[str, Tensor]
) -> dict[str, Integers]:
    """Return a dict from matrix name to integers; groups are clipped if this reduces the error.

    Args:
        run: block whose inputs were measured before it was scaled.
        specs: dict from module name to scheme.
        scales: dict from matrix name to the scales by which its columns were multiplied after the
            measurement.
    """
    integers = {}
    for matrix in run.matrices:
        inputs: InputSizes | None = run.statistics.get(matrix.name)
        spec = specs[matrix.owner]
        # 8 bits resolve the full range finely enough; clipping would only overfit the calibration
        # data.
        if inputs is None or inputs.largest is None or spec.bits == 8:
            integers[matrix.name] = quantize_groups(matrix.read(), spec)
            continue
        x = inputs.sample()
        if matrix.name in scales:
            x = x / scales[matrix.name]
        integers[matrix.name] = quantize_clipped(matrix.read(), spec, x)
    return integers


@torch.no_grad()
def quantize_clipped(matrix: Tensor, spec: QuantSpec, x: Tensor) -> Integers:
    """Quantize a matrix; each group uses the clipping range with the smallest output error.

    Shape:
        matrix: (rows, columns); x: (tokens, columns)
    """
    rows, columns = matrix.shape
    group = spec.group_of(columns)
    wide = matrix.to(x.dtype)
    grouped = x.unflatten(1, (-1, group)).transpose(0, 1)
    products = grouped.transpose(1, 2) @ grouped  # (groups, group, group)
    # Channels with tiny calibration inputs get a small weight, as in GPTQ's damping.
    diagonal = products.diagonal(dim1=1, dim2=2)
    diagonal += _DAMP * diagonal.mean()
    best, least = quantize_groups(matrix, spec), wide.new_full((rows, columns // group), torch.inf)
    for ratio in _RANGE_RATIOS:
        trial = quantize_groups(matrix, spec, ratio)
        values = trial.values.to(x.dtype).unflatten(1, (-1, group)) * trial.scales[..., None]
        if trial.minima is not None:
            values += trial.minima[..., None]
        off = (values - wide.unflatten(1, (-1, group))).transpose(0, 1)  # (groups, rows, group)
        error = ((off @ products) * off).sum(-1).t()
        is_better = error < least
        least = torch.where(is_better, error, least)
        best = _merge(best, trial, is_better, group)
    return best


def _merge(first: Integers, second: Integers, takes_second: Tensor, group: int) -> Integers:
    """Return integers with the groups of `second` where `takes_second` is True, else of `first`."""
    minima = None
    if first.minima is not None and second.minima is not None:
        minima = torch.where(takes_second, second.minima, first.minima)
    by_column = takes_second.repeat_interleave(group, 1)
    values = torch.where(by_column, second.values, first.values)
    return Integers(values, torch.where(takes_second, second.scales, first.scales), minima)


def smooth_scales(fold: Fold, inputs: InputSizes, strength: float) -> Tensor:
    """Return SmoothQuant's scales ``max|x|^strength / max|w|^(1 - strength)`` per channel.

    A channel that is zero for all calibration tokens has scale 1.

    Shape:
        returns (columns,)
    """
    assert inputs.largest is not None
    weights = [matrix.read().abs().amax(0).to(inputs.largest.dtype) for matrix in fold.targets]
    largest = torch.stack(weights).amax(0).clamp(min=_SMALLEST)
    scales = (inputs.largest.pow(strength) / largest.pow(1 - strength)).clamp(min=_SMALLEST)
    return _bound(scales, inputs.is_dead)


def awq_scales(
    run: BlockRun, fold: Fold, inputs: InputSizes, specs: Mapping[str, QuantSpec], grid: int
) -> Tensor:
    """Return AWQ's scales: the power of mean input magnitudes that minimizes the block's error.

    A channel that is zero for all calibration tokens has scale 1.

    Shape:
        returns (columns,)
    """
    means, is_dead = inputs.means, inputs.is_dead
    if bool(is_dead.all()):
        return torch.ones_like(means)
    candidates = []
    for number in range(grid):
        scales = _bound(means.pow(number / grid), is_dead)
        candidates.append(fold.settle(scales))
    return _best_scales(run, fold, specs, candidates)


def _best_scales(
    run: BlockRun, fold: Fold, specs: Mapping[str, QuantSpec], candidates: list[Tensor]
) -> Tensor:
    """Return the candidate with the smallest error of the block's output; ties select the first."""
    errors = block_errors(run, fold, specs, candidates)
    return candidates[min(range(len(errors)), key=errors.__getitem__)]


def _bound(scales: Tensor, is_dead: Tensor) -> Tensor:
    """Divide scales by their median and clamp them to 1/8 to 8; dead channels get scale 1.

    Without the division, dead channels could be much smaller or larger than the other channels of
    their group; a common factor has no other effect. Without the clamp, a channel with very small
    calibration inputs would be scaled to almost nothing.
    """
    if bool(is_dead.all()):
        return torch.ones_like(scales)
    relative = scales / scales[~is_dead].median()
    bounded = relative.clamp(1 / _LARGEST_SCALE_RATIO, _LARGEST_SCALE_RATIO)
    return torch.where(is_dead, 1.0, bounded)
