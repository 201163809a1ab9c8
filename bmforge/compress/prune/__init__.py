"""Pruning: unstructured and 2:4 sparsity, and structured pruning to smaller shapes.

Start reading at `sparsifier.py` (sparsity in any training run) and `masks.py` (mask selection); for
structured pruning at `plan.py` (the pruning plan), `shrink.py` (one-shot) and `structure.py`
(trained gates).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from bmforge.compress.batches import check_batches
from bmforge.compress.matrices import warn_of_stacks
from bmforge.compress.prune.calibrated import prune_by_texts_
from bmforge.compress.prune.config import PruneConfig
from bmforge.compress.prune.plan import KeptIndices, PruningPlan
from bmforge.compress.prune.shrink import Shrunk, shrink_
from bmforge.compress.prune.sparsifier import Sparsifier, keep_zeros
from bmforge.compress.prune.structure import StructureConfig, StructureMethod
from bmforge.errors import ConfigError

__all__ = [
    "KeptIndices",
    "PruningPlan",
    "PruneConfig",
    "Shrunk",
    "StructureConfig",
    "StructureMethod",
    "Sparsifier",
    "keep_zeros",
    "prune",
    "shrink_",
]


def prune(
    model: nn.Module, config: PruneConfig | None = None, *, batches: Sequence[Any] | None = None
) -> Sparsifier:
    """Set weights of any model to zero in place, and keep them zero during training.

    Without a schedule the weights are pruned immediately. With a schedule, call `after_step_` of
    the returned object after every optimizer step. `finish_` removes all hooks and keeps the zeros.

    Args:
        model: bmforge, transformers or any other model, not parallelized yet.
        config: pruning settings; if None, half of the weights of each matrix in the blocks are
            pruned, those of smallest magnitude.
        batches: calibration batches for "wanda" and "sparsegpt": keyword arguments of the
            model's forward, or only token ids.

    Raises:
        ConfigError: a glob matches nothing, widths are not multiples of four (2:4), weights are
            quantized, or batches are missing or have no effect.
    """
    config = config or PruneConfig()
    if batches is not None and not config.is_calibrated:
        raise ConfigError(
            f"batches have no effect with method={config.method!r}. Leave batches out, or use "
            "'wanda' or 'sparsegpt'."
        )
    warn_of_stacks(model, config.where, "pruned")
    sparsifier = Sparsifier(config)
    if config.is_calibrated:
        check_batches(batches)
        sparsifier.attach_(model)
        prune_by_texts_(model, config, batches or ())
        sparsifier.keep_(model)
        sparsifier.share = config.sparsity
    else:
        sparsifier.attach_(model)
    return sparsifier
