"""BMTrain's optimizers (`adam.py`), training step (`optim_manager.py`), states (`state.py`)."""

from bmforge.compat.bmtrain.names import NAMES
from bmforge.compat.bmtrain.optim import optim_manager
from bmforge.compat.bmtrain.optim.adam import AdamOffloadOptimizer, AdamOptimizer
from bmforge.compat.bmtrain.optim.optim_manager import OptimManager, clip_grad_norm, optim_step
from bmforge.compat.names import missing_names

__all__ = [
    "AdamOffloadOptimizer",
    "AdamOptimizer",
    "OptimManager",
    "clip_grad_norm",
    "optim_manager",
    "optim_step",
]

__getattr__ = missing_names("bmtrain", NAMES, __all__, "optim")
