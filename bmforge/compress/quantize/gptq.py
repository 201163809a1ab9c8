"""GPTQ: every column is rounded, and the later ones make up for what that costs.

Source: Frantar et al., "GPTQ" (2022). Here a group's scale is found when its first column comes up,
from weights that are up to date, and is rounded as it is stored before anything is divided by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.compress.calibrate import BlockRun, calibrate_blocks
from bmforge.compress.columns import settle_columns
from bmforge.compress.quantize.config import QuantizeConfig
from bmforge.compress.quantize.place import remember_, store_block_
from bmforge.compress.statistics import Hessian
from bmforge.device import wide_dtype
from bmforge.errors import ConfigError
from bmforge.logging import get_logger
from bmforge.nn.packing import Integers, QuantSpec, quantize_groups

__all__ = ["quantize_gptq_", "round_gptq"]

# (bits, symmetric) -> the integers there are.
_RANGES = {(8, True): (-127, 127), (8, False): (-128, 127), (4, True): (-8, 7), (4, False): (0, 15)}


def quantize_gptq_(
    model: nn.Module,
    config: QuantizeConfig,
    specs: Mapping[str, QuantSpec],
    batches: Sequence[Any],
) -> None:
    """Quantise the blocks of a model, each on the quantised ones before.

    Args:
        model: in memory.
        config: damping and block.
        specs: name of a module -> how.
        batches: texts.
    """

    def visit(run: BlockRun) -> None:
        _check_tokens(run)
        integers = {}
        for matrix in run.matrices:
            found, spec = run.statistics.pop(matrix.name, None), specs[matrix.owner]
            if found is None or found.tokens < matrix.read().shape[1]:
                integers[matrix.name] = quantize_groups(matrix.read(), spec)
                continue
            integers[matrix.name] = round_gptq(
                matrix.read(),
                found,
                spec,
                damp=config.damp,
                block_columns=config.block_columns,
                name=matrix.name,
            )
        store_block_(model, run.matrices, specs, integers)

    calibrate_blocks(
        model, batches, visit, lambda _: Hessian(), where=tuple(specs), title="quantise"
    )
    remember_(model, specs)


def _check_tokens(run: BlockRun) -> None:
    """Say which matrices got too few texts, and are only rounded: experts, say, of rare tokens.

    Raises:
        ConfigError: all have.
    """
    needs = {m.name: m.read().shape[1] for m in run.matrices}
    got = {n: run.statistics[n].tokens if n in run.statistics else 0 for n in needs}
    few = [n for n in needs if got[n] < needs[n]]
    plain = [m.name for m in run.matrices if m.index is None] or list(needs)
    if few and set(plain) <= set(few):
        raise ConfigError(
            f"{got[few[0]]} tokens came to {few[0]}, which has {needs[few[0]]} columns: gptq needs "
            "at least as many tokens as columns. Give more or longer batches."
        )
    if few:
        get_logger().warning(
            "fewer tokens than columns came to %s%s: only rounded; give more texts",
            *(", ".join(few[:3]), f" and {len(few) - 3} more" if len(few) > 3 else ""),
        )


class _Round:
    """Settles columns: each becomes an integer times its group's scale."""

    def __init__(self, matrix: Tensor, spec: QuantSpec) -> None:
        self.matrix, self.spec = matrix, spec
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
        integers = ((column - least) * inverse).round().clamp(low, high)
        self.values[:, number] = integers.to(torch.int8)
        return integers * scale + least

    def _find_scale(self, columns: Tensor) -> None:
        found = quantize_groups(columns, replace(self.spec, group_size=0))
        self.scales.append(found.scales[:, 0])
        if found.minima is not None:
            self.minima.append(found.minima[:, 0])

    def integers(self) -> Integers:
        """Return the settled matrix."""
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
) -> Integers:
    """Return the integers of a matrix whose product with its inputs is nearest to the plain one.

    Args:
        matrix: (rows, columns).
        hessian: of its inputs.
        spec: how it is stored.
        damp: share of the mean of the Hessian's diagonal that is added to it.
        block_columns: columns after which the rest is brought up to date; whole groups of them are.
        name: for messages.

    Raises:
        ConfigError: the Hessian is not positive.
    """
    settler = _Round(matrix.to(wide_dtype(matrix.dtype)), spec)
    group = settler.group
    step = -(-block_columns // group) * group if group < matrix.shape[1] else block_columns
    settle_columns(matrix, hessian, settler, damp=damp, block_columns=step, name=name)
    return settler.integers()
