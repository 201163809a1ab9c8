"""OpenDelta's module `utils`; two of its submodules are files of this package."""

from bmforge.compat.names import missing_names
from bmforge.compat.opendelta import inspect, visualization
from bmforge.compat.opendelta.names import NAMES

__all__ = ["inspect", "visualization"]

__getattr__ = missing_names("opendelta", NAMES, __all__, "utils")
