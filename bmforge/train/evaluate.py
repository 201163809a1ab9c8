"""Evaluation: loss on held-out batches, averaged over tokens across all processes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from bmforge.balance import leave_out_balance
from bmforge.parallel import (
    CONTEXT_AXES,
    ROW_AXES,
    TOKEN_AXES,
    axis_size,
    mesh_of,
    reshard_,
    sum_over_axes,
)
from bmforge.surgery import eval_mode
from bmforge.train.objective import (
    Batch,
    LossAndMetrics,
    Objective,
    causal_lm,
    count_items,
    metric_sums_of,
    prepare_batches,
)

__all__ = ["EvalResult", "evaluate"]

_LARGEST_LOSS = 700.0


@dataclass(frozen=True)
class EvalResult:
    """Result of an evaluation.

    Args:
        loss: mean loss over all predicted tokens, in nats.
        tokens: number of predicted tokens, or of the items that the objective defines.
        metrics: metrics of the objective over all batches.
    """

    loss: float
    tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """Exponential of the loss; infinite on overflow."""
        return math.exp(self.loss) if self.loss < _LARGEST_LOSS else math.inf

    def bits_per_byte(self, num_bytes: int) -> float:
        """Return the bits per byte of an evaluated text of `num_bytes` bytes."""
        return self.loss * self.tokens / math.log(2) / num_bytes


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    objective: Objective = causal_lm,
    mesh: DeviceMesh | None = None,
    device: torch.device | str = "cpu",
) -> EvalResult:
    """Evaluate the model on `batches` in eval mode; the training mode is restored afterwards.

    The load-balancing loss of experts is excluded.

    Args:
        model: model on any layout; all processes call this function together.
        batches: this process's micro-batches, the same number on every process.
        objective: loss function, as in training.
        mesh: mesh of the model; if None, the mesh that `parallelize` used.
        device: compute device of the model.
    """
    mesh = mesh or mesh_of(model)
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    metrics = metric_sums_of(objective)
    with eval_mode(model), leave_out_balance(model):
        for batch in batches:
            moved: dict[str, Tensor] = {name: value.to(device) for name, value in batch.items()}
            (ready,) = prepare_batches(objective, model, [moved])
            result = objective(model, ready, 1.0)
            if isinstance(result, LossAndMetrics):
                metrics.add(result.metrics)
                result = result.loss
            sums[0] += result.double()
            sums[1] += count_items(objective, batch, model)
    reshard_(model)
    # Each of the processes that share a row's tokens counts all of its labels; the average of their
    # losses is the row's loss.
    total = sum_over_axes(sums[0], mesh, *TOKEN_AXES).item() / axis_size(mesh, *CONTEXT_AXES)
    tokens = int(sum_over_axes(sums[1], mesh, *ROW_AXES))
    return EvalResult(total / max(tokens, 1), tokens, metrics.finish(mesh, device, *ROW_AXES))
