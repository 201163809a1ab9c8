"""Frozen tensors are kept once: as safe as what every checkpoint has of its own."""

from __future__ import annotations

import hashlib
import json
import logging
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

from bmforge.errors import CheckpointError
from bmforge.testing import assert_equal_trees, run_distributed
from bmforge.train.checkpoint.checkpointer import (
    Checkpointer,
    DamagedCheckpointError,
    find_checkpoints,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)


class Tuned(nn.Module):
    """A frozen layer, a table that nothing trains, and a small layer that is trained."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(19, 21)
        self.register_buffer("table", torch.randn(21, 19, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.part = nn.Linear(21, 2)
        self.base.requires_grad_(False)


def tuned(seed: int = 0) -> tuple[Tuned, AdamW]:
    model = Tuned(seed)
    return model, AdamW(model.part.parameters(), lr=0.1)


def step_(model: Tuned, optimizer: AdamW) -> None:
    """Train what is trained."""
    model.count += 1
    model.part(model.base(torch.randn(5, 19))).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def files_in(directory: Path) -> set[str]:
    folder = directory / "frozen"
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def named_in(path: Path) -> set[str]:
    """The shared files that a manifest names, read without the code under test."""
    files = json.loads((path / "manifest.json").read_bytes())["files"]
    return {name for name, record in files.items() if "shared" in record}


def keys_of(path: Path) -> set[str]:
    return set(load_file(next(path.glob("shard-*"))))


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logger = logging.getLogger("bmforge")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def test_they_are_written_once(tmp_path: Path) -> None:
    """Under the hash of their file; a checkpoint has the rest, and loads as if it had all."""
    model, optimizer = tuned()
    wanted = []
    with Checkpointer(tmp_path, keep_last=9) as checkpointer:
        for step in range(1, 4):
            step_(model, optimizer)
            wanted.append({name: t.clone() for name, t in model.state_dict().items()})
            checkpointer.save(step, model, optimizer)
            checkpointer.wait()
            assert checkpointer.last_error is None
    (file,) = files_in(tmp_path)
    content = (tmp_path / "frozen" / file).read_bytes()
    assert hashlib.sha256(content).hexdigest() == file.removesuffix(".safetensors")
    kept = load_file(tmp_path / "frozen" / file)
    assert kept.keys() == {"model/base.weight", "model/table"}  # what is small goes along
    assert torch.equal(kept["model/table"], model.table)
    for path, values in zip(find_checkpoints(tmp_path), wanted[::-1], strict=True):
        assert named_in(path) == {file}
        assert keys_of(path) & {"model/base.weight", "model/table"} == set()
        assert {"model/base.bias", "model/count", "model/part.weight"} <= keys_of(path)
        other, others = tuned(seed=5)
        load_checkpoint(path, other, others)
        assert_equal_trees(dict(other.state_dict()), values)
    assert json.loads((path / "manifest.json").read_bytes())["version"] == 2


def test_without_any_nothing_changes(tmp_path: Path) -> None:
    """A checkpoint of a model that is trained whole is of the old format, and one folder."""
    save_checkpoint(tmp_path, nn.Linear(30, 30), step=1)
    assert json.loads((tmp_path / "step-00000001/manifest.json").read_bytes())["version"] == 1
    assert files_in(tmp_path) == set()


def test_any_flipped_byte_is_refused(tmp_path: Path) -> None:
    """Before anything changes; what was saved before anything was frozen is used instead."""
    model, optimizer = tuned()
    model.base.requires_grad_(True)
    model.table = torch.zeros(1)
    save_checkpoint(tmp_path, model, optimizer, step=1, state={"n": 1})
    model.base.requires_grad_(False)
    save_checkpoint(tmp_path, model, optimizer, step=2, state={"n": 2})
    (file,) = files_in(tmp_path)
    path = tmp_path / "frozen" / file
    original, draw = path.read_bytes(), random.Random(0)
    damages = [original[:-3], original + b"\0", b""]
    for _ in range(60):
        damaged = bytearray(original)
        damaged[draw.randrange(len(original))] ^= draw.randrange(1, 256)
        damages.append(bytes(damaged))
    for damaged in damages:
        path.write_bytes(damaged)
        other, others = tuned(seed=5)
        other.table = torch.ones(1)
        before = {name: t.clone() for name, t in other.state_dict().items()}
        with pytest.raises(DamagedCheckpointError, match=file):
            load_checkpoint(tmp_path / "step-00000002", other, others)
        assert_equal_trees(dict(other.state_dict()), before)
        assert not others.state
        assert load_checkpoint(tmp_path, other, others) == {"n": 1}
    path.write_bytes(original)
    assert load_checkpoint(tmp_path, other, others) == {"n": 2}


def test_a_checkpoint_without_them_says_what_is_missing(tmp_path: Path) -> None:
    """Copied alone it names the folder; with that folder beside it, it loads."""
    model, optimizer = tuned()
    save_checkpoint(tmp_path / "run", model, optimizer, step=1)
    shutil.copytree(tmp_path / "run/step-00000001", tmp_path / "away/best")
    with pytest.raises(DamagedCheckpointError, match=r"away/frozen/.* is missing.*'frozen'"):
        load_checkpoint(tmp_path / "away/best", *tuned(1))
    shutil.copytree(tmp_path / "run/frozen", tmp_path / "away/frozen")
    other, others = tuned(1)
    load_checkpoint(tmp_path / "away/best", other, others)
    assert_equal_trees(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize(("keep_last", "keep_every"), [(1, None), (2, None), (1, 3), (2, 4)])
def test_retention_keeps_what_is_named(
    keep_last: int, keep_every: int | None, tmp_path: Path
) -> None:
    """At every instant just the files that a checkpoint names are there, while values change."""
    model, optimizer = tuned()
    counts = set()
    with Checkpointer(tmp_path, keep_last=keep_last, keep_every=keep_every) as checkpointer:
        for step in range(1, 13):
            if step % 4 == 0:  # other values are frozen from now on
                with torch.no_grad():
                    model.base.weight += 1
            if step == 7:
                model.table.data.mul_(2)  # behind autograd's back
            step_(model, optimizer)
            checkpointer.save(step, model, optimizer)
            checkpointer.wait()
            assert checkpointer.last_error is None
            paths = find_checkpoints(tmp_path)
            assert files_in(tmp_path) == set().union(*(named_in(path) for path in paths))
            counts.add(len(files_in(tmp_path)))
            for path in paths:
                verify_checkpoint(path)
            other, others = tuned(seed=5)
            load_checkpoint(tmp_path, other, others)
            assert_equal_trees(dict(other.state_dict()), dict(model.state_dict()))
    assert max(counts) >= 2


def test_what_nobody_names_goes_and_what_cannot_be_read_keeps(tmp_path: Path) -> None:
    """A killed run leaves a file that no checkpoint names; a damaged manifest may name any."""
    model, optimizer = tuned()
    with Checkpointer(tmp_path, keep_last=2) as checkpointer:
        checkpointer.save(1, model, optimizer)
        checkpointer.wait()
        orphan = tmp_path / "frozen" / f"{'0' * 64}.safetensors"
        orphan.write_bytes(b"left by a killed run")
        manifest = tmp_path / "step-00000001/manifest.json"
        content = manifest.read_bytes()
        manifest.write_bytes(content + b" ")
        checkpointer.save(2, model, optimizer)
        checkpointer.wait()
        assert orphan.exists()
        manifest.write_bytes(content)
        checkpointer.save(3, model, optimizer)
        checkpointer.wait()
    assert not orphan.exists()
    for path in find_checkpoints(tmp_path):
        verify_checkpoint(path)


def test_a_tensor_that_is_trained_later(tmp_path: Path) -> None:
    """It goes with the checkpoint from then on; the others stay where they are."""
    model, optimizer = tuned()
    save_checkpoint(tmp_path, model, optimizer, step=1)
    first = files_in(tmp_path)
    model.base.weight.requires_grad_(True)
    with torch.no_grad():
        model.base.weight += 1
    both = AdamW([*model.part.parameters(), model.base.weight], lr=0.1)
    save_checkpoint(tmp_path, model, both, step=2)
    newest = tmp_path / "step-00000002"
    assert "model/base.weight" in keys_of(newest)
    assert "model/table" not in keys_of(newest)
    assert files_in(tmp_path) == named_in(newest) == first
    model.base.weight.requires_grad_(False)
    save_checkpoint(tmp_path, model, optimizer, step=3)
    assert "model/base.weight" not in keys_of(tmp_path / "step-00000003")
    assert len(named_in(tmp_path / "step-00000003")) == 2
    other, others = tuned(seed=5)
    load_checkpoint(tmp_path, other, others)
    assert torch.equal(other.base.weight, model.base.weight)


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_a_damaged_file_is_written_anew(
    damage: str, tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    """A new start finds it at its first save; the checkpoints that name it are sound again."""
    model, optimizer = tuned()
    save_checkpoint(tmp_path, model, optimizer, step=1)
    (file,) = files_in(tmp_path)
    path = tmp_path / "frozen" / file
    original = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, model, optimizer)
        checkpointer.wait()
        assert checkpointer.last_error is None
        assert "frozen tensors are therefore written again" in warnings.text
        assert path.read_bytes() == original
        path.unlink()  # behind the run's back
        checkpointer.save(3, model, optimizer)
        checkpointer.wait()
    assert path.read_bytes() == original
    assert len(find_checkpoints(tmp_path)) == 3
    for found in find_checkpoints(tmp_path):
        verify_checkpoint(found)


def test_saving_the_same_again(tmp_path: Path) -> None:
    """A sound checkpoint of the step stays; other frozen values are a difference like any."""
    model, optimizer = tuned()
    save_checkpoint(tmp_path, model, optimizer, step=1)
    save_checkpoint(tmp_path, model, optimizer, step=1)
    with torch.no_grad():
        model.base.weight[3, 4] += 1
    with pytest.raises(CheckpointError, match=r"the values of model/base\.weight"):
        save_checkpoint(tmp_path, model, optimizer, step=1)


def go_on(directory: str, step: int, layout: str) -> dict[str, Any]:
    """Load the newest checkpoint, if any, on a layout, and save another one."""
    model = Tuned(seed=step)
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model.base, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = AdamW(model.part.parameters(), lr=0.1)
    with Checkpointer(directory, keep_last=9) as checkpointer:
        checkpointer.load_newest(model, [optimizer])
        model.count += 1
        checkpointer.save(step, model, [optimizer])
        checkpointer.wait()
        assert checkpointer.last_error is None
    return {"base": model.base.weight.full_tensor() if layout == "fsdp" else model.base.weight}


def test_layouts_share_them(tmp_path: Path) -> None:
    """Two processes write their parts; one, three, and two again find them equal and name them."""
    args = str(tmp_path)
    run_distributed(go_on, 2, args, 1, "fsdp")
    first = files_in(tmp_path)
    assert len(first) == 2
    for step, (world, layout) in enumerate([(1, "plain"), (3, "fsdp"), (2, "plain"), (2, "fsdp")]):
        run_distributed(go_on, world, args, step + 2, layout)
        assert files_in(tmp_path) == first
    for path in find_checkpoints(tmp_path):
        assert named_in(path) == first
        verify_checkpoint(path)
    model, wanted = Tuned(seed=9), Tuned(seed=1)
    load_checkpoint(tmp_path, model)
    assert torch.equal(model.base.weight, wanted.base.weight)
    assert torch.equal(model.table, wanted.table)
    assert model.count == 5
