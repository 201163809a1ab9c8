"""Fake quantisation on layouts: loss and gradients are those of one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bmforge.compress.quantize import FakeQuantize, QuantizeConfig
from bmforge.errors import ConfigError, DistributedError
from bmforge.models import Llama, LlamaConfig, init_weights_
from bmforge.nn.packing import QuantSpec
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
from bmforge.shards import whole_tensor
from bmforge.testing import assert_close, run_distributed

CONFIG = LlamaConfig(
    vocab_size=29,
    hidden_size=64,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    max_seq_len=16,
)
LAYOUTS = {
    "zero3x2": (2, Layout(zero=3)),
    "tp2": (2, Layout(tp=2)),
    "pp2": (2, Layout(pp=2)),
    "tp2xzero2": (4, Layout(tp=2, zero=2)),
}
FOURS = QuantSpec(4, 32, activations="float")


def step(layout: Layout, config: QuantizeConfig) -> dict[str, Tensor]:
    """One step's loss and gradients on this process's rows."""
    init_distributed()
    model = Llama.from_config(CONFIG, device="meta", dtype=torch.float64)
    method = FakeQuantize(config)
    method.attach_(model)
    parallelize(model, layout)
    init_weights_(model, seed=3)
    mesh = mesh_of(model)
    ids = torch.randint(0, 29, (4, 8), generator=torch.Generator().manual_seed(0))
    mine = ids.chunk(data_parallel_size(mesh))[data_parallel_rank(mesh)]
    items = 4 * 7 / data_parallel_size(mesh)
    batches = [{"input_ids": part, "labels": part} for part in mine.split(1)]
    losses = run_step(model, lambda batch: model(**batch, num_items_in_batch=items).loss, batches)
    loss = torch.stack(losses).sum() if losses else torch.zeros((), dtype=torch.float64)
    total = sum_over_axes(loss, mesh, "dp_replicate", "dp_shard", "cp", "pp")
    found = {"loss": total / gradient_ranks(mesh)}
    for name, parameter in model.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found[name] = whole_tensor(grad)
    return found


@pytest.mark.long
@pytest.mark.parametrize(("world", "layout"), LAYOUTS.values(), ids=LAYOUTS)
def test_loss_and_gradients(world: int, layout: Layout) -> None:
    config = QuantizeConfig(spec=FOURS, training="fake")
    (want,) = run_distributed(step, 1, Layout(), config)
    (plain,) = run_distributed(step, 1, Layout(), QuantizeConfig())
    assert abs(want["loss"] - plain["loss"]) > 1e-4
    for found in run_distributed(step, world, layout, config):
        assert_close(found, {name: want[name] for name in found})


@pytest.mark.long
def test_groups_that_a_layout_cuts() -> None:
    wide = QuantizeConfig(spec=QuantSpec(4, 64, activations="float"), training="fake")
    with pytest.raises(DistributedError, match="is not a multiple of group_size"):
        run_distributed(step, 2, Layout(tp=2), wide)
    rows = QuantizeConfig(scheme="int8-dynamic", training="int8")
    with pytest.raises(
        (DistributedError, ConfigError), match="cannot be sharded along their columns"
    ):
        run_distributed(step, 2, Layout(tp=2), rows)
