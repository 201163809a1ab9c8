"""Fewer weights: zeros that stay, and smaller shapes.

Start reading at `zeros.py` (weights that become 0, in any run) and `masks.py` (which ones); at
`plan.py` (which parts stay), `shrink.py` (a smaller model at once) and `structure.py` (by gates).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from bmforge.compress.batches import check_batches
from bmforge.compress.matrices import warn_of_stacks
from bmforge.compress.prune.calibrated import prune_by_texts_
from bmforge.compress.prune.config import PruneConfig
from bmforge.compress.prune.plan import Kept, Plan
from bmforge.compress.prune.shrink import Shrunk, shrink_
from bmforge.compress.prune.structure import StructureConfig, StructureMethod
from bmforge.compress.prune.zeros import Zeros, keep_zeros
from bmforge.errors import ConfigError

__all__ = [
    "Kept",
    "Plan",
    "PruneConfig",
    "Shrunk",
    "StructureConfig",
    "StructureMethod",
    "Zeros",
    "keep_zeros",
    "prune",
    "shrink_",
]


def prune(
    model: nn.Module, config: PruneConfig | None = None, *, batches: Sequence[Any] | None = None
) -> Zeros:
    """Make weights of any model zeros, in place, and see to it that training leaves them so.

    Without a schedule the zeros are there when this returns. With one, call `after_step_` of what
    is returned after every step of the optimizer. `finish_` takes everything off but the zeros.

    Args:
        model: bmforge's, transformers' or any other, not laid out yet.
        config: which weights; None takes half of each matrix of the blocks, by size.
        batches: texts for "wanda" and "sparsegpt": the model's arguments, or token ids alone.

    Raises:
        ConfigError: a glob that matches nothing, sizes that groups of four do not fit, weights that
            are integers already, missing texts, or texts that have no effect.
    """
    config = config or PruneConfig()
    if batches is not None and not config.is_calibrated:
        raise ConfigError(
            f"batches have no effect with method={config.method!r}: leave them out, or take "
            "'wanda' or 'sparsegpt'."
        )
    warn_of_stacks(model, config.where, "pruned")
    zeros = Zeros(config)
    if config.is_calibrated:
        check_batches(batches)
        zeros.attach_(model)
        prune_by_texts_(model, config, batches or ())
        zeros.keep_(model)
        zeros.share = config.sparsity
    else:
        zeros.attach_(model)
    return zeros
