"""A directory has one holder: a dead one's is taken over, a living one's on another machine not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bmforge.errors import ConfigError, DistributedError
from bmforge.parallel import run_on_first
from bmforge.testing import run_distributed
from bmforge.train import run_lock
from bmforge.train.run_lock import LOCK_NAME, RunLock, hold_run_dir


def make_lock(directory: Path, **words: str | int) -> Path:
    """A lock as a process of another machine wrote it."""
    known = {"host": "node7", "machine": "node7 x y", "pid": 41, "born": "5", "since": "Monday"}
    file = directory / LOCK_NAME
    file.write_text(json.dumps({**known, **words}))
    os.utime(file, ns=(0, 0))
    return file


def refuse_links(*paths: object) -> None:
    raise PermissionError("this file system has no links")


@pytest.mark.parametrize("has_links", [True, False])
def test_of_another_machine(has_links: bool, tmp_path: Path, monkeypatch) -> None:
    """Touched, however rarely and whatever its clock says, it lives; untouched it is gone."""
    if not has_links:
        monkeypatch.setattr(run_lock.os, "link", refuse_links)
    file = make_lock(tmp_path)
    waited: list[float] = []

    def touch_late(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 6:
            os.utime(file, ns=(1, 1))

    with pytest.raises(ConfigError, match="in use by process 41 on node7, since Monday"):
        RunLock(tmp_path, touch_late).take()
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_NAME]
    waited.clear()
    lock = RunLock(tmp_path, waited.append)
    lock.take()
    assert sum(waited) >= 30
    assert json.loads(file.read_text())["pid"] == os.getpid()
    lock.check()
    lock.release()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 3}'])
def test_a_lock_that_says_nothing(text: str, tmp_path: Path) -> None:
    """It may be under way, so it is waited for."""
    (tmp_path / LOCK_NAME).write_text(text)
    waited: list[float] = []
    lock = RunLock(tmp_path, waited.append)
    lock.take()
    lock.release()
    assert sum(waited) >= 30


def test_the_same_number_is_not_the_same_process(tmp_path: Path) -> None:
    """A machine gives the number of a process that is gone to another one."""
    mine = RunLock(tmp_path)
    mine.take()
    words = json.loads((tmp_path / LOCK_NAME).read_text())
    mine.release()
    make_lock(tmp_path, **{**words, "born": "1"})
    RunLock(tmp_path, pytest.fail).take()


def test_held_twice_by_one_process(tmp_path: Path) -> None:
    """A run's loop holds what its recipe holds; the recipe lets it go."""
    with hold_run_dir(tmp_path):
        with hold_run_dir(tmp_path):
            pass
        assert [path.name for path in tmp_path.iterdir()] == [LOCK_NAME]
    assert not list(tmp_path.iterdir())


def lose(directory: Path) -> None:
    with hold_run_dir(directory) as check:
        run_on_first((directory / LOCK_NAME).unlink)
        check()  # removed by a person: made again
        run_on_first(lambda: make_lock(directory))
        check()


def test_taken_over_while_it_slept(tmp_path: Path) -> None:
    """All processes are told, and the other one's lock stays."""
    told = "(?s)rank 0.*taken over by process 41 on node7.*rank 1.*taken over by process 41"
    with pytest.raises(DistributedError, match=told):
        run_distributed(lose, 2, tmp_path)
    assert "node7" in (tmp_path / LOCK_NAME).read_text()
