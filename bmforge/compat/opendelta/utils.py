"""Where OpenDelta kept its tools; two of them are modules beside this one."""

from bmforge.compat.names import missing_names
from bmforge.compat.opendelta import inspect, visualization
from bmforge.compat.opendelta.names import NAMES

__all__ = ["inspect", "visualization"]

__getattr__ = missing_names("opendelta", NAMES, __all__, "utils")
