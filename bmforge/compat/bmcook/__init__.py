"""BMCook's API over bmforge, for programs with changed import lines.

Start at `trainer.py` (`CookTrainer` sets up all methods); `config.py` reads the JSON files.
docs/migrating/bmcook.md lists every difference and its reason.
"""

from bmforge.compat.bmcook.config import ConfigParser
from bmforge.compat.bmcook.distilling import BMDistill
from bmforge.compat.bmcook.moe import BMMoE
from bmforge.compat.bmcook.names import NAMES
from bmforge.compat.bmcook.pruning import BMPrune
from bmforge.compat.bmcook.quant import BMQuant
from bmforge.compat.bmcook.store import load_masks, save, save_masks
from bmforge.compat.bmcook.trainer import CookOutput, CookTrainer
from bmforge.compat.names import missing_names

__all__ = [
    "BMDistill",
    "BMMoE",
    "BMPrune",
    "BMQuant",
    "ConfigParser",
    "CookOutput",
    "CookTrainer",
    "load_masks",
    "save",
    "save_masks",
]

__getattr__ = missing_names("bmcook", NAMES, __all__, "")
