"""GPTQ: rounds matrices column by column; later columns compensate for rounding errors.

Source: Frantar et al., "GPTQ" (2022). A group's scale is computed from the updated weights when its
first column is reached, and is rounded to its storage dtype before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.compress.calibrate import BlockRun, by_block, calibrate_blocks
from bmforge.compress.columns import update_columns
from bmforge.compress.matrices import Matrix, find_matrices
from bmforge.compress.quantize.config import QuantizeConfig
from bmforge.compress.quantize.replace_layers import record_quantization_, store_block_
from bmforge.compress.statistics import Hessian
from bmforge.errors import ConfigError
from bmforge.logging import get_logger
from bmforge.nn.packing import Integers, QuantSpec, quantize_groups
from bmforge.surgery import find_repeated_blocks

__all__ = ["quantize_gptq_", "round_gptq"]

# (bits, is symmetric) -> smallest and largest integer.
_RANGES = {(8, True): (-127, 127), (8, False): (-128, 127), (4, True): (-8, 7), (4, False): (0, 15)}


class _BlockRounder:
    """Rounds the matrices of each block, and packs each layer when it is complete.

    Attributes:
        done: names of the blocks that have been changed or are being changed.
        dead: names of the matrices whose calibration inputs were all zero.
    """

    def __init__(
        self, model: nn.Module, config: QuantizeConfig, specs: Mapping[str, QuantSpec]
    ) -> None:
        self._model, self._config, self._specs = model, config, specs
        self._narrowest = _narrowest(model, specs)
        self._tokens = _TokenCheck()
        self._integers: dict[str, Integers] = {}
        self._waiting: list[Matrix] = []
        self.done: list[str] = []
        self.dead: list[str] = []

    def visit(self, run: BlockRun) -> None:
        """Round the matrices of a block."""
        if run.name not in self.done:
            _check_tokens(run, self._narrowest)
            self.done.append(run.name)
        for matrix in run.matrices:
            # Popping removes the last reference to a Hessian after the last matrix that needs it.
            hessian = run.statistics.pop(matrix.name, None)
            self._integers[matrix.name] = self._round(matrix, hessian)
        # The matrices of stacked experts are stored together.
        self._waiting.extend(run.matrices)
        ready = [m for m in self._waiting if run.is_last or m.index is None]
        self._waiting = [m for m in self._waiting if m not in ready]
        for owner in dict.fromkeys(m.owner for m in ready):
            own = [m for m in ready if m.owner == owner]
            values = {m.name: self._integers.pop(m.name) for m in own}
            store_block_(self._model, own, self._specs, values)
        if run.is_last:
            self._tokens.report()

    def _round(self, matrix: Matrix, hessian: Hessian | None) -> Integers:
        spec = self._specs[matrix.owner]
        if not self._tokens.are_enough(matrix, hessian) or hessian is None:
            return quantize_groups(matrix.read(), spec)
        if hessian.is_dead:
            self.dead.append(matrix.name)
            return quantize_groups(matrix.read(), spec)
        return round_gptq(
            matrix.read(),
            hessian,
            spec,
            damp=self._config.damp,
            block_columns=self._config.block_columns,
            name=matrix.name,
            in_place=True,
        )


def quantize_gptq_(
    model: nn.Module,
    config: QuantizeConfig,
    specs: Mapping[str, QuantSpec],
    batches: Sequence[Any],
) -> None:
    """Quantize a model with GPTQ; each block is calibrated on the quantized blocks before it.

    Args:
        model: model in memory.
        config: damping and block size.
        specs: dict from module name to scheme.
        batches: calibration batches.

    Raises:
        ConfigError: a block receives fewer tokens than its narrowest matrix has columns (raised
            before that block is changed), or a Hessian is not positive definite. The message says
            whether earlier blocks are already quantized.
    """
    rounder = _BlockRounder(model, config, specs)
    try:
        calibrate_blocks(
            model,
            batches,
            rounder.visit,
            lambda _: Hessian(),
            where=tuple(specs),
            title="quantize",
            size=Hessian.size_bytes,
        )
    except ConfigError as error:
        if not rounder.done:
            raise
        raise ConfigError(
            f"{error} The model is already quantized up to {rounder.done[-1]}. Load the model "
            "again before you retry."
        ) from error
    record_quantization_(model, specs)
    if rounder.dead:
        get_logger().warning(
            (
                "gptq: the inputs of %d matrices (%s) are zero in all calibration batches, so "
                "their weights are rounded to nearest."
            ),
            *(len(rounder.dead), ", ".join(rounder.dead[:3])),
        )


def _narrowest(model: nn.Module, specs: Mapping[str, QuantSpec]) -> dict[str, int]:
    """Return a dict from block name to the width of the block's narrowest matrix.

    Experts are considered only in blocks without other matrices.
    """
    matrices = by_block(find_matrices(model, tuple(specs)), find_repeated_blocks(model))
    return {
        name: min(m.read().shape[1] for m in [m for m in inside if m.index is None] or inside)
        for name, inside in matrices.items()
    }


def _check_tokens(run: BlockRun, narrowest: Mapping[str, int]) -> None:
    """Raise `ConfigError` if a block has fewer tokens than its narrowest matrix has columns."""
    tokens = max(statistic.tokens for statistic in run.statistics.values())
    if tokens < narrowest[run.name]:
        raise ConfigError(
            f"gptq needs at least as many calibration tokens as columns, but {run.name} "
            f"received {tokens} tokens for {narrowest[run.name]} columns. Pass more or longer "
            "batches."
        )


class _TokenCheck:
    """Checks the number of calibration tokens of matrices; logs those with too few."""

    def __init__(self) -> None:
        self._few: list[str] = []

    def are_enough(self, matrix: Matrix, hessian: Hessian | None) -> bool:
        """Return True if a matrix received at least as many tokens as it has columns."""
        enough = hessian is not None and hessian.tokens >= matrix.read().shape[1]
        if not enough:
            self._few.append(matrix.name)
        return enough

    def report(self) -> None:
        """Log the block's matrices with too few tokens, such as rarely selected experts."""
        few, self._few = self._few, []
        if few:
            get_logger().warning(
                (
                    "gptq: %s%s received fewer calibration tokens than they have columns, so "
                    "their weights are rounded to nearest. Pass more texts."
                ),
                *(", ".join(few[:3]), f" and {len(few) - 3} more" if len(few) > 3 else ""),
            )


