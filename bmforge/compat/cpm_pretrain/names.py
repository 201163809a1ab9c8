"""placeholder"""

from bmforge.compat.names import read_names

NAMES = read_names("")
__all__ = ["NAMES"]
