"""OpenPrompt's `utils` modules; start at `calibrate.py`."""

from bmforge.compat.openprompt.helping.calibrate import calibrate
from bmforge.compat.openprompt.helping.reproduciblity import set_seed

__all__ = ["calibrate", "set_seed"]
