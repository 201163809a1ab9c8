"""Which checkpoints are kept, found and published, and in which order that happens."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from bmforge.errors import CheckpointError, ConfigError
from bmforge.train.checkpoint import write
from bmforge.train.checkpoint.checkpointer import (
    FAULT_POINTS,
    Checkpointer,
    find_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from bmforge.train.checkpoint.write import DiskFullError


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [(1, None, [7]), (3, None, [7, 6, 5]), (2, 3, [7, 6, 3]), (1, 2, [7, 6, 4, 2])],
)
def test_retention(keep_last: int, keep_every: int | None, kept: list[int], tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with Checkpointer(tmp_path, keep_last=keep_last, keep_every=keep_every) as checkpointer:
        for step in range(1, 8):
            checkpointer.save(step, model)
    assert [path.name for path in find_checkpoints(tmp_path)] == [f"step-{n:08d}" for n in kept]
    assert not list(tmp_path.glob(".tmp*"))


def test_retention_leaves_later_steps_alone(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save_checkpoint(tmp_path, model, step=9)
    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        checkpointer.save(4, model)
        checkpointer.save(5, model)
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step-00000009", "step-00000005"]


def test_saving_the_same_twice_keeps_the_first(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    path = save_checkpoint(tmp_path, model, optimizer, step=1, state={"n": 1})
    stamp = (path / "manifest.json").stat().st_mtime_ns
    (tmp_path / "latest").write_text("step-00000000\n")
    save_checkpoint(tmp_path, model, optimizer, step=1, state={"n": 1})
    assert (path / "manifest.json").stat().st_mtime_ns == stamp
    assert (tmp_path / "latest").read_text() == "step-00000001\n"


def other_state(model: nn.Linear, optimizer: AdamW) -> dict[str, int]:
    return {"n": 2}


def other_weight(model: nn.Linear, optimizer: AdamW) -> dict[str, int]:
    with torch.no_grad():
        model.weight[1, 0] += 1e-6
    return {"n": 1}


def other_setting(model: nn.Linear, optimizer: AdamW) -> dict[str, int]:
    optimizer.param_groups[0]["lr"] = 0.5
    return {"n": 1}


def other_dtype(model: nn.Linear, optimizer: AdamW) -> dict[str, int]:
    model.bias.data = model.bias.data.double()
    return {"n": 1}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_state, "in the training state"),
        (other_weight, "the values of model/weight"),
        (other_setting, "the optimizer settings of weight"),
        (other_dtype, "dtype or shape of model/bias"),
    ],
)
def test_something_else_of_the_same_step_is_refused(
    change: Callable[..., dict[str, int]], words: str, tmp_path: Path
) -> None:
    model = nn.Linear(2, 2)
    optimizer = AdamW(model.parameters(), lr=0.1)
    path = save_checkpoint(tmp_path, model, optimizer, step=1, state={"n": 1})
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    state = change(model, optimizer)
    with pytest.raises(CheckpointError, match=f"already exists and differs .*{words}"):
        save_checkpoint(tmp_path, model, optimizer, step=1, state=state)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, model, optimizer, state)
        checkpointer.wait()
        assert words in str(checkpointer.last_error)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_a_damaged_one_of_the_same_step_is_moved_aside(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    path = save_checkpoint(tmp_path, model, step=1, state={"n": 1})
    (path / "manifest.json").write_bytes(b"{}")
    save_checkpoint(tmp_path, model, step=1, state={"n": 2})
    assert load_checkpoint(tmp_path, model) == {"n": 2}
    assert len(list(tmp_path.glob("damaged-step-00000001-*"))) == 1


def test_leftovers_are_cleaned_at_the_start(tmp_path: Path) -> None:
    (tmp_path / ".tmp-step-00000003-abc").mkdir()
    (tmp_path / ".tmp-latest").write_text("x")
    Checkpointer(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_nothing_to_load(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "none") as checkpointer:
        assert checkpointer.load_newest(nn.Linear(2, 2)) is None
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        load_checkpoint(tmp_path, nn.Linear(2, 2))


def test_run_directory_is_understood(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "checkpoints", nn.Linear(2, 2), step=1, state={"n": 1})
    assert load_checkpoint(tmp_path, nn.Linear(2, 2)) == {"n": 1}


def test_settings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep_last=0"):
        Checkpointer(tmp_path, keep_last=0)
    with pytest.raises(ConfigError, match="keep_every=0"):
        Checkpointer(tmp_path, keep_every=0)


def test_phases_come_in_the_documented_order(tmp_path: Path) -> None:
    phases: list[str] = []
    with Checkpointer(tmp_path, keep_last=1, fault=phases.append) as checkpointer:
        checkpointer.save(1, nn.Linear(2, 2))
        checkpointer.wait()
        phases.clear()
        checkpointer.save(2, nn.Linear(2, 2))
    assert tuple(phases) == FAULT_POINTS


@pytest.mark.parametrize("is_told", [True, False], ids=["free-space", "quota"])
def test_room_for_as_many_as_are_kept(is_told: bool, tmp_path: Path, monkeypatch) -> None:
    """On a disk of two and a half, the older of two goes before the third is written.

    Where the file system tells what is free nothing is begun that does not fit; a quota tells only
    when a write fails. On less than two the only one stays, and the error says what is missing.
    """
    model = nn.Linear(1000, 1000)
    save_checkpoint(tmp_path, model, step=1)
    begun: list[str] = []

    def used() -> int:
        return sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())

    size = used() * 5 // 2 + (1 << 20)

    def refuse(phase: str) -> None:
        begun.append(phase)
        if phase == "shard-half" and used() > size - (1 << 20):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def measure(path: Path) -> Any:
        return mock.Mock(free=size - used() if is_told else 1 << 60)

    monkeypatch.setattr(write.shutil, "disk_usage", measure)
    with Checkpointer(tmp_path, keep_last=2, fault=refuse) as checkpointer:
        for step in (2, 3, 4):
            checkpointer.save(step, model)
            checkpointer.wait()
            assert checkpointer.last_error is None
            kept = [path.name for path in find_checkpoints(tmp_path)]
            assert kept == [f"step-{n:08d}" for n in (step, step - 1)]
        begun.clear()
        size = used()
        checkpointer.save(5, nn.Linear(4000, 4000))
        checkpointer.wait()
        assert isinstance(checkpointer.last_error, DiskFullError)
        if is_told:
            assert re.search(
                r"0\.065 GB, but only 0\.00\d GB are free", str(checkpointer.last_error)
            )
            assert begun == ["snapshot"]
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step-00000004"]


def test_a_damaged_one_is_no_reason_to_remove_another(tmp_path: Path, monkeypatch) -> None:
    model = nn.Linear(2, 2)
    for step in (1, 2):
        save_checkpoint(tmp_path, model, step=step)
    shard = next((tmp_path / "step-00000002").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    monkeypatch.setattr(write.shutil, "disk_usage", lambda path: mock.Mock(free=0))
    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        checkpointer.save(3, model)
        checkpointer.wait()
        assert isinstance(checkpointer.last_error, DiskFullError)
    assert [p.name for p in find_checkpoints(tmp_path)] == ["step-00000002", "step-00000001"]
