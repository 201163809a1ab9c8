"""Training: loop, optimizers, checkpoints and reports, for any model and layout.

Start reading at `trainer.py`; `checkpoint/` saves and resumes, `optim/` and `schedule.py` contain
the optimizers and learning rates, `offload/` offloads optimizer state, `report/` writes metrics and
reports and inspects a model.
"""

from bmforge.train.checkpoint.checkpointer import Checkpointer, load_checkpoint, save_checkpoint
from bmforge.train.config import TrainConfig
from bmforge.train.evaluate import EvalResult, evaluate
from bmforge.train.objective import ItemObjective, LossAndMetrics, causal_lm, count_labels
from bmforge.train.optim.build import (
    OptimConfig,
    OptimGroup,
    build_optimizers,
    clip_grad_norm_,
    param_groups,
)
from bmforge.train.optim.muon import Muon
from bmforge.train.precision import LossScaler
from bmforge.train.report.inspect import format_table, inspect_activations, inspect_parameters
from bmforge.train.report.metrics import MetricsWriter, WandbSink, read_metrics
from bmforge.train.report.page import write_report
from bmforge.train.schedule import ScheduleConfig, build_schedule
from bmforge.train.spike import DivergenceError, SpikeGuard
from bmforge.train.trainer import Trainer

__all__ = [
    "Checkpointer",
    "DivergenceError",
    "EvalResult",
    "ItemObjective",
    "LossAndMetrics",
    "LossScaler",
    "MetricsWriter",
    "Muon",
    "OptimConfig",
    "OptimGroup",
    "ScheduleConfig",
    "SpikeGuard",
    "TrainConfig",
    "Trainer",
    "WandbSink",
    "build_optimizers",
    "build_schedule",
    "causal_lm",
    "clip_grad_norm_",
    "count_labels",
    "evaluate",
    "format_table",
    "inspect_activations",
    "inspect_parameters",
    "load_checkpoint",
    "param_groups",
    "read_metrics",
    "save_checkpoint",
    "write_report",
]
