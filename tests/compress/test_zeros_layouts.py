"""Zeros stay zeros on every layout, and are the same ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from zeros_cases import run

from bmforge.compress.prune import PruneConfig
from bmforge.errors import DistributedError
from bmforge.parallel import Layout, OffloadConfig
from bmforge.testing import assert_close, assert_equal_trees, run_distributed

LAYOUTS = {
    "zero2x2": (2, Layout(zero=2)),
    "zero3x2": (2, Layout(zero=3)),
    "tp2": (2, Layout(tp=2)),
    "pp2": (2, Layout(pp=2)),
    "hsdp2x2": (4, Layout(zero=3, dp_replicate=2)),
    "tp2xpp2": (4, Layout(tp=2, pp=2)),
    "tp2xzero3": (4, Layout(tp=2, zero=3)),
}
OFFLOADS = {
    "host": OffloadConfig(fraction=1.0),
    "half": OffloadConfig(fraction=0.5),
}


def joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            assert torch.equal(found.setdefault(name, tensor), tensor), name
    return found


def odd_weights(found: dict[str, Tensor]) -> Any:
    for name, tensor in found.items():
        if name.startswith("layers") and tensor.dim() == 2:
            yield name, tensor.flatten()[::2], tensor.flatten()[1::2]


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize(("world", "layout"), LAYOUTS.values(), ids=LAYOUTS)
def test_zeros_after_fifty_steps(world: int, layout: Layout, optimizer: str) -> None:
    """Those that a checkpoint brought, exactly 0; nothing puts them back."""
    options = {"optimizer": optimizer, "at_once": True}
    config = PruneConfig(steps=10_000, begin_step=1000)
    found = joined(run_distributed(run, world, "gpt2", layout, config, 50, **options))
    seen = 0
    for name, gone, kept in odd_weights(found):
        assert (gone == 0).all(), name
        assert (kept != 0).all(), name
        seen += 1
    assert seen == 12


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("offload", OFFLOADS.values(), ids=OFFLOADS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_zeros_offloaded(offload: OffloadConfig, optimizer: str, precision: str) -> None:
    options = {
        "optimizer": optimizer,
        "at_once": True,
        "offload": offload,
        "precision": precision,
        "dtype": torch.float32,
    }
    config = PruneConfig(steps=10_000, begin_step=1000)
    found = joined(run_distributed(run, 1, "gpt2", Layout(), config, 50, **options))
    for name, gone, kept in odd_weights(found):
        assert (gone == 0).all(), name
        assert (kept != 0).double().mean() > 0.99, name


SCHEDULES = {
    "layer": PruneConfig(sparsity=0.6, begin_step=2, steps=6, every_steps=2),
    "row": PruneConfig(sparsity=0.6, scope="row", begin_step=2, steps=6, every_steps=2),
    "global": PruneConfig(sparsity=0.6, scope="global", begin_step=2, steps=6, every_steps=2),
    "movement": PruneConfig(method="movement", sparsity=0.6, steps=6, every_steps=3),
    "2:4 both ways": PruneConfig(pattern="2:4-both", begin_step=3),
}


@pytest.mark.long
@pytest.mark.parametrize("config", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize(("world", "layout"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_schedule_is_the_same_everywhere(world: int, layout: Layout, config: PruneConfig) -> None:
    family = "llama" if config.pattern != "free" else "gpt2"
    want = joined(run_distributed(run, 1, family, Layout(), config, 10))
    found = joined(run_distributed(run, world, family, layout, config, 10))
    for name, tensor in want.items():
        assert torch.equal(found[name] == 0, tensor == 0), name
        if "k_proj.bias" not in name:
            assert_close(found[name], tensor, rtol=1e-7, atol=1e-10)


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "second"), [("zero2x2", "tp2"), ("tp2", "pp2"), ("pp2", "zero3x2")]
)
def test_resumed_on_another_layout(first: str, second: str, tmp_path: Path) -> None:
    """Stopped in the middle of a schedule; masks come with the weights."""
    config = SCHEDULES["layer"]
    want = joined(run_distributed(run, 1, "gpt2", Layout(), config, 12))
    for name, until in ((first, 5), (second, None)):
        world, layout = LAYOUTS[name]
        found = joined(
            run_distributed(
                run, world, "gpt2", layout, config, 12, run_dir=str(tmp_path), until=until
            )
        )
    for name, tensor in want.items():
        assert torch.equal(found[name] == 0, tensor == 0), name
        if "k_proj.bias" not in name:
            assert_close(found[name], tensor, rtol=1e-7, atol=1e-10)


@pytest.mark.long
def test_killed_and_resumed(tmp_path: Path) -> None:
    """Killed between two checkpoints, in the middle of a schedule: bit for bit what it would be."""
    config, options = SCHEDULES["global"], {"dtype": torch.float32}
    want = joined(run_distributed(run, 2, "gpt2", Layout(), config, 12, **options))
    options["run_dir"] = str(tmp_path)
    with pytest.raises(DistributedError):
        run_distributed(run, 2, "gpt2", Layout(), config, 12, kill_at=7, **options)
    found = joined(run_distributed(run, 2, "gpt2", Layout(), config, 12, **options))
    assert_equal_trees(found, want)
