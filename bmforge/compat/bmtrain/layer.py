"""Where BMTrain kept its module class; here it is `module.py` that does."""

from bmforge.compat.bmtrain.module import DistributedModule
from bmforge.compat.bmtrain.parameter import DistributedParameter

__all__ = ["DistributedModule", "DistributedParameter"]
