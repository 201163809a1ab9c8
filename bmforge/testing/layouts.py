"""One training step of any family on any layout, for comparison with one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from bmforge.models import init_weights_
from bmforge.parallel import Layout, init_distributed, parallelize
from bmforge.testing.batches import Batch
from bmforge.testing.pool import run_distributed
from bmforge.testing.tolerance import assert_close

__all__ = ["check_layout", "run_step"]


def run_step(
    model_class: Any, config: Any, inputs: Batch, labels: Batch, layout: Layout, recompute: bool
) -> dict[str, Tensor]:
    """Return the loss and every gradient, in float64, of this process's rows summed over all.

    Runs on every worker of the pool; the weights are drawn from one seed.
    """
    world = init_distributed()
    model = model_class.from_config(config, device="meta", dtype=torch.float64)
    parallelize(model, layout, recompute=recompute)
    init_weights_(model, seed=3)
    rows = next(iter(inputs.values())).shape[0] // world.size
    mine = slice(world.rank * rows, (world.rank + 1) * rows)
    items = model.count_items(labels) / world.size
    part = {name: tensor[mine] for name, tensor in (inputs | labels).items()}
    loss = model(**_widen(part), num_items_in_batch=items).loss
    loss.backward()
    total = loss.detach().clone()
    if world.size > 1:
        dist.all_reduce(total)
    gradients = {
        name: _whole(torch.zeros_like(p) if p.grad is None else p.grad)
        for name, p in model.named_parameters()
    }
    return {"loss": total / world.size, **gradients}


def check_layout(
    model_class: Any,
    config: Any,
    inputs: Batch,
    labels: Batch,
    *,
    world: int,
    layout: Layout,
    recompute: bool = False,
) -> None:
    """Compare a layout with one plain process: loss and gradients at float64's tolerance."""
    arguments = (model_class, config, inputs, labels)
    want = run_distributed(run_step, 1, *arguments, Layout(), False)[0]
    assert want["loss"].item() > 0
    for got in run_distributed(run_step, world, *arguments, layout, recompute):
        assert_close(got, want)


def _widen(batch: Batch) -> Batch:
    return {n: t.double() if t.is_floating_point() else t for n, t in batch.items()}


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()
