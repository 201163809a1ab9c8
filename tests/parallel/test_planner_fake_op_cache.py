"""What the planner remembers of operators is what they return."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bmforge.cli.plan_workload import workload_of
from bmforge.models import GPT2Config, MixtralConfig, T5Config
from bmforge.models.config import ModelConfig
from bmforge.parallel import Layout
from bmforge.parallel.planner import fake_op_cache
from bmforge.parallel.planner.fake_op_cache import FakeOpCache
from bmforge.parallel.planner.storage_tracker import StorageTracker
from bmforge.parallel.planner.trace import Setting, trace_step

aten = torch.ops.aten
CALLS: dict[str, Callable[[Callable[..., object], Tensor], object]] = {
    "new": lambda run, x: run(aten.mm.default, x, x),
    "dtype": lambda run, x: run(aten._to_copy.default, x, dtype=torch.bfloat16),
    "view": lambda run, x: run(aten.slice.Tensor, x, 0, 1, 3),
    "transposed": lambda run, x: run(aten.t.default, x),
    "several views": lambda run, x: run(aten.split.Tensor, x, 2, 1),
    "in place": lambda run, x: run(aten.add_.Tensor, x, 1),
    "a number": lambda run, x: run(aten.add.Tensor, x, 1),
    "another number": lambda run, x: run(aten.mul.Tensor, x, 1.5),
    "a list": lambda run, x: run(aten.cat.default, [x, x], 1),
    "stored otherwise": lambda run, x: run(aten.as_strided.default, x, [2, 2], [4, 2], 1),
}


def describe(out: object, x: Tensor) -> list[object]:
    """Return what a computation could tell of the results, and whose storage they have."""
    return [
        (
            t.shape,
            t.stride(),
            t.storage_offset(),
            t.dtype,
            t.device,
            t.untyped_storage().nbytes(),
            t.untyped_storage()._cdata == x.untyped_storage()._cdata,
            t is x,
        )
        for t in fake_op_cache.tensors_of(out)
    ]


@pytest.mark.parametrize("name", CALLS)
def test_an_outcome_is_what_the_operator_returns_on_plain_tensors(name: str) -> None:
    known, call = FakeOpCache(), CALLS[name]

    def run(func: Callable[..., object], *args: object, **kwargs: object) -> object:
        return known.run(func, args, kwargs)

    plain = torch.ones(4, 4)
    expected = describe(call(lambda func, *args, **kwargs: func(*args, **kwargs), plain), plain)
    with FakeTensorMode():
        for _ in range(2):  # found out, then remembered
            x = torch.ones(4, 4)
            assert describe(call(run, x), x) == expected
    assert [maker is not None for maker in known._makers.values()] == [True]


def test_ones_of_other_types_and_offsets_are_told_apart() -> None:
    known = FakeOpCache()
    with FakeTensorMode():
        x = torch.ones(4, 4, dtype=torch.int64)
        kinds = [known.run(aten.add.Tensor, (x, one), {}).dtype for one in (1, 1.0)]
        rows = [known.run(aten.select.int, (x, 0, row), {}).storage_offset() for row in (1, 2)]
    assert (kinds, rows) == ([torch.int64, torch.float32], [4, 8])


SMALL = {"vocab_size": 64, "hidden_size": 32, "num_heads": 4, "num_layers": 3}
CONFIGS: dict[str, ModelConfig] = {
    "gpt2": GPT2Config(**SMALL, max_seq_len=32),
    "t5": T5Config(**SMALL, intermediate_size=80, head_dim=8),
    "mixtral": MixtralConfig(
        **SMALL, intermediate_size=80, num_kv_heads=2, num_experts=4, experts_per_token=2
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_trace_with_what_others_have_found_out_is_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload, known = workload_of(name, CONFIGS[name], 32), FakeOpCache()
    settings = [Setting(Layout(zero=3), 2, rows, recompute=rows == 1) for rows in (1, 2)]
    shared = [trace_step(workload, setting, known) for setting in (*settings, *settings)]
    assert any(maker is not None for maker in known._makers.values())
    monkeypatch.setattr(fake_op_cache, "_key", lambda *_: None)  # torch finds out everything
    alone = [trace_step(workload, setting) for setting in settings]
    assert shared == alone * 2


def test_fakes_cost_what_real_tensors_do() -> None:
    costs = []
    for mode in (FakeTensorMode(), contextlib.nullcontext()):
        with mode:
            layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
            model = torch.nn.Sequential(torch.nn.Linear(8, 32), layer, torch.nn.Linear(32, 8))
            with StorageTracker() as follower:
                model(torch.ones(2, 6, 8)).square().mean().backward()
        costs.append((follower.flops, follower.traffic_bytes))
    assert costs[0] == costs[1]
    assert min(costs[0]) > 0
