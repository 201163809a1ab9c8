"""CPM-Pretrain's API: its arguments, scripts, config files and Python names.

Start at `arguments.py` (the table of arguments), then `migrate.py`, which converts scripts to runs
of `bmforge train`. For programs that call `pretrain(...)` with their own functions start at
`training.py`, with `pipe.py` for `LayerSpec` and `mpu` for tensor-parallel layers.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from bmforge.compat.cpm_pretrain.names import NAMES
from bmforge.compat.names import missing_names

__all__ = ["NAMES"]

# Modules of this package and what is taken from them; all import torch, which reading a script
# does not need.
_HOMES: dict[str, tuple[str, ...]] = {
    "mpu": (),
    "training": ("pretrain",),
    "pipe": ("LayerSpec", "PipelineModule", "TiedLayerSpec"),
    "program": (
        *("get_args", "get_timers", "get_tokenizer"),
        *("initialize_megatron", "print_rank_0"),
    ),
    "utils": ("get_ltor_masks_and_position_ids", "reduce_losses"),
}
_missing = missing_names("cpm_pretrain", NAMES, [n for h in _HOMES.items() for n in (h[0], *h[1])])


def __getattr__(name: str) -> Any:
    """Import the module that defines a name when the name is first used."""
    for module, names in _HOMES.items():
        if name == module:
            return import_module(f"{__name__}.{module}")
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    return _missing(name)
