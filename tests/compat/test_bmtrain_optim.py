"""Optimizers, their state, loss scales, clipping and learning rates."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import old_programs as old
import pytest
import torch
from torch import nn

import bmforge.compat.bmtrain as bmt
from bmforge.compat.bmtrain.parameter import share_like, whole
from bmforge.errors import CheckpointError, ConfigError
from bmforge.memory.copies import make_copy_engine
from bmforge.testing import run_distributed

BUILD: dict[str, Any] = {
    "bmt": lambda p, **kw: bmt.optim.AdamOptimizer(p, **kw),
    "offload": lambda p, **kw: bmt.optim.AdamOffloadOptimizer(p, **kw),
    # torch steps fp16 parameters in fp16, which has no 1e-8.
    "torch": lambda p, **kw: torch.optim.Adam(p, eps=1e-4, **kw),
}
# Those that do not step shares as DTensors.
OTHERS: dict[str, Any] = {
    "adafactor": lambda p, **kw: torch.optim.Adafactor(p, **kw),
    "rprop": lambda p, lr, **kw: torch.optim.Rprop(p, lr),
}


def start(name: str, dtype: Any, **settings: Any) -> tuple[Any, Any]:
    model = old.OldGPT(layers=2, dtype=dtype)
    optim = {**BUILD, **OTHERS}[name](model.parameters(), **settings)
    return model, optim


def go_on(model: Any, manager: Any, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        loss = old.loss_of(model, old.own_rows(old.batch(step)), bmt.loss.FusedCrossEntropy())
        manager.zero_grad()
        manager.backward(loss)
        manager.step()
        losses.append(bmt.sum_loss(loss).item())
    return losses


def managed(optim: Any, scale: float | None, rate: float) -> Any:
    schedule = bmt.lr_scheduler.Noam(optim, start_lr=rate, warmup_iter=3, end_iter=50)
    manager = bmt.optim.OptimManager(loss_scale=scale, loss_scale_steps=6)
    manager.add_optimizer(optim, schedule)
    manager.add_optimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))  # without a schedule
    return manager


def save_and_go_on(folder: str, name: str, dtype: Any, gather: bool) -> list[float]:
    """Ten steps, save, ten more; returns the losses of the last ten."""
    bmt.init_distributed(seed=4)
    model, optim = start(name, dtype, lr=0.02, weight_decay=1e-3)
    bmt.init_parameters(model)
    manager = managed(optim, 256.0, 0.05)
    go_on(model, manager, 0, 10)
    bmt.save(model, Path(folder, "model.pt"))
    state = manager.state_dict(gather_opt=gather)
    torch.save(state, Path(folder, "whole.pt" if gather else f"{bmt.rank()}.pt"))
    losses = go_on(model, manager, 10, 10)
    end = [whole(p).clone() for p in model.parameters()]
    if not gather:
        again = load_and_go_on(folder, name, dtype, f"{bmt.rank()}.pt")
        assert again[0] == losses
        assert all(torch.equal(a, b) for a, b in zip(again[1], end, strict=True))
    return losses


def load_and_go_on(folder: str, name: str, dtype: Any, file: str) -> tuple[list[float], list[Any]]:
    """A new model and optimizer with other settings take the state and do ten steps."""
    bmt.init_distributed(seed=9)
    model, optim = start(name, dtype, lr=3.0, weight_decay=0.5)
    bmt.init_parameters(model)
    manager = managed(optim, 1.0, 7.0)
    bmt.load(model, Path(folder, "model.pt"))
    manager.load_state_dict(torch.load(Path(folder, file), weights_only=True))
    losses = go_on(model, manager, 10, 10)
    return losses, [whole(p) for p in model.parameters()]


@pytest.mark.parametrize("name", BUILD)
@pytest.mark.parametrize(
    ("world", "dtype"),
    [
        (2, torch.bfloat16),
        pytest.param(1, None, marks=pytest.mark.long),
        pytest.param(2, None, marks=pytest.mark.long),
        pytest.param(4, torch.float16, marks=pytest.mark.long),
    ],
)
def test_a_run_goes_on_in_every_bit(name: str, world: int, dtype: Any, tmp_path: Path) -> None:
    run_distributed(save_and_go_on, world, str(tmp_path), name, dtype, False)


@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_go_on_in_every_bit(name: str, tmp_path: Path) -> None:
    run_distributed(save_and_go_on, 2, str(tmp_path), name, None, False)


@pytest.mark.parametrize("name", [*BUILD, *OTHERS])
def test_a_run_goes_on_on_another_number_of_processes(name: str, tmp_path: Path) -> None:
    want = run_distributed(save_and_go_on, 2, str(tmp_path), name, None, True)[0]
    for losses, _ in run_distributed(load_and_go_on, 1, str(tmp_path), name, None, "whole.pt"):
        torch.testing.assert_close(losses, want, rtol=1e-5, atol=0)


def wrong_state() -> None:
    bmt.init_distributed()
    one = bmt.optim.AdamOptimizer([nn.Parameter(torch.zeros(3))])
    two = bmt.optim.AdamOptimizer([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))])
    with pytest.raises(CheckpointError, match="2 parameters"):
        one.load_state_dict(two.state_dict())
    one.param_groups[0]["params"][0].grad = torch.ones(3)
    one.step()
    other = bmt.optim.AdamOptimizer([nn.Parameter(torch.zeros(4))])
    with pytest.raises(CheckpointError, match="gather=True"):
        other.load_state_dict(one.state_dict())


def test_a_state_of_something_else_is_refused() -> None:
    run_distributed(wrong_state, 1)


def five_optimizers() -> None:
    """The same gradients for all, with an odd-sized parameter."""
    bmt.init_distributed()
    plain = [nn.Parameter(torch.randn(n)) for n in (1237, 64)]
    fused = [nn.Parameter(p.detach().clone()) for p in plain]
    references = [torch.optim.Adam(plain, lr=1.0), torch.optim.Adam(fused, lr=1.0, fused=True)]
    made = {}
    for kind, name in ((torch.float32, "bmt"), (torch.float32, "offload")):
        params = [bmt.DistributedParameter(p.detach().clone().to(kind)) for p in plain]
        made[kind, name] = params, BUILD[name](params, lr=1.0)
    for kind in (torch.float16, torch.bfloat16):
        params = [bmt.DistributedParameter(p.detach().clone().to(kind)) for p in plain]
        made[kind, "bmt"] = params, BUILD["bmt"](params, lr=1.0)
    for step in range(20):
        draw = torch.Generator().manual_seed(step)
        grads = [torch.randn(p.shape, generator=draw).bfloat16().float() for p in plain]
        for reference, params in zip(references, (plain, fused), strict=True):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            reference.step()
        for params, optim in made.values():
            for param, grad in zip(params, grads, strict=True):
                param.grad = 4 * grad.to(param.dtype)
            optim.step(scale=4)
    for (kind, name), (params, _) in made.items():
        for got, want in zip(params, fused if name == "offload" else plain, strict=True):
            if kind == torch.float32:
                assert torch.equal(got, want)
            else:
                assert (got.float() - want).abs().max() < 1


def test_adam_is_torchs() -> None:
    run_distributed(five_optimizers, 1)


def holds_and_records() -> None:
    bmt.init_distributed()
    param = bmt.DistributedParameter(torch.ones(4))
    optim = bmt.optim.AdamOffloadOptimizer([param], lr=0.5, hold_steps=2, record_delta=True)
    for step in range(4):
        before = whole(param).clone()
        param.grad = torch.ones_like(param)
        optim.step()
        assert torch.equal(whole(param), before) == (step < 2)
        assert optim.get_avg_delta() == pytest.approx((whole(param) - before).mean().item())
        assert optim.get_var_delta() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("world", [1, 2])
def test_hold_steps_and_record_delta(world: int) -> None:
    run_distributed(holds_and_records, world)


def overflow() -> None:
    bmt.init_distributed()
    param = bmt.DistributedParameter(torch.ones(4))
    optim = bmt.optim.AdamOptimizer([param], lr=0.5)
    schedule = bmt.lr_scheduler.Linear(optim, 0.5, 0, 10)
    manager = bmt.optim.OptimManager(
        loss_scale=8.0, loss_scale_factor=4, loss_scale_steps=2, min_loss_scale=2, max_loss_scale=16
    )
    manager.add_optimizer(optim, schedule)
    scales = []
    for bad in (True, True, True, False, False, False, False, False, True):
        param.grad = torch.ones_like(param) * (float("nan") if bad and bmt.rank() == 0 else 1.0)
        before, rate = whole(param).clone(), schedule.current_lr
        manager.step()
        assert torch.equal(whole(param), before) == bad
        assert (schedule.current_lr == rate) == bad
        scales.append(manager.loss_scale)
    assert scales == [2, 2, 2, 2, 8, 8, 16, 16, 4]


@pytest.mark.parametrize("world", [1, 2])
def test_a_bad_gradient_anywhere_skips_the_step_everywhere(world: int) -> None:
    run_distributed(overflow, world)


def norms() -> list[float]:
    bmt.init_distributed(seed=0)
    model = old.OldGPT()
    bmt.init_parameters(model)
    manager = bmt.optim.OptimManager(loss_scale=64.0)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    manager.add_optimizer(optim)
    found = []
    for kind in (2, 1, 3.5, "inf"):
        manager.zero_grad()
        manager.backward(
            old.loss_of(model, old.own_rows(old.batch(0)), bmt.loss.FusedCrossEntropy())
        )
        # Programs for older versions give the optimizer's scale, which is not the manager's.
        scale = {} if kind == 1 else {"scale": 65536.0}
        manager.clip_grad_norm(optim.param_groups, 0.01, norm_type=kind, **scale)
        found.append(manager.clip_grad_norm(optim.param_groups, 1e9, norm_type=kind).item())
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_every_norm_is_clipped(world: int) -> None:
    for found in run_distributed(norms, world):
        torch.testing.assert_close(found, [0.01] * 4, rtol=1e-3, atol=0)


def rates(kind: str, **more: Any) -> list[float]:
    bmt.init_distributed()
    optim = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=9.0)
    schedule = getattr(bmt.lr_scheduler, kind)(optim, 2.0, 4, 12, num_iter=0, **more)
    found = [schedule.current_lr]
    for number in range(1, 15):
        schedule.step(None if number % 2 else number)
        assert optim.param_groups[0]["lr"] == schedule.current_lr
        found.append(schedule.current_lr)
    other = getattr(bmt.lr_scheduler, kind)(optim, 1.0, 1, 2, **more)
    other.load_state_dict(schedule.state_dict())
    assert other.current_lr == schedule.current_lr
    return found


@pytest.mark.parametrize(
    ("kind", "after"),
    [
        ("NoDecay", lambda n: 2.0),
        ("Linear", lambda n: max(0.0, 2.0 * (12 - n) / 8)),
        ("Cosine", lambda n: 1.0 + math.cos(math.pi * min(1.0, (n - 4) / 8))),
        ("Exponential", lambda n: 2.0 * 0.95 ** (n - 4)),
        ("Noam", lambda n: 2.0 / math.sqrt(n)),
    ],
)
def test_learning_rates(kind: str, after: Any) -> None:
    (found,) = run_distributed(rates, 1, kind)
    peak = 1.0 if kind == "Noam" else 2.0
    want = [peak * n / 4 if n < 4 else after(n) for n in range(15)]
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


def offloaded_steps(kind: torch.dtype) -> None:
    """Weights of another dtype than their states, which is how an accelerator's are kept."""
    bmt.init_distributed()
    values = [torch.randn(n, 3).to(kind) for n in (7, 1, 4)]
    params = {name: [bmt.DistributedParameter(v) for v in values] for name in ("bmt", "offload")}
    optims = {name: BUILD[name](given, lr=0.1) for name, given in params.items()}
    events = make_copy_engine(torch.device("cpu"), records=True)
    optims["offload"]._engine = events
    for step in range(3):
        events.events.clear()
        for name, given in params.items():
            draw = torch.Generator().manual_seed(step)
            for param in given:
                grad = torch.randn(param.shape, generator=draw).to(kind)
                share = share_like(param, grad)
                param.grad = share
            optims[name].step(scale=4)
        for one, two in zip(*params.values(), strict=True):
            assert torch.equal(whole(one), whole(two))
        asked = [e.label for e in events.events if e.kind == "submitted"]
        awaited = [e.label for e in events.events if e.kind == "awaited"]
        numbers = range(3)
        assert asked == [f"{what} {n}" for what in ("gradient", "weights") for n in numbers]
        assert awaited == asked
        order = [(e.kind, e.label) for e in events.events]
        for n in (1, 2):  # a gradient is on its way while the one before it is stepped
            assert order.index(("submitted", f"gradient {n}")) < order.index(
                ("awaited", "gradient 0")
            )
            sent = order.index(("submitted", f"weights {n - 1}"))
            assert sent < order.index(("awaited", f"gradient {n}"))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_gradients_come_and_weights_go_beside_the_steps(world: int, kind: torch.dtype) -> None:
    run_distributed(offloaded_steps, world, kind)


