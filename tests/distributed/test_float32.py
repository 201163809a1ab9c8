"""One row in float32 for every kind of layout: as close to one process as the rounding allows."""

from __future__ import annotations

import pytest
import torch

from bmforge.models import Llama, LlamaConfig, Mixtral, MixtralConfig
from bmforge.parallel import Layout
from bmforge.testing import run_distributed
from bmforge.testing.batches import make_batch, make_labels
from bmforge.testing.layouts import train_on_layout

SIZES = {"vocab_size": 61, "hidden_size": 32, "num_heads": 4, "num_layers": 2, "max_seq_len": 32}
SIZES |= {"intermediate_size": 40, "num_kv_heads": 2}


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(2, Layout(tp=2), id="tp2"),
        pytest.param(2, Layout(tp=2, sequence_parallel=True), id="tp2-sequence"),
        pytest.param(2, Layout(pp=2), id="pp2"),
        pytest.param(2, Layout(cp=2), id="cp2"),
        pytest.param(2, Layout(cp=2, cp_method="ring"), id="cp2-ring"),
        pytest.param(2, Layout(ep=2), id="ep2"),
        pytest.param(4, Layout(tp=2, zero=3), id="tp2-zero3"),
        pytest.param(4, Layout(tp=2, pp=2), id="tp2-pp2", marks=pytest.mark.long),
        pytest.param(8, Layout(tp=2, pp=2), id="2x2x2", marks=pytest.mark.long),
    ],
)
def test_float32_row(world: int, layout: Layout) -> None:
    """Loss to 1e-5; every gradient to 1e-5 of its size (a bias whose gradient is 0: absolutely)."""
    family, config = Llama, LlamaConfig(**SIZES)
    if layout.ep > 1:
        family, config = Mixtral, MixtralConfig(**SIZES, num_experts=4, experts_per_token=2)
    model = family.from_config(config, device="meta")
    inputs = {"input_ids": make_batch(model, 4)}
    arguments = (family, config, inputs, make_labels(model, inputs))
    options = {"dtype": torch.float32, "micro_batches": 2 if layout.pp > 1 else 1}
    want = run_distributed(train_on_layout, 1, *arguments, Layout(), **options)[0]
    for got in run_distributed(train_on_layout, world, *arguments, layout, **options):
        assert got["loss"].item() == pytest.approx(want["loss"].item(), rel=1e-5)
        assert got["norm"].item() == pytest.approx(want["norm"].item(), rel=1e-5)
        for name in (n for n in got if n.startswith("grad/")):
            size = want[name].norm().clamp(min=1e-3)
            assert (got[name] - want[name]).norm() <= 1e-5 * size, name
