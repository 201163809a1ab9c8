"""Training steps of any family on any layout, for comparison with one process."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from bmforge.models import init_weights_
from bmforge.parallel import (
    Layout,
    data_parallel_rank,
    data_parallel_size,
    gradient_ranks,
    init_distributed,
    mesh_of,
    parallelize,
    run_step,
    sum_over_axes,
)
from bmforge.testing.batches import Batch
from bmforge.testing.pool import run_distributed
from bmforge.testing.tolerance import assert_close
from bmforge.train import clip_grad_norm_

__all__ = ["check_layout", "train_on_layout"]

_STEPS = 3
_REMEMBERED: dict[bytes, dict[str, Tensor]] = {}
_ALL_BUT_TP = ("dp_replicate", "dp_shard", "cp", "pp")


def train_on_layout(
    model_class: Any,
    config: Any,
    inputs: Batch,
    labels: Batch,
    layout: Layout,
    *,
    micro_batches: int = 1,
    recompute: bool = False,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Train three steps of SGD with clipped gradients on a layout; runs on every worker.

    Returns:
        the first loss and the norm of its gradient, every gradient ("grad/NAME") and, at the end,
        every parameter ("end/NAME") that is on this process, whole.
    """
    init_distributed()
    model = model_class.from_config(config, device="meta", dtype=dtype)
    parallelize(model, layout, recompute=recompute)
    init_weights_(model, seed=3)
    mesh = mesh_of(model)
    batches = [
        {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in b}
        for b in _cut(inputs | labels, micro_batches, mesh)
    ]
    items = model.count_items(labels) / data_parallel_size(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found: dict[str, Tensor] = {}
    for step in range(_STEPS):
        losses = run_step(
            model, lambda batch: model(**batch, num_items_in_batch=items).loss, batches
        )
        if step == 0:
            loss = torch.stack(losses).sum() if losses else torch.zeros((), dtype=dtype)
            total = sum_over_axes(loss, mesh, *_ALL_BUT_TP) / gradient_ranks(mesh)
            found = {"loss": total, **_collect(model, "grad")}
        norm = clip_grad_norm_(model, 0.5)
        found.setdefault("norm", norm.to(dtype))
        optimizer.step()
        optimizer.zero_grad()
    return {**found, **_collect(model, "end")}


def check_layout(
    model_class: Any,
    config: Any,
    inputs: Batch,
    labels: Batch,
    *,
    world: int,
    layout: Layout,
    recompute: bool = False,
    micro_batches: int = 1,
) -> None:
    """Compare a layout with one plain process, at float64's tolerance.

    Compared are the loss, every gradient, their norm, and the parameters after three steps.
    """
    arguments = (model_class, config, inputs, labels)
    want = _train_on_one(*arguments, micro_batches)
    assert want["loss"].item() > 0
    seen: set[str] = set()
    for got in run_distributed(
        train_on_layout,
        world,
        *arguments,
        layout,
        recompute=recompute,
        micro_batches=micro_batches,
    ):
        assert_close(got, {name: want[name] for name in got})
        seen |= set(got)
    assert seen == set(want)


def _train_on_one(*arguments: Any) -> dict[str, Tensor]:
    """What one plain process makes; remembered for the next layout of the same model."""
    key = pickle.dumps(arguments)
    if key not in _REMEMBERED:
        *given, micro_batches = arguments
        found = run_distributed(train_on_layout, 1, *given, Layout(), micro_batches=micro_batches)
        while len(_REMEMBERED) > 3:
            del _REMEMBERED[next(iter(_REMEMBERED))]
        _REMEMBERED[key] = found[0]
    return _REMEMBERED[key]


def _cut(batch: Batch, micro_batches: int, mesh: Any) -> Any:
    """Yield this process's micro-batches; rows lie in slots [micro-batch][process][row]."""
    size, rank = data_parallel_size(mesh), data_parallel_rank(mesh)
    rows = next(iter(batch.values())).shape[0] // (micro_batches * size)
    for number in range(micro_batches):
        first = (number * size + rank) * rows
        yield [(name, tensor[first : first + rows]) for name, tensor in batch.items()]


def _collect(model: Any, what: str) -> dict[str, Tensor]:
    tensors = (
        (n, p if what == "end" else torch.zeros_like(p) if p.grad is None else p.grad)
        for n, p in model.named_parameters()
    )
    return {f"{what}/{name}": _whole(tensor) for name, tensor in tensors}


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()