def sparse_steps() -> None:
    """SparseAdam under the manager: scaled, clipped, skipped; and what cannot be."""
    bmt.init_distributed()
    manager = bmt.optim.OptimManager(loss_scale=8.0)
    with pytest.raises(ConfigError, match=r"LBFGS.*closure"):
        manager.add_optimizer(torch.optim.LBFGS([nn.Parameter(torch.ones(2))]))
    tables = [nn.Parameter(torch.arange(12.0).view(6, 2)) for _ in range(2)]
    optims = [torch.optim.SparseAdam([table], lr=0.1) for table in tables]
    if bmt.world_size() > 1:
        with pytest.raises(ConfigError, match="dense"):
            manager.add_optimizer(optims[0])
        return
    manager.add_optimizer(optims[0])
    for step in range(3):
        ids = torch.tensor([step, step, 5])
        losses = [nn.functional.embedding(ids, t, sparse=True).square().sum() for t in tables]
        manager.zero_grad()
        manager.backward(losses[0])
        optims[1].zero_grad()
        losses[1].backward()
        plain = tables[1].grad.coalesce()
        norm = plain.values().norm()
        found = manager.clip_grad_norm(optims[0].param_groups, max_norm=1.0)
        torch.testing.assert_close(found, norm)
        tables[1].grad = torch.sparse_coo_tensor(
            plain.indices(), plain.values() / max(1.0, norm.item()), plain.shape
        )
        manager.step()
        optims[1].step()
        torch.testing.assert_close(*tables)
    before = tables[0].detach().clone()
    manager.backward(nn.functional.embedding(ids, tables[0], sparse=True).sum() * math.inf)
    manager.step()
    assert torch.equal(tables[0], before)
    assert manager.loss_scale == 4.0


@pytest.mark.parametrize("world", [1, 2])
def test_sparse_gradients_and_what_cannot_be_managed(world: int) -> None:
    run_distributed(sparse_steps, world)
