"""Optimizers and the two loops: `adam.py`, then `manager.py` for both loops, `state.py` to save."""

from bmforge.compat.bmtrain.optim.adam import AdamOffloadOptimizer, AdamOptimizer
from bmforge.compat.bmtrain.optim.manager import OptimManager, clip_grad_norm, optim_step

__all__ = ["AdamOffloadOptimizer", "AdamOptimizer", "OptimManager", "clip_grad_norm", "optim_step"]
