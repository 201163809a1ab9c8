"""Training objectives: functions or objects (model, batch, num_items) -> loss.

An objective returns the sum of the item losses of a micro-batch divided by `num_items`. The Trainer
passes the number of items of the whole global batch, so the loss is averaged over tokens, not over
ranks or micro-batches, and every layout gets the same mean.

An objective may also have any of the following attributes (`ItemObjective` has the first three):

- ``count(batch)``: number of items of a micro-batch, such as pairs or answers (default: labels).
- ``metrics``: dict from the name of each metric that is returned with the loss (`LossAndMetrics`)
  to the metric's kind.
- ``prepare(model, micro_batches)``: called before the forward pass of a step; returns the
  micro-batches with further tensors, such as log-probabilities of a reference model.
- ``companion``: second model that the objective trains (`Companion`); it is saved with the run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from bmforge.batch import IGNORE_INDEX, Batch, count_labels
from bmforge.errors import ConfigError
from bmforge.parallel import ROW_AXES, STAGE_AXES, run_step
from bmforge.train.metric_sums import MetricKind, MetricSums, MetricValue

__all__ = [
    "ItemObjective",
    "LossAndMetrics",
    "Objective",
    "causal_lm",
    "check_model",
    "count_items",
    "count_labels",
    "count_tokens",
    "metric_sums_of",
    "prepare_batches",
    "rename_inputs",
    "run_objective",
]


class LossAndMetrics(NamedTuple):
    """Result of an objective with metrics.

    Args:
        loss: sum of the item losses divided by `num_items`.
        metrics: dict from name to metric of this micro-batch; see `MetricSums.add`.
    """

    loss: Tensor
    metrics: Mapping[str, MetricValue]


# On earlier pipeline stages, which do not compute a loss, an objective returns None.
Objective = Callable[[nn.Module, Batch, float], "Tensor | LossAndMetrics | Any"]


class ItemObjective(Protocol):
    """Interface of an objective that defines its items and returns metrics.

    Attributes:
        metrics: dict from metric name to "mean", "sum", "max" or "min".
    """

    metrics: Mapping[str, MetricKind]

    def count(self, batch: Batch) -> int:
        """Return the number of items of a micro-batch."""

    def prepare(self, model: nn.Module, micro_batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return micro-batches with the tensors that the loss needs; called on every rank."""

    def __call__(self, model: nn.Module, batch: Batch, num_items: float) -> LossAndMetrics | None:
        """Return the loss and metrics of a micro-batch."""


def count_items(objective: Objective, batch: Batch, model: nn.Module) -> int:
    """Return a micro-batch's number of items: the objective's `count`, or the number of labels."""
    count = getattr(objective, "count", None)
    return count_labels(batch, model) if count is None else int(count(batch))


def prepare_batches(
    objective: Objective, model: nn.Module, micro_batches: Sequence[Batch]
) -> Sequence[Batch]:
    """Apply the objective's `prepare`, if any, to a step's micro-batches; return the result."""
    prepare = getattr(objective, "prepare", None)
    return micro_batches if prepare is None else prepare(model, micro_batches)


def metric_sums_of(objective: Objective) -> MetricSums:
    """Create the `MetricSums` of an objective, with no values yet."""
    return MetricSums(getattr(objective, "metrics", {}))


def run_objective(
    objective: Objective,
    model: nn.Module,
    micro_batches: Sequence[Batch],
    num_items: float,
    mesh: DeviceMesh | None,
) -> tuple[Tensor, dict[str, float]]:
    """Run the forward and backward passes of a step's micro-batches.

    Args:
        objective: loss function.
        model: model whose gradients are computed.
        micro_batches: micro-batches of this process, on the device of the model.
        num_items: divisor of the summed loss.
        mesh: mesh of the model.

    Returns:
        summed loss of this process's micro-batches in fp64, and a dict with the metrics over all
        processes
    """
    sums = metric_sums_of(objective)

    def run(batch: Batch) -> Any:
        result = objective(model, batch, num_items)
        if not isinstance(result, LossAndMetrics):
            return result
        if torch.is_grad_enabled():  # the pass that counts the load of experts needs no backward
            sums.add(result.metrics)
        return result.loss

    device = next(iter(micro_batches[0].values())).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for loss in run_step(model, run, prepare_batches(objective, model, micro_batches)):
        total += loss.double()
    # Only the last stage of a pipeline computes the loss and the metrics.
    return total, sums.finish(mesh, device, *ROW_AXES, *STAGE_AXES)


def check_model(model: nn.Module, objective: Objective) -> None:
    """Raise `ConfigError` if the default objective would scale the model's loss incorrectly.

    transformers' models use `num_items_in_batch` if they compute the loss with `loss_function`;
    fifteen old decoders compute it themselves, as the mean over each micro-batch.
    """
    owner = type(model)
    if objective is not causal_lm or not hasattr(owner, "loss_function"):
        return
    try:
        source = inspect.getsource(owner.forward)
    except (OSError, TypeError):
        return  # a class without source text
    if "loss_function" not in source:
        raise ConfigError(
            f"the loss of {owner.__name__} ignores num_items_in_batch, so its loss would grow "
            "with the number of micro-batches. Load it with "
            "AutoModel.from_pretrained(directory, backend='transformers'), or write your own "
            "objective."
        )


def causal_lm(model: nn.Module, batch: Batch, num_items: float) -> Tensor:
    """Return the next-token loss of a bmforge or Hugging Face causal language model.

    Args:
        model: model whose forward accepts `labels` and `num_items_in_batch` and returns an
            output with `loss`.
        batch: keyword arguments of the model, with `labels` (B, T) not shifted.
        num_items: divisor of the summed loss.
    """
    return model(**batch, num_items_in_batch=num_items).loss


def rename_inputs(names: Mapping[str, str], objective: Objective = causal_lm) -> Objective:
    """Wrap an objective for a loader whose batch keys differ from the model's arguments.

    Args:
        names: dict from a batch key to the model's argument; other keys keep their names.
        objective: objective to wrap.
    """

    def renamed(model: nn.Module, batch: Batch, num_items: float) -> Tensor:
        inputs = {names.get(name, name): value for name, value in batch.items()}
        return objective(model, inputs, num_items)

    return renamed


def count_tokens(batch: Batch) -> int:
    """Return the number of tokens of a micro-batch, excluding sequences that contain only padding.

    Padding within sequences is excluded too, if the micro-batch has an `attention_mask`, so that
    the number does not depend on the division into micro-batches. If there is one label per
    sequence instead of per token, the number of sequences is returned.
    """
    labels = batch.get("labels")
    if labels is None or labels.dim() < 2:
        return next(iter(batch.values())).shape[0]
    rows = (labels != IGNORE_INDEX).flatten(1).any(1)
    mask = batch.get("attention_mask")
    if mask is not None and mask.shape == labels.shape:
        return int((mask != 0)[rows].sum())
    return int(rows.sum()) * labels.shape[1]
