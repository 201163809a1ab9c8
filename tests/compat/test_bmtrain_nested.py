"""Wrapped layers inside modules, inside blocks, as BMTrain's test of optimizer states has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bmforge.compat.bmtrain as bmt
from bmforge.compat.bmtrain.parameter import whole
from bmforge.testing import run_distributed


class Inner(bmt.DistributedModule):
    """Wrapped layers, and a parameter of an odd size that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = bmt.BMTrainModelWrapper(torch.nn.Linear(12, 24))
        self.fc2 = bmt.BMTrainModelWrapper(torch.nn.Linear(24, 12))
        self.param = bmt.DistributedParameter(torch.zeros(37))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(x))


class Outer(torch.nn.Module):
    """A plain module around both."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1, self.layer2 = Inner(), bmt.CheckpointBlock(Inner())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer2(self.layer1(x))


def train(models: list[Any], manager: Any) -> list[torch.Tensor]:
    torch.manual_seed(33)
    x = torch.randn(4, 12)
    for _ in range(5):
        manager.zero_grad()
        outputs = [model(x) for model in models]
        weight = torch.randn_like(outputs[0])
        manager.backward(sum((y * weight).sum() for y in outputs))
        manager.step()
    return [whole(p).clone() for model in models for p in model.parameters()]


def go_on(folder: str) -> None:
    """Three models share one manager; states are saved by the optimizers themselves."""
    bmt.init_distributed(seed=1)
    models: list[Any] = [Outer() for _ in range(3)]
    bmt.save(models[0], Path(folder, "0.pt"))
    for model in models:
        bmt.load(model, Path(folder, "0.pt"))
    optimizers = [
        bmt.optim.AdamOptimizer(models[0].parameters(), weight_decay=1e-3),
        bmt.optim.AdamOffloadOptimizer(models[1].parameters(), weight_decay=1e-3),
        torch.optim.Adam(models[2].parameters(), weight_decay=1e-3),
    ]
    manager = bmt.optim.OptimManager(loss_scale=256)
    for optimizer in optimizers:
        manager.add_optimizer(optimizer)
    train(models, manager)
    for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        bmt.save(model, Path(folder, f"{number}.pt"))
        torch.save(optimizer.state_dict(), Path(folder, f"{number}.{bmt.rank()}.opt"))
    want = train(models, manager)
    for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        bmt.load(model, Path(folder, f"{number}.pt"))
        optimizer.load_state_dict(torch.load(Path(folder, f"{number}.{bmt.rank()}.opt")))
    for got, end in zip(train(models, manager), want, strict=True):
        assert torch.equal(got, end)


@pytest.mark.parametrize("world", [1, 2])
def test_optimizers_save_and_load_by_themselves(world: int, tmp_path: Path) -> None:
    run_distributed(go_on, world, str(tmp_path))
