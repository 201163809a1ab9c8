"""Saved on one layout, loaded on another: whole tensors and optimizer state are bit-identical."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import SGD, AdamW, Muon, Optimizer

from bmforge.errors import CheckpointError
from bmforge.testing import run_distributed
from bmforge.train.checkpoint.checkpointer import (
    Checkpointer,
    find_checkpoints,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)

# Rows that neither 2, 3 nor 4 divide, and fewer rows than processes.
ROWS = (7, 5, 2)
Whole = dict[str, torch.Tensor]


class Small(nn.Module):
    """Three layers, the last with a tied weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, ROWS[0])
        self.second = nn.Linear(ROWS[0], ROWS[1])
        self.third = nn.Linear(ROWS[1], ROWS[2])
        self.again = nn.Linear(ROWS[1], ROWS[2])
        self.again.weight = self.third.weight
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.tanh(self.first(x)))
        return self.third(x) + self.again(x)


def shard(model: nn.Module, layout: str) -> nn.Module:
    """Cut the model: "plain", "fsdp", or "hsdp" (two replicas)."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if layout == "plain":
        return model
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    else:
        names = ("dp_replicate", "dp_shard")
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=names)
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def optimizers_of(model: Small, kind: str) -> list[Optimizer]:
    if kind == "sgd":
        return [SGD(model.parameters(), lr=0.1, momentum=0.9)]
    if kind == "adamw":
        return [AdamW(model.parameters(), lr=0.1, fused=True)]
    rest = [p for name, p in model.named_parameters() if name != "second.weight"]
    return [Muon([model.second.weight], lr=0.1), AdamW(rest, lr=0.1)]


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, put together by DTensor itself and not by the code under test."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def everything(model: nn.Module, optimizers: list[Optimizer]) -> Whole:
    """Every whole tensor of the model and of the optimizers by parameter name."""
    found = {name: full(tensor) for name, tensor in model.state_dict().items()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for parameter, values in optimizer.state.items():
            for key, value in values.items():
                found[f"{names[id(parameter)]}/{key}"] = full(value)
    return found


def trained(layout: str, kind: str, seed: int = 1) -> tuple[nn.Module, list[Optimizer]]:
    """A sharded model after two optimizer steps."""
    torch.manual_seed(seed)
    model = shard(Small(), layout)
    optimizers = optimizers_of(model, kind)
    for _ in range(2):
        model(torch.randn(4, 5)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizers


def save_job(directory: str, layout: str, kind: str) -> Whole:
    model, optimizers = trained(layout, kind)
    save_checkpoint(directory, model, optimizers, step=2, state={"seed": 5})
    return everything(model, optimizers)


def load_job(directory: str, layout: str, kind: str) -> tuple[Whole, dict[str, Any], bool]:
    torch.manual_seed(100)
    model = shard(Small(), layout)
    optimizers = optimizers_of(model, kind)
    state = load_checkpoint(directory, model, optimizers)
    whole = everything(model, optimizers)
    # The state must also be usable: its placements are those the optimizer works on.
    model(torch.randn(4, 5)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    return whole, state, model.third.weight is model.again.weight


def assert_whole(left: Whole, right: Whole) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype
        assert torch.equal(left[name], right[name]), name


@pytest.mark.parametrize("kind", ["adamw", pytest.param("sgd", marks=pytest.mark.long), "muon"])
@pytest.mark.parametrize(
    ("saved_on", "layout"),
    [pytest.param(3, "fsdp", marks=pytest.mark.long), (4, "hsdp"), (1, "plain")],
)
def test_saved_on_one_layout_loads_on_all(
    saved_on: int, layout: str, kind: str, tmp_path: Path
) -> None:
    saved = run_distributed(save_job, saved_on, str(tmp_path), layout, kind)
    verify_checkpoint(tmp_path / "step-00000002")
    loads = [(1, "plain"), (2, "fsdp"), (4, "hsdp"), (4, "fsdp")]
    for world, other in loads if kind == "adamw" else loads[1:3]:
        for whole, state, tied in run_distributed(load_job, world, str(tmp_path), other, kind):
            assert_whole(whole, saved[0])
            assert state == {"seed": 5}
            assert tied


def test_replicas_are_written_once(tmp_path: Path) -> None:
    saved = run_distributed(save_job, 4, str(tmp_path), "hsdp", "adamw")[0]
    path = tmp_path / "step-00000002"
    tensors = verify_checkpoint(path)["tensors"]
    held = sum(
        torch.Size(chunk["lengths"]).numel() for t in tensors.values() for chunk in t["chunks"]
    )
    names = [name for name in saved if name != "again.weight"]
    assert held == sum(saved[name].numel() for name in names)


def boxes_job(directory: str, mesh_shape: tuple[int, ...], cuts: tuple[int | None, ...]) -> bool:
    """Save one tensor cut along the given dims (None: replicated), then load it elsewhere."""
    mesh = init_device_mesh("cpu", mesh_shape)
    placements = [Replicate() if dim is None else Shard(dim) for dim in cuts]
    whole = torch.arange(7 * 5 * 3, dtype=torch.float32).reshape(7, 5, 3)
    model = nn.Module()
    model.weight = nn.Parameter(distribute_tensor(whole, mesh, placements))
    if not Path(directory).exists():
        dist.barrier()
        save_checkpoint(directory, model, step=1)
    with torch.no_grad():
        model.weight.to_local().zero_()
    load_checkpoint(directory, model)
    return torch.equal(full(model.weight), whole)


OTHERS = [1, *(pytest.param(n, marks=pytest.mark.long) for n in range(2, 7))]


@pytest.mark.parametrize("apart", OTHERS)
def test_boxes_cut_along_several_dims(apart: int, tmp_path: Path) -> None:
    """Saved on every layout, and loaded on the same and on one that is so many further on."""
    layouts = [((2, 2), (0, 1)), ((2, 2), (2, 0)), ((4,), (1,)), ((2, 2), (None, 2)),
               ((2, 2), (1, 1)), ((2,), (None,)), ((3,), (2,))]  # fmt: skip
    for (shape, cuts), other in zip(layouts, layouts[apart:] + layouts[:apart], strict=True):
        folder = str(tmp_path / f"{shape}{cuts}")
        for mesh_shape, mesh_cuts in ((shape, cuts), other):
            world = torch.Size(mesh_shape).numel()
            assert all(run_distributed(boxes_job, world, folder, mesh_shape, mesh_cuts))


def unsharded_job(directory: str) -> bool:
    """Save right after a forward pass without a backward one: parameters are gathered then."""
    torch.manual_seed(1)
    model = shard(Small(), "fsdp")
    optimizer = AdamW(model.parameters(), lr=0.1)
    with torch.no_grad():
        model(torch.randn(4, 5))
    save_checkpoint(directory, model, optimizer, step=1)
    expected = everything(model, [optimizer])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model(torch.randn(4, 5))
    load_checkpoint(directory, model, optimizer)
    return all(torch.equal(expected[k], v) for k, v in everything(model, [optimizer]).items())


def test_after_evaluation(tmp_path: Path) -> None:
    assert run_distributed(unsharded_job, 2, str(tmp_path)) == [True, True]


def generators_job(directory: str, save: bool) -> tuple[float, float]:
    model = nn.Linear(2, 2)
    if save:
        rank = dist.get_rank()
        random.seed(rank)
        torch.manual_seed(rank)
        save_checkpoint(directory, model, step=1, state={"seed": 5})
    else:
        load_checkpoint(directory, model)
    return random.random(), torch.rand(()).item()


def test_generators_per_rank(tmp_path: Path) -> None:
    drawn = run_distributed(generators_job, 2, str(tmp_path), True)
    assert drawn[0] != drawn[1]
    assert run_distributed(generators_job, 2, str(tmp_path), False) == drawn
    reseeded = run_distributed(generators_job, 3, str(tmp_path), False)
    assert len(set(reseeded)) == 3
    assert run_distributed(generators_job, 3, str(tmp_path), False) == reseeded


def failing_job(directory: str, failing_rank: int, phase: str) -> list[str]:
    model = nn.Linear(2, 2)

    def fail(name: str) -> None:
        if name == phase and dist.get_rank() == failing_rank:
            raise OSError(28, "No space left on device")

    errors = []
    save_checkpoint(directory, model, step=1)
    with Checkpointer(directory, fault=fail) as checkpointer:
        checkpointer.save(2, model)
        dist.barrier()  # the training's own collectives go on beside the writer's
        checkpointer.wait()
        errors.append(str(checkpointer.last_error))
        assert checkpointer.load_newest(model) == (1, {})
    return errors


@pytest.mark.parametrize(
    ("rank", "phase"), [(1, "shard-half"), (0, "shard-open"), (0, "manifest-written")]
)
def test_one_full_disk_stops_the_save_everywhere(rank: int, phase: str, tmp_path: Path) -> None:
    results = run_distributed(failing_job, 2, str(tmp_path), rank, phase)
    assert results[0] == results[1]
    assert "No space left on device" in results[0][0]
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000001", "latest"}


def damaged_job(directory: str) -> tuple[int, Whole]:
    torch.manual_seed(3)
    model = shard(Small(), "fsdp")
    with Checkpointer(directory) as checkpointer:
        found = checkpointer.load_newest(model)
    assert found is not None
    return found[0], everything(model, [])


def save_two_job(directory: str) -> Whole:
    model = shard(Small(), "fsdp")
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, model)
        whole = everything(model, [])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        checkpointer.save(2, model)
    return whole


def test_damage_in_any_shard_is_agreed_on(tmp_path: Path) -> None:
    whole = run_distributed(save_two_job, 3, str(tmp_path / "sound"))[0]
    for number in range(3):
        folder = tmp_path / f"damaged-{number}"
        shutil.copytree(tmp_path / "sound", folder)
        path = find_checkpoints(folder)[0] / f"shard-{number:05d}-of-00003.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        for step, found in run_distributed(damaged_job, 2, str(folder)):
            assert step == 1
            assert_whole(found, whole)


def misfit_job(directory: str) -> str:
    model = fully_shard(nn.Linear(5, 8), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    before = model.weight.to_local().clone()
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(directory, model)
    assert torch.equal(model.weight.to_local(), before)
    return str(caught.value)


def test_another_model_is_refused_alike_everywhere(tmp_path: Path) -> None:
    run_distributed(save_job, 2, str(tmp_path), "fsdp", "sgd")
    messages = run_distributed(misfit_job, 3, str(tmp_path))
    assert len(set(messages)) == 1
    assert "not in the checkpoint: weight" in messages[0]
    assert "only in the checkpoint: first.weight" in messages[0]
