"""Where BMTrain drew its parameters; here it is `parameter.py` that does."""

from bmforge.compat.bmtrain.names import NAMES
from bmforge.compat.bmtrain.parameter import grouped_parameters, init_parameters
from bmforge.compat.names import missing_names

__all__ = ["grouped_parameters", "init_parameters"]

__getattr__ = missing_names("bmtrain", NAMES, __all__, "param_init")
