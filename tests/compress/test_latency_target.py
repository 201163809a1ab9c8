"""Pruning to a target in milliseconds: interpolated measurements, and sizes that meet it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from masked_models import stir
from tiny_models import make_inputs

from bmforge.compress.prune import timing
from bmforge.compress.prune.costs import SublayerCost
from bmforge.compress.prune.shrink import shrink_
from bmforge.compress.prune.structure import StructureMethod
from bmforge.compress.prune.structure_config import StructureConfig
from bmforge.errors import ConfigError

STEPPED = SublayerCost(1.0, 2.5, 4, points=((0, 1.0), (2, 3.0), (4, 11.0)))


@pytest.mark.parametrize(("count", "cost"), [(0, 1.0), (1, 2.0), (2, 3.0), (3, 7.0), (4, 11.0)])
def test_a_line_between_two_sizes(count: int, cost: float) -> None:
    """Of numbers and of tensors, whose gradient is the slope."""
    assert STEPPED.inside(count) == cost
    given = torch.tensor(count - 0.5 if count else 0.5, requires_grad=True)
    STEPPED.inside(given).backward()
    assert given.grad == (1.0 if count <= 2 else 4.0)


def fake_times(blocks: Any, x: Any) -> list[float]:
    """As if 16 features took 1 ms beside 2 for all, and heads 3 each."""
    found = []
    for block in blocks:
        if block.attn is not None:
            found.append(3.0 * block.spec.attn.num_kv_heads)
        else:
            found.append(2.0 + block.spec.mlp.intermediate_size / 16)
    return found


def time_left(model: Any, config: StructureConfig) -> float:
    return timing.measure_costs(model, config.seq_len).total


@pytest.mark.parametrize(("name", "uniform"), [("llama", False), ("llama", True), ("gpt2", False)])
def test_the_small_model_keeps_the_time(
    name: str, uniform: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most the share that was asked for, and not much less; what is out of reach is said."""
    monkeypatch.setattr(timing, "time_each", fake_times)
    model = stir(name)
    config = StructureConfig(target="milliseconds", keep_ratio=0.7, uniform=uniform)
    before = time_left(model, config)
    shrink_(model, config)
    assert 0.45 * before < time_left(model, config) <= 0.7 * before
    far = StructureConfig(target="milliseconds", keep_ratio=0.01, uniform=uniform)
    with pytest.raises(ConfigError, match=r"at least 0\.\d+ of the milliseconds of the blocks"):
        shrink_(stir(name), far)


def test_gates_keep_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on has the target that it had, on a machine that is slower now."""
    monkeypatch.setattr(timing, "time_each", fake_times)
    config = StructureConfig(target="milliseconds", keep_ratio=0.7, gates=("heads", "features"))
    first, second = StructureMethod(config), StructureMethod(config)
    first.attach_(stir("llama"))
    monkeypatch.setattr(
        timing, "time_each", lambda blocks, x: [2 * t for t in fake_times(blocks, x)]
    )
    second.attach_(stir("llama"))
    assert second.costs.total == 2 * first.costs.total
    second.load_state_dict(first.state_dict())
    assert second.costs == first.costs


def test_times_are_measured() -> None:
    """In earnest: more units never take less, and layers that are alike are timed once."""
    model = stir("llama", torch.float32)
    costs = timing.measure_costs(model, 32)
    halves = list(costs.blocks.values())
    assert all(found is halves[0] for found in halves)
    for half in halves[0].values():
        values = [cost for _, cost in half.points]
        assert values == sorted(values)
        assert values[0] > 0
    assert model(**make_inputs("llama")).logits.isfinite().all()
    with pytest.raises(ConfigError, match="has cross-attention"):
        timing.measure_costs(stir("t5"), 32)
