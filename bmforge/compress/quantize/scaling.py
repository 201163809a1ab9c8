"""SmoothQuant and AWQ: columns that matter are made larger before they are rounded.

Source: Xiao et al., "SmoothQuant" (2022), equation 4; Lin et al., "AWQ" (2023), the search over
powers of the mean size of activations, without clipping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.compress.calibrate import BlockRun, calibrate_blocks
from bmforge.compress.quantize.config import QuantizeConfig
from bmforge.compress.quantize.fold import Fold, find_folds, fold_
from bmforge.compress.quantize.place import remember_, store_block_
from bmforge.compress.rounding import round_matrix
from bmforge.compress.statistics import InputSizes
from bmforge.logging import get_logger
from bmforge.nn.packing import QuantSpec

__all__ = ["awq_scales", "quantize_scaled_", "smooth_scales"]

_SMALLEST = 1e-5


def quantize_scaled_(
    model: nn.Module,
    config: QuantizeConfig,
    specs: Mapping[str, QuantSpec],
    batches: Sequence[Any],
) -> None:
    """Scale and round the blocks of a model, each on the quantised ones before.

    Layers whose inputs come from nothing that could take a scale are only rounded.

    Args:
        model: in memory.
        config: the method and its numbers.
        specs: name of a module -> how it is rounded.
        batches: texts.
    """
    scaled: list[str] = []

    def visit(run: BlockRun) -> None:
        for fold in find_folds(run):
            found: InputSizes | None = run.statistics.get(fold.targets[0].name)
            if found is None:
                continue
            if config.method == "smooth":
                scales = smooth_scales(fold, found, config.strength)
            else:
                scales = awq_scales(fold, found, specs, config.grid)
            if fold_(run, fold, fold.settle(scales)):
                scaled.extend(matrix.name for matrix in fold.targets)
        run.statistics.clear()
        store_block_(model, run.matrices, specs)

    calibrate_blocks(
        model, batches, visit, lambda _: InputSizes(), where=tuple(specs), title="quantise"
    )
    remember_(model, specs)
    get_logger().info(
        "%s: what goes into %d of %d layers was scaled", config.method, len(scaled), len(specs)
    )


def smooth_scales(fold: Fold, found: InputSizes, strength: float) -> Tensor:
    """Return by how much columns of weights grow: ``max|x|^strength / max|w|^(1 - strength)``.

    Shape:
        returns (columns,)
    """
    assert found.largest is not None
    weights = [matrix.read().abs().amax(0).to(found.largest.dtype) for matrix in fold.targets]
    largest = torch.stack(weights).amax(0).clamp(min=_SMALLEST)
    return (found.largest.pow(strength) / largest.pow(1 - strength)).clamp(min=_SMALLEST)


def awq_scales(fold: Fold, found: InputSizes, specs: Mapping[str, QuantSpec], grid: int) -> Tensor:
    """Return the power of the mean sizes of inputs whose rounded products err least.

    Shape:
        returns (columns,)
    """
    means, x = found.means, found.sample()
    best, least = torch.ones_like(means), float("inf")
    for number in range(grid):
        scales = means.pow(number / grid).clamp(min=1e-4)
        scales = fold.settle(scales / (scales.max() * scales.min()).sqrt())
        error = 0.0
        for matrix in fold.targets:
            plain = matrix.read().to(x.dtype)
            rounded = round_matrix(plain * scales, specs[matrix.owner]) / scales
            error += float((x @ (rounded - plain).t()).square().sum())
        if error < least:
            best, least = scales, error
    return best
