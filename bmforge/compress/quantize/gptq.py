"""GPTQ: rounds column by column, and later columns compensate the rounding errors.

Source: Frantar et al., "GPTQ" (2022). Here a group's scale is computed when its first column is
reached, from the updated weights, and is rounded to its storage dtype before any division by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.compress.calibrate import BlockRun, by_block, calibrate_blocks
from bmforge.compress.columns import settle_columns
from bmforge.compress.matrices import Matrix, find_matrices
from bmforge.compress.quantize.config import QuantizeConfig
from bmforge.compress.quantize.place import remember_, store_block_
from bmforge.compress.statistics import Hessian
from bmforge.errors import ConfigError
from bmforge.logging import get_logger
from bmforge.nn.packing import Integers, QuantSpec, quantize_groups
from bmforge.surgery import find_repeated_blocks

__all__ = ["quantize_gptq_", "round_gptq"]

# (bits, symmetric) -> smallest and largest integer.
_RANGES = {(8, True): (-127, 127), (8, False): (-128, 127), (4, True): (-8, 7), (4, False): (0, 15)}


def quantize_gptq_(
    model: nn.Module,
    config: QuantizeConfig,
    specs: Mapping[str, QuantSpec],
    batches: Sequence[Any],
) -> None:
    """Quantize the blocks of a model by GPTQ, each calibrated on the quantized blocks before it.

    Args:
        model: model in memory.
        config: damping and block size.
        specs: module name -> scheme.
        batches: calibration batches.

    Raises:
        ConfigError: fewer tokens than columns of a block's narrowest matrix (raised before that
            block is changed), or a Hessian that is not positive definite. The message says if
            earlier blocks are already quantized.
    """
    narrowest = _narrowest(model, specs)
    done: list[str] = []  # blocks already changed, or being changed
    integers: dict[str, Integers] = {}
    waiting: list[Matrix] = []
    tokens = _Tokens()
    dead: list[str] = []

    def settle(matrix: Matrix, found: Hessian | None) -> Integers:
        spec = specs[matrix.owner]
        if not tokens.are_enough(matrix, found) or found is None:
            return quantize_groups(matrix.read(), spec)
        if found.is_dead:
            dead.append(matrix.name)
            return quantize_groups(matrix.read(), spec)
        return round_gptq(
            matrix.read(),
            found,
            spec,
            damp=config.damp,
            block_columns=config.block_columns,
            name=matrix.name,
            in_place=True,
        )

    def visit(run: BlockRun) -> None:
        if run.name not in done:
            _check_tokens(run, narrowest)
            done.append(run.name)
        for matrix in run.matrices:
            # Keep no reference: the Hessian is freed after the last matrix that shares it.
            integers[matrix.name] = settle(matrix, run.statistics.pop(matrix.name, None))
        # The experts of a stacked parameter are packed together, once all are done.
        waiting.extend(run.matrices)
        ready = [m for m in waiting if run.is_last or m.index is None]
        waiting[:] = [m for m in waiting if m not in ready]
        for owner in dict.fromkeys(m.owner for m in ready):
            mine = [m for m in ready if m.owner == owner]
            store_block_(model, mine, specs, {m.name: integers.pop(m.name) for m in mine})
        if run.is_last:
            tokens.report()

    try:
        calibrate_blocks(
            model,
            batches,
            visit,
            lambda _: Hessian(),
            where=tuple(specs),
            title="quantise",
            size=Hessian.size_bytes,
        )
    except ConfigError as error:
        if not done:
            raise
        raise ConfigError(
            f"{error} The model is quantised up to {done[-1]}: open it anew before another try."
        ) from error
    remember_(model, specs)
    if dead:
        get_logger().warning(
            "gptq: the calibration batches bring %d of the matrices no input other than 0 (%s); "
            "their weights are rounded to nearest",
            *(len(dead), ", ".join(dead[:3])),
        )


def _narrowest(model: nn.Module, specs: Mapping[str, QuantSpec]) -> dict[str, int]:
    """Return block name -> columns of its narrowest matrix; experts only if it has no other."""
    found = by_block(find_matrices(model, tuple(specs)), find_repeated_blocks(model))
    return {
        name: min(m.read().shape[1] for m in [m for m in inside if m.index is None] or inside)
        for name, inside in found.items()
    }


def _check_tokens(run: BlockRun, narrowest: Mapping[str, int]) -> None:
    """Raise `ConfigError` if a block got fewer tokens than its narrowest matrix has columns."""
    tokens = max(found.tokens for found in run.statistics.values())
    if tokens < narrowest[run.name]:
        raise ConfigError(
            f"{tokens} tokens came to {run.name}, whose narrowest matrix has "
            f"{narrowest[run.name]} columns: gptq needs at least as many tokens as columns. Give "
            "more or longer batches."
        )


class _Tokens:
    """Collects the matrices with too few calibration tokens, which are only rounded."""

    def __init__(self) -> None:
        self._few: list[str] = []

    def are_enough(self, matrix: Matrix, found: Hessian | None) -> bool:
        """Return True if a matrix received at least as many tokens as it has columns."""
        enough = found is not None and found.tokens >= matrix.read().shape[1]
        if not enough:
            self._few.append(matrix.name)
        return enough

    def report(self) -> None:
        """Log the block's matrices with too few tokens, such as rarely selected experts."""
        few, self._few = self._few, []
        if few:
            get_logger().warning(
                "fewer tokens than columns came to %s%s: only rounded; give more texts",
                *(", ".join(few[:3]), f" and {len(few) - 3} more" if len(few) > 3 else ""),
            )


