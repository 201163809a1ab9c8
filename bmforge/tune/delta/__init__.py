"""Deltas: few trained parameters beside a model that stays as it is, on every family and layout.

Start reading at `delta.py` (what all types do); a type is a small file. The parts that do the work
are in `bmforge.nn`.
"""

from bmforge.tune.delta.adapter import Adapter, LowRankAdapter, ParallelAdapter
from bmforge.tune.delta.bitfit import BitFit
from bmforge.tune.delta.black_box import BlackBoxConfig, tune_black_box
from bmforge.tune.delta.combine import combine_deltas
from bmforge.tune.delta.compacter import Compacter
from bmforge.tune.delta.delta import Delta, init_deltas_
from bmforge.tune.delta.files import load_delta
from bmforge.tune.delta.fingerprint import fingerprint_of
from bmforge.tune.delta.held import find_delta
from bmforge.tune.delta.ia3 import IA3
from bmforge.tune.delta.lora import Lora
from bmforge.tune.delta.prefix import Prefix
from bmforge.tune.delta.rows import delta_rows
from bmforge.tune.delta.soft_prompt import SoftPrompt
from bmforge.tune.delta.switch import list_deltas, use_deltas

__all__ = [
    "IA3",
    "Adapter",
    "BitFit",
    "BlackBoxConfig",
    "Compacter",
    "Delta",
    "Lora",
    "LowRankAdapter",
    "ParallelAdapter",
    "Prefix",
    "SoftPrompt",
    "combine_deltas",
    "delta_rows",
    "find_delta",
    "fingerprint_of",
    "init_deltas_",
    "list_deltas",
    "load_delta",
    "tune_black_box",
    "use_deltas",
]
