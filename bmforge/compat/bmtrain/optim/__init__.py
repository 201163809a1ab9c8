"""BMTrain's optimizers (`adam.py`), training step (`optim_manager.py`), states (`state.py`)."""

from bmforge.compat.bmtrain.optim import optim_manager
from bmforge.compat.bmtrain.optim.adam import AdamOffloadOptimizer, AdamOptimizer
from bmforge.compat.bmtrain.optim.optim_manager import OptimManager, clip_grad_norm, optim_step

__all__ = [
    "AdamOffloadOptimizer", "AdamOptimizer", "OptimManager", "clip_grad_norm", "optim_manager",
    "optim_step",
]  # fmt: skip