class _Round:
    """Rounds column after column to integers times the scale of their group.

    A weight of 0 stays 0: it was pruned, and error compensation would fill it again.
    """

    def __init__(self, matrix: Tensor, spec: QuantSpec) -> None:
        self.matrix, self.spec = matrix, spec
        self.is_pruned = matrix == 0
        self.group = spec.group_of(matrix.shape[1])
        self.values = torch.empty(matrix.shape, dtype=torch.int8, device=matrix.device)
        self.scales: list[Tensor] = []
        self.minima: list[Tensor] = []

    def settle(self, number: int, block: Tensor, place: int, roots: Tensor) -> Tensor:
        """See `columns.Settler`."""
        if number % self.group == 0:
            whole = self.group == self.matrix.shape[1]
            self._find_scale(self.matrix if whole else block[:, place : place + self.group])
        column = block[:, place]
        scale = self.scales[-1].to(column.dtype)
        least = self.minima[-1].to(column.dtype) if self.minima else torch.zeros_like(scale)
        inverse = torch.where(scale == 0, 0.0, 1 / scale)
        low, high = _RANGES[self.spec.bits, self.spec.symmetric]
        # With a minimum, 0 is not always representable: the nearest integer is used.
        column = column.masked_fill(self.is_pruned[:, number], 0)
        integers = ((column - least) * inverse).round().clamp(low, high)
        self.values[:, number] = integers.to(torch.int8)
        return integers * scale + least

    def _find_scale(self, columns: Tensor) -> None:
        found = quantize_groups(columns, replace(self.spec, group_size=0))
        self.scales.append(found.scales[:, 0])
        if found.minima is not None:
            self.minima.append(found.minima[:, 0])

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
    """Quantize a matrix by GPTQ, minimizing the squared error of its product with the inputs.

    Args:
        matrix: weights, (rows, columns).
        hessian: Hessian of the matrix's inputs.
        spec: quantization scheme.
        damp: share of the mean of the Hessian's diagonal that is added to it.
        block_columns: columns per block, rounded up to whole groups; the remaining columns are
            updated after each block.
        name: name of the matrix for messages.
        in_place: see `settle_columns`.

    Raises:
        ConfigError: the Hessian is not positive definite.
    """
    settler = _Round(matrix, spec)
    group = settler.group
    step = -(-block_columns // group) * group if group < matrix.shape[1] else block_columns
    settle_columns(
        matrix, hessian, settler, damp=damp, block_columns=step, name=name, in_place=in_place
    )
    return settler.integers()
