"""Calibrated unstructured pruning: Wanda and SparseGPT.

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
from bmforge.compress.columns import update_columns
from bmforge.compress.prune.config import PruneConfig
from bmforge.compress.prune.masks import keep_2_of_4, keep_largest
from bmforge.compress.prune.select import mask_matrix
from bmforge.compress.statistics import Hessian, InputNorms
from bmforge.logging import get_logger

__all__ = ["prune_by_texts_", "prune_sparsegpt"]


def prune_by_texts_(model: nn.Module, config: PruneConfig, batches: Sequence[Any]) -> None:
    """Prune a model with Wanda or SparseGPT, block by block.

    A block is calibrated on the outputs of the pruned blocks before it.

    Raises:
        ConfigError: a Hessian is not positive definite; also for the reasons given in
            `calibrate_blocks`.
    """

    without_inputs: list[str] = []

    def visit(run: BlockRun) -> None:
        for matrix in run.matrices:
            values, inputs = matrix.read(), run.statistics.pop(matrix.name, None)
            if inputs is None or inputs.is_dead:
                without_inputs.append(matrix.name)
                new = _mask_by_scores(values, values.abs(), config)
            elif config.method == "wanda":
                new = _mask_by_scores(values, values.abs() * inputs.norms, config)
            else:
                new = prune_sparsegpt(values, inputs, config, matrix.name)
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
    if without_inputs:
        get_logger().warning(
            (
                "%s: the inputs of %d matrices (%s) are zero in all calibration batches, so their "
                "weights are pruned by magnitude."
            ),
            *(config.method, len(without_inputs), ", ".join(without_inputs[:3])),
        )


def _mask_by_scores(values: Tensor, scores: Tensor, config: PruneConfig) -> Tensor:
    return values.masked_fill(~mask_matrix(scores, config, config.sparsity), 0)


@dataclass
class _Prune:
    """Column update of SparseGPT: sets the pruned weights of a column to 0."""

    config: PruneConfig
    mask: Tensor | None = None

    def update(self, number: int, block: Tensor, offset: int, diagonal: Tensor) -> Tensor:
        """Return a column with its pruned weights set to 0; see `columns.ColumnUpdate`.

        The weights w with the smallest saliency (w / d)^2 are pruned, where d is the entry of
        `diagonal` for the column of w.
        """
        if self.config.pattern == "2:4":
            if offset % 4 == 0:
                four = slice(offset, offset + 4)
                self.mask = keep_2_of_4((block[:, four] / diagonal[four]).square())
            assert self.mask is not None
            return block[:, offset].masked_fill(~self.mask[:, offset % 4], 0)
        if offset == 0:
            scores = (block / diagonal).square()
            self.mask = keep_largest(scores, round(self.config.sparsity * scores.numel()))
        assert self.mask is not None
        return block[:, offset].masked_fill(~self.mask[:, offset], 0)


def prune_sparsegpt(matrix: Tensor, hessian: Hessian, config: PruneConfig, name: str) -> Tensor:
    """Return a matrix pruned by SparseGPT; the remaining weights compensate for the pruned ones.

    Shape:
        matrix: (rows, columns); returns the same
    """
    with torch.no_grad():
        return update_columns(
            matrix,
            hessian,
            _Prune(config),
            damp=config.damp,
            block_columns=config.block_columns,
            name=name,
        )
