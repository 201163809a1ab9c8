"""Training of PPO's value model: one optimizer step for each step of the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bmforge.align.value import ValueConfig, ValueObjective, predict_values
from bmforge.batch import Batch
from bmforge.parallel import ROW_AXES, counts_here, data_parallel_size, mesh_of, reshard_
from bmforge.surgery import eval_mode
from bmforge.train import TrainConfig
from bmforge.train.objective import run_objective
from bmforge.train.optim.build import build_optimizers, clip_grad_norm_
from bmforge.train.schedule import build_schedule, set_learning_rate_
from bmforge.train.spike import SpikeGuard

__all__ = ["VALUE_METRICS", "ValueTrainer"]

VALUE_METRICS = (*ValueObjective.metrics, "val/grad_norm")


class ValueTrainer:
    """Trains the value model on the micro-batches of the policy; implements `Companion`.

    The value model has separate optimizers. Its gradient is clipped separately from the policy's,
    so a coefficient of the value loss (``vf_coef``) is not needed.

    Args:
        model: parallelized and initialized sequence classifier with one output.
        train: training settings of the run, with the learning rate of the value model.
        config: settings of the loss.

    Attributes:
        name: prefix of the model's tensors in checkpoints.
        step: number of completed steps.
        metrics: metrics of the last step.
    """

    name = "value_model"

    def __init__(self, model: Any, train: TrainConfig, config: ValueConfig) -> None:
        self.model, self._grad_clip = model, train.grad_clip
        self.optimizers = build_optimizers(model, train.optim)
        self._schedule = build_schedule(train.schedule, train.steps)
        self._objective = ValueObjective(config.cliprange)
        self._guard = SpikeGuard(train.spike_sigmas)
        self._mesh = mesh_of(model)
        self.step, self.metrics = 0, dict[str, float]()
        model.eval()  # the policy is trained without dropout too

    @torch.no_grad()
    def score(self, batch: Batch) -> Tensor:
        """Return the value of the state before each token, (B, T)."""
        with eval_mode(self.model):
            values = predict_values(self.model, batch)
        assert values is not None  # pipeline layouts are refused
        reshard_(self.model)  # without a backward pass, gathered weights are not freed
        return values

    def train_step(self, micro_batches: Sequence[Batch]) -> None:
        """Run one optimizer step, with the same step number as the policy.

        Args:
            micro_batches: micro-batches of this process, on the device of the model.

        Comm: an all-reduce of one integer, and the reductions of the gradients and their norm.
        """
        items = max(1, self._sum(sum(self._objective.count(batch) for batch in micro_batches)))
        divisor = items / data_parallel_size(self._mesh)
        _, metrics = run_objective(self._objective, self.model, micro_batches, divisor, self._mesh)
        norm = clip_grad_norm_(self.model, self._grad_clip).item()
        set_learning_rate_(self.optimizers, self._schedule(self.step))
        # Without a scored answer in the step there is no mean, and the summed loss is 0.
        skipped = self._guard.check(metrics.get("loss/value_avg", 0.0), norm)
        for optimizer in self.optimizers:
            if skipped is None:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.metrics = {**metrics, "val/grad_norm": norm}

    def _sum(self, count: int) -> int:
        """Return the sum of a count over all data-parallel processes."""
        if self._mesh is None or self._mesh.size() == 1:
            return count
        own = count if counts_here(self._mesh, *ROW_AXES) else 0
        total = torch.tensor(own, device=self._mesh.device_type)
        dist.all_reduce(total)
        return int(total)

    def state_dict(self) -> dict[str, Any]:
        """Return the state other than that of model and optimizers, as JSON values."""
        return {"step": self.step, "guard": self._guard.state_dict(), "metrics": self.metrics}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state returned by `state_dict`."""
        self.step, self.metrics = state["step"], dict(state["metrics"])
        self._guard.load_state_dict(state["guard"])
