"""Accumulates the metrics that an objective returns, over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bmforge.parallel import sum_over_axes

__all__ = ["MetricKind", "MetricSums", "MetricValue"]

MetricKind = Literal["mean", "sum", "max", "min"]
# A pair (sum, count) for a mean; otherwise a single value.
MetricValue: TypeAlias = "Tensor | float | tuple[Tensor | float, Tensor | float]"


class MetricSums:
    """Accumulates the metrics of an optimizer step; divides sums by counts once, at the end.

    Args:
        kinds: dict from metric name to "mean", "sum", "max" or "min"; the same on all ranks.
    """

    def __init__(self, kinds: Mapping[str, MetricKind]) -> None:
        self._kinds = kinds
        added = [name for name, kind in kinds.items() if kind in ("mean", "sum")]
        # Values are kept as tensors until the end of the step, so that adding them needs no device
        # synchronization.
        self._added: dict[str, list[Tensor]] = {name: [_wide(0.0)] * 2 for name in added}
        self._extremes = dict.fromkeys(kinds.keys() - self._added.keys(), _wide(-torch.inf))

    def add(self, values: Mapping[str, MetricValue]) -> None:
        """Add the metrics of one micro-batch; unknown names raise an error.

        Args:
            values: dict from metric name to (sum, count) for a mean, or to the value for a sum,
                maximum or minimum.
        """
        for name, value in values.items():
            kind = self._kinds[name]
            if kind in ("mean", "sum"):
                pair = value if isinstance(value, tuple) else (value, 1.0)
                before = self._added[name]
                self._added[name] = [a + _wide(b) for a, b in zip(before, pair, strict=True)]
            else:
                assert not isinstance(value, tuple)
                wide = _wide(value) if kind == "max" else -_wide(value)
                self._extremes[name] = torch.maximum(self._extremes[name].to(wide.device), wide)

    def finish(
        self, mesh: DeviceMesh | None, device: torch.device | str, *axes: str
    ) -> dict[str, float]:
        """Return a dict from metric name to value over all ranks; means without items are omitted.

        Args:
            mesh: mesh of the model.
            device: device on which the collectives run.
            axes: mesh axes over which the values differ and are reduced.

        Comm: one all-reduce with two numbers per mean or sum, and one with one number per maximum
            or minimum.
        """
        result: dict[str, float] = {}
        if self._added:
            sums = torch.stack([_stack(pair, device) for pair in self._added.values()])
            sums = sum_over_axes(sums, mesh, *axes)
            for name, (total, count) in zip(self._added, sums.tolist(), strict=True):
                if self._kinds[name] == "sum":
                    result[name] = total
                elif count:
                    result[name] = total / count
        if self._extremes:
            names = sorted(self._extremes)
            extremes = _stack([self._extremes[name] for name in names], device)
            if mesh is not None and mesh.size() > 1:
                dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
            for name, value in zip(names, extremes.tolist(), strict=True):
                if value != -torch.inf:
                    result[name] = value if self._kinds[name] == "max" else -value
        return {name: result[name] for name in self._kinds if name in result}


def _wide(value: Tensor | float) -> Tensor:
    """Return a value in fp64, detached from the autograd graph."""
    return torch.as_tensor(value).detach().double()


def _stack(values: Sequence[Tensor], device: torch.device | str) -> Tensor:
    return torch.stack([value.to(device) for value in values])
