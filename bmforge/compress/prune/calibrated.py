"""Zeros by what real texts bring: Wanda and SparseGPT.

Source: Sun et al., "A simple and effective pruning approach for large language models" (2023);
Frantar and Alistarh, "SparseGPT" (2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.compress.calibrate import BlockRun, calibrate_blocks
from bmforge.compress.columns import settle_columns
from bmforge.compress.prune.config import PruneConfig
from bmforge.compress.prune.masks import keep_2_of_4, keep_largest
from bmforge.compress.prune.select import mask_matrix
from bmforge.compress.statistics import Hessian, InputNorms

__all__ = ["prune_by_texts_", "prune_sparsegpt"]


def prune_by_texts_(model: nn.Module, config: PruneConfig, batches: Sequence[Any]) -> None:
    """Make weights zeros by Wanda or SparseGPT, block by block on the pruned blocks before.

    Raises:
        ConfigError: as `calibrate_blocks` does; a Hessian that is not positive.
    """

    def visit(run: BlockRun) -> None:
        for matrix in run.matrices:
            values, found = matrix.read(), run.statistics.pop(matrix.name, None)
            if config.method == "wanda" or found is None:
                scores = values.abs() * (1 if found is None else found.norms)
                new = values.masked_fill(~mask_matrix(scores, config, config.sparsity), 0)
            else:
                new = prune_sparsegpt(values, found, config, matrix.name)
            matrix.write_(new)

    is_wanda = config.method == "wanda"
    statistic = InputNorms if is_wanda else Hessian
    calibrate_blocks(
        model,
        batches,
        visit,
        lambda _: statistic(),
        where=config.where,
        title="prune",
        size=None if is_wanda else Hessian.size_bytes,
    )


@dataclass
class _Prune:
    """Settles columns: those that go become 0."""

    config: PruneConfig
    mask: Tensor | None = None

    def settle(self, number: int, block: Tensor, place: int, roots: Tensor) -> Tensor:
        """See `columns.Settler`; weights are cheap whose square over the root's square is small."""
        if self.config.pattern == "2:4":
            if place % 4 == 0:
                four = slice(place, place + 4)
                self.mask = keep_2_of_4((block[:, four] / roots[four]).square())
            assert self.mask is not None
            return block[:, place].masked_fill(~self.mask[:, place % 4], 0)
        if place == 0:
            scores = (block / roots).square()
            self.mask = keep_largest(scores, round(self.config.sparsity * scores.numel()))
        assert self.mask is not None
        return block[:, place].masked_fill(~self.mask[:, place], 0)


def prune_sparsegpt(matrix: Tensor, hessian: Hessian, config: PruneConfig, name: str) -> Tensor:
    """Return a matrix with zeros for which its other weights make up.

    Shape:
        matrix: (rows, columns); returns the same
    """
    with torch.no_grad():
        return settle_columns(
            matrix,
            hessian,
            _Prune(config),
            damp=config.damp,
            block_columns=config.block_columns,
            name=name,
        )
