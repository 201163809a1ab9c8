"""OpenPrompt's module `utils`; its submodules are in `helping`."""

from __future__ import annotations

from pathlib import Path

from bmforge.compat.names import missing_names
from bmforge.compat.openprompt.helping import set_seed
from bmforge.compat.openprompt.names import NAMES

__all__ = ["set_seed"]

# So that `from ...utils.calibrate import calibrate` finds the module.
__path__ = [str(Path(__file__).parent / "helping")]
__getattr__ = missing_names("openprompt", NAMES, __all__, "utils")
