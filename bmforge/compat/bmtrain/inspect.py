"""Statistics of full (unsharded) parameters and of recorded tensors."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.compat.bmtrain.module import reshard_blocks_
from bmforge.compat.bmtrain.parameter import full_shape, whole
from bmforge.compat.bmtrain.runtime import config
from bmforge.compat.bmtrain.store import allgather_objects
from bmforge.compat.bmtrain.synchronize import gather_result

__all__ = [
    "InspectTensor", "collect_records", "format_summary", "inspect_model", "inspect_tensor",
    "record_tensor",
]  # fmt: skip

Row = dict[str, Any]
_COLUMNS = ("max", "min", "std", "mean", "grad_std", "grad_mean")


@torch.no_grad()
def inspect_model(model: nn.Module, param_name: str, prefix: str = "") -> list[Row]:
    """Return statistics of the parameters that match a pattern, and of their gradients.

    Args:
        model: model, the same on every process; all processes call this.
        param_name: fnmatch pattern; `*` matches dots too.
        prefix: prefix of every name.

    Returns:
        One dict per parameter, with the keys ``name shape std mean max min grad_std grad_mean``.
        Gradients are summed over the processes; their statistics are None without a gradient.

    Memory: one full parameter and its gradient.
    """
    config.need("inspect_model")
    reshard_blocks_(model)
    rows = []
    for name, param in model.named_parameters(prefix.rstrip(".")):
        if fnmatch.fnmatch(name, param_name):
            row = {"name": name, "shape": tuple(full_shape(param)), **_measure(whole(param))}
            rows.append(row | _measure_grad(param, partial(whole, param)))
    return rows


def _measure_grad(tensor: Tensor, collect: Callable[[Tensor], Tensor]) -> Row:
    """Return the mean and standard deviation of a gradient; None if no process has the gradient.

    `collect` gathers the gradient over the processes; a process without gradient adds zeros.
    """
    if not any(allgather_objects(tensor.grad is not None)):
        return {"grad_std": None, "grad_mean": None}
    grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
    statistics = _measure(collect(grad))
    return {"grad_std": statistics["std"], "grad_mean": statistics["mean"]}


def _measure(tensor: Tensor) -> dict[str, float]:
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    numbers = (wide.std(), wide.mean(), wide.max(), wide.min())
    return {k: v.item() for k, v in zip(("std", "mean", "max", "min"), numbers, strict=True)}


def _gather_values(tensor: Tensor) -> Tensor:
    return gather_result(tensor.detach().reshape(-1))


class InspectTensor:
    """Tensors that were recorded inside an `inspect_tensor` block.

    Attributes:
        summary: one dict per recorded tensor, with the keys `name`, `group` and `tensor`.
    """

    def __init__(self) -> None:
        self.summary: list[Row] = []

    def get_summary(self) -> list[Row]:
        """Return one dict of statistics per recorded tensor; call on all processes after backward.

        Statistics cover the values of all processes. Gradients are those of the loss summed over
        the processes.
        """
        rows = []
        for index, record in enumerate(self.summary):
            seen = [r["name"] for r in self.summary[:index]].count(record["name"])
            name = record["name"] if not seen else f"{record['name']}.{seen}"
            tensor = record["tensor"]
            row: Row = {"name": name, "group": record["group"], "shape": tuple(tensor.shape)}
            row |= _measure(_gather_values(tensor))
            rows.append(row | _measure_grad(tensor, _gather_values))
        return rows

    def get_tensor(
        self, name: str, group: str | None = None, index: int | None = None
    ) -> Tensor | None:
        """Return the first tensor recorded under a name, or the `index`-th; None if missing."""
        records = [
            r for r in self.summary if r["name"] == name and (group is None or r["group"] == group)
        ]
        index = 0 if index is None else index
        return records[index]["tensor"] if -len(records) <= index < len(records) else None


@contextmanager
def inspect_tensor() -> Iterator[InspectTensor]:
    """Context manager that collects the tensors passed to `record_tensor`.

    With a pipeline, all processes must use it; each process gets the tensors of all stages, for the
    rows of its batch.
    """
    config.need("inspect_tensor")
    inspector = InspectTensor()
    config.inspected.append(inspector)
    try:
        yield inspector
    finally:
        config.inspected.remove(inspector)


@contextmanager
def collect_records() -> Iterator[list[Row]]:
    """Context manager that yields a list for recorded tensors, and pauses `inspect_tensor`."""
    active, collector = config.inspected, InspectTensor()
    config.inspected = [collector] if active else []
    try:
        yield collector.summary
    finally:
        config.inspected = active


def record_tensor(x: Tensor, name: str, group: str | None = None) -> None:
    """Record `x` and its gradient in the enclosing `inspect_tensor` block, if any."""
    # Recomputed tensors were already recorded in forward.
    recomputing = torch._C._current_graph_task_id() != -1
    if not config.inspected or recomputing:
        return
    if x.requires_grad:
        x.retain_grad()
    for inspector in config.inspected:
        inspector.summary.append({"name": name, "group": group, "tensor": x})


def format_summary(summary: Sequence[Mapping[str, Any]]) -> str:
    """Format rows as aligned text with four decimals; missing numbers print as 0.0000."""
    width = max((len(row["name"]) for row in summary), default=4) + 4
    lines = ["name".ljust(width) + "shape".ljust(20) + "".join(c.rjust(10) for c in _COLUMNS)]
    for row in summary:
        numbers = "".join(f"{row[c] or 0.0:10.4f}" for c in _COLUMNS)
        lines.append(row["name"].ljust(width) + str(tuple(row["shape"])).ljust(20) + numbers)
    return "\n".join(lines)