class _Round:
    """Column update of GPTQ: rounds a column to integers times the scale of its group.

    A weight of 0 stays 0, because it was pruned; error compensation would otherwise change it.
    """

    def __init__(self, matrix: Tensor, spec: QuantSpec) -> None:
        self.matrix, self.spec = matrix, spec
        self.is_pruned = matrix == 0
        self.group = spec.group_of(matrix.shape[1])
        self.values = torch.empty(matrix.shape, dtype=torch.int8, device=matrix.device)
        self.scales: list[Tensor] = []
        self.minima: list[Tensor] = []

    def update(self, number: int, block: Tensor, offset: int, diagonal: Tensor) -> Tensor:
        """Round one column and return it; see `columns.ColumnUpdate`."""
        if number % self.group == 0:
            is_per_column = self.group == self.matrix.shape[1]
            self._find_scale(
                self.matrix if is_per_column else block[:, offset : offset + self.group]
            )
        column = block[:, offset]
        scale = self.scales[-1].to(column.dtype)
        least = self.minima[-1].to(column.dtype) if self.minima else torch.zeros_like(scale)
        inverse = torch.where(scale == 0, 0.0, 1 / scale)
        low, high = _RANGES[self.spec.bits, self.spec.symmetric]
        # In schemes with a minimum, 0 is not always representable; the nearest integer is used.
        column = column.masked_fill(self.is_pruned[:, number], 0)
        integers = ((column - least) * inverse).round().clamp(low, high)
        self.values[:, number] = integers.to(torch.int8)
        return integers * scale + least

    def _find_scale(self, columns: Tensor) -> None:
        quantized = quantize_groups(columns, replace(self.spec, group_size=0))
        self.scales.append(quantized.scales[:, 0])
        if quantized.minima is not None:
            self.minima.append(quantized.minima[:, 0])

    def integers(self) -> Integers:
        """Return the integers, scales and minima of the rounded matrix."""
        minima = torch.stack(self.minima, 1) if self.minima else None
        return Integers(self.values, torch.stack(self.scales, 1), minima)


@torch.no_grad()
def round_gptq(
    matrix: Tensor,
    hessian: Hessian,
    spec: QuantSpec,
    *,
    damp: float = 0.01,
    block_columns: int = 128,
    name: str = "the matrix",
    in_place: bool = False,
) -> Integers:
    """Quantize a matrix with GPTQ, minimizing the squared error of its product with the inputs.

    Args:
        matrix: weights, (rows, columns).
        hessian: Hessian of the matrix's inputs.
        spec: quantization scheme.
        damp: fraction of the Hessian's mean diagonal that is added to the diagonal.
        block_columns: number of columns per block, rounded up to whole groups; the remaining
            columns are updated after each block.
        name: name of the matrix for messages.
        in_place: overwrite the matrix; see `update_columns`.

    Raises:
        ConfigError: the Hessian is not positive definite.
    """
    column_update = _Round(matrix, spec)
    group = column_update.group
    step = -(-block_columns // group) * group if group < matrix.shape[1] else block_columns
    update_columns(
        matrix, hessian, column_update, damp=damp, block_columns=step, name=name, in_place=in_place
    )
    return column_update.integers()
