"""Programs in the shape of BMTrain's README train as plain torch does, on 1, 2 and 4 processes."""

from __future__ import annotations

from functools import cache
from typing import Any

import old_programs as old
import pytest
import torch
from torch import nn

import bmforge.compat.bmtrain as bmt
from bmforge.testing import run_distributed

STEPS = 4
TORCH = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}
QUICK = ("sgd", "adam", "adafactor", "rprop")
BUILD: dict[str, Any] = {
    **TORCH,
    "bmt": lambda p: bmt.optim.AdamOptimizer(p, lr=0.01, weight_decay=1e-2),
    "offload": lambda p: bmt.optim.AdamOffloadOptimizer(p, lr=0.01, weight_decay=1e-2),
}
PLAIN = {
    **TORCH,
    "bmt": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=1e-2),
    "offload": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=1e-2),
}


@cache
def plain_losses(optimizer: str) -> tuple[list[float], list[float]]:
    """Losses and norms of the same training in plain torch, in fp32, on all rows."""
    torch.manual_seed(5)
    model = old.PlainGPT()
    optim = PLAIN[optimizer](model.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        loss = old.loss_of(model, old.batch(step), nn.CrossEntropyLoss())
        optim.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optim.step()
        losses.append(loss.item())
    return losses, norms


def build(form: str, dtype: Any, **settings: Any) -> Any:
    torch.manual_seed(5)
    if form == "wrapper":
        return old.wrapped(dtype)
    model = old.OldGPT(dtype=dtype, form=form, **settings)
    bmt.init_parameters(model)
    return model


def todays_loop(
    form: str,
    optimizer: str = "bmt",
    dtype: Any = None,
    loss_scale: float | None = None,
    loss: str = "bmt",
    init: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[list[float], list[float]]:
    bmt.init_distributed(seed=5, **(init or {}))
    model = build(form, dtype, **settings)
    optim = BUILD[optimizer](model.parameters())
    schedule = bmt.lr_scheduler.NoDecay(optim, optim.param_groups[0]["lr"], 0, 100, 0)
    manager = bmt.optim.OptimManager(loss_scale=loss_scale)
    manager.add_optimizer(optim, schedule)
    loss_func = bmt.loss.FusedCrossEntropy() if loss == "bmt" else nn.CrossEntropyLoss()
    losses, norms = [], []
    for step in range(STEPS):
        value = old.loss_of(model, old.own_rows(old.batch(step)), loss_func)
        losses.append(bmt.sum_loss(value).item())
        manager.zero_grad()
        manager.backward(value)
        norms.append(manager.clip_grad_norm(optim.param_groups, max_norm=0.5).item())
        manager.step()
    return losses, norms


def older_loop(form: str) -> tuple[list[float], list[float]]:
    bmt.init_distributed(seed=5, zero_level=2, loss_scale_factor=2, loss_scale_steps=2)
    model = build(form, None)
    optim = bmt.optim.AdamOffloadOptimizer(
        model.parameters(), lr=0.01, weight_decay=1e-2, scale=2**20
    )
    schedule = bmt.lr_scheduler.NoDecay(optim, 0.01, 0, 100, num_iter=0)
    losses, norms, scales = [], [], []
    for step in range(STEPS):
        optim.zero_grad()
        value = old.loss_of(model, old.own_rows(old.batch(step)), nn.CrossEntropyLoss())
        losses.append(bmt.sum_loss(value).item())
        scales.append(optim.scale)
        optim.loss_scale(value).backward()
        norm = bmt.optim.clip_grad_norm(
            optim.param_groups, max_norm=0.5, scale=optim.scale, norm_type=2
        )
        norms.append(norm.item())
        bmt.optim_step(optim, schedule)
        assert schedule.current_lr == 0.01
    assert scales == [2**20, 2**20, 2**21, 2**21]
    return losses, norms


def check(found: list[Any], optimizer: str = "bmt", rtol: float = 1e-5) -> None:
    want = torch.tensor(plain_losses(optimizer))
    for got in found:
        torch.testing.assert_close(torch.tensor(got), want, rtol=rtol, atol=0)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("form", ["list", "modules", "normal", "wrapper"])
def test_every_form_of_a_model(form: str, world: int) -> None:
    check(run_distributed(todays_loop, world, form))


@pytest.mark.parametrize("world", [1, 4])
def test_the_older_loop(world: int) -> None:
    check(run_distributed(older_loop, world, "list"))


@pytest.mark.parametrize(
    "optimizer",
    [
        "offload",
        *QUICK,
        *(pytest.param(n, marks=pytest.mark.long) for n in TORCH if n not in QUICK),
    ],
)
def test_every_optimizer(optimizer: str) -> None:
    check(run_distributed(todays_loop, 2, "list", optimizer, loss="torch"), optimizer)


@pytest.mark.parametrize("settings", [{"recompute": False}, {"zero_level": 2}])
def test_zero_2_and_without_recompute(settings: dict[str, Any]) -> None:
    check(run_distributed(todays_loop, 2, "list", **settings))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    found = run_distributed(todays_loop, 2, "list", "bmt", dtype, loss_scale=1024.0)
    for losses, _ in found:
        torch.testing.assert_close(losses, plain_losses("bmt")[0], rtol=1e-2, atol=0)


def test_pipeline() -> None:
    init = {"pipe_size": 2, "num_micro_batches": 4}
    check(run_distributed(todays_loop, 4, "pipe", init=init))


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("optimizer", ["bmt", "offload", "adam"])
@pytest.mark.parametrize("form", ["list", "modules", "normal", "wrapper", "pipe"])
def test_the_matrix(form: str, optimizer: str, world: int) -> None:
    init = {"pipe_size": 2 if world > 1 else 1, "num_micro_batches": 4} if form == "pipe" else {}
    for recompute in (True, False):
        for level in (2, 3):
            settings = {} if form == "wrapper" else {"recompute": recompute, "zero_level": level}
            for scale in (None, 64.0):
                arguments = (form, optimizer, None, scale, "bmt", init)
                check(run_distributed(todays_loop, world, *arguments, **settings), optimizer)
