"""Adapters ("deltas"): small trained modules attached to a frozen base model.

All model families and parallel layouts are supported. Start reading at `delta.py`, which has the
operations common to all adapter types; each type is a small file. The modules that do the
computation are in `bmforge.nn`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from bmforge.tune.delta.adapter import Adapter, LowRankAdapter, ParallelAdapter
from bmforge.tune.delta.attached import find_delta
from bmforge.tune.delta.bitfit import BitFit
from bmforge.tune.delta.combine import combine_deltas
from bmforge.tune.delta.compacter import Compacter
from bmforge.tune.delta.delta import Delta
from bmforge.tune.delta.fingerprint import fingerprint_of
from bmforge.tune.delta.ia3 import IA3
from bmforge.tune.delta.layer_norm_tuning import LayerNormTuning
from bmforge.tune.delta.lora import LoRA, Lora
from bmforge.tune.delta.merge import merge_deltas, unmerge_deltas
from bmforge.tune.delta.prefix import Prefix
from bmforge.tune.delta.selection import list_deltas, select_adapters, use_deltas
from bmforge.tune.delta.soft_prompt import SoftPrompt
from bmforge.tune.delta.types import init_deltas_

if TYPE_CHECKING:  # the exports that `__getattr__` imports
    from bmforge.tune.delta.black_box import BlackBoxConfig, tune_black_box
    from bmforge.tune.delta.files import load_delta

__all__ = [
    "IA3",
    "Adapter",
    "BitFit",
    "BlackBoxConfig",
    "Compacter",
    "Delta",
    "LayerNormTuning",
    "LoRA",
    "Lora",
    "LowRankAdapter",
    "ParallelAdapter",
    "Prefix",
    "SoftPrompt",
    "combine_deltas",
    "find_delta",
    "fingerprint_of",
    "init_deltas_",
    "list_deltas",
    "load_delta",
    "merge_deltas",
    "select_adapters",
    "tune_black_box",
    "unmerge_deltas",
    "use_deltas",
]

# Exports that generation does not need -> their module. The file formats, a third of the package,
# are imported only on first use.
_MODULES = {
    "BlackBoxConfig": "black_box",
    "load_delta": "files",
    "tune_black_box": "black_box",
}


def __getattr__(name: str) -> Any:
    """Import a public class or function when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
