"""A run's directory belongs to one run, and no instant leaves it unusable."""

from __future__ import annotations

import json
import os
import platform
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from bmforge.config import load_toml
from bmforge.data.prepare.record import RECORD_NAME
from bmforge.errors import ConfigError
from bmforge.logging import get_logger
from bmforge.recipes import QuickstartConfig, quickstart
from bmforge.recipes.run_dir import (
    add_results,
    check_run_dir,
    lock_run_dir,
    open_run_dir,
    write_run_config,
)
from bmforge.train.run_lock import LOCK_NAME

FREE = frozenset({"cadence"})


def files_below(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@dataclass
class Config:
    """A run's config with a field that may be None although its default is not."""

    lr: float = 0.1
    cadence: int = 5
    clip: float | None = 1.0
    eval_every: int | None = None


def test_claimed_late_and_found_again(tmp_path):
    run_dir = tmp_path / "run"
    open_run_dir(run_dir, Config(), FREE)
    (run_dir / "log.txt").write_text("said something, then failed")
    open_run_dir(run_dir, Config(lr=0.2), FREE)  # the first one never began
    write_run_config(run_dir, Config(lr=0.2))
    open_run_dir(run_dir, Config(lr=0.2, cadence=7), FREE)
    with pytest.raises(ConfigError, match=r"lr: 0.2 in that run, now 0.3"):
        open_run_dir(run_dir, Config(lr=0.3), FREE)


def test_a_refused_run_leaves_nothing(tmp_path):
    new, old, own = tmp_path / "new", tmp_path / "old", tmp_path / "own"
    old.mkdir()
    for run_dir in (new, old, own):
        with suppress(ConfigError), lock_run_dir(run_dir, Config(), FREE):
            get_logger().info("said something")
            if run_dir == own:
                write_run_config(own, Config())
            raise ConfigError("refused")
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "log.txt",
        "old",
        "own",
        "run.toml",
    ]


def test_one_run_at_a_time(tmp_path):
    """Another process holds the directory until it is killed; what it wrote stays."""
    child = os.fork()
    if child == 0:
        try:
            with lock_run_dir(tmp_path, Config(), FREE):
                get_logger().info("the first one")
                write_run_config(tmp_path, Config())
                (tmp_path / "half").write_text("half a checkpoint")
                os.kill(os.getpid(), signal.SIGSTOP)
        finally:
            os._exit(1)
    os.waitpid(child, os.WUNTRACED)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / RECORD_NAME).write_text("{}")
    before = files_below(tmp_path)
    told = rf"in use by process {child} on {platform.node()}, since 2.*choose another run_dir"
    with pytest.raises(ConfigError, match=told), lock_run_dir(tmp_path, Config(), FREE):
        pass
    fresh = QuickstartConfig(run_dir=tmp_path, fresh=True)
    with pytest.raises(ConfigError, match=told):
        quickstart(fresh)
    assert files_below(tmp_path) == before
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with lock_run_dir(tmp_path, Config(), FREE):
        assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == os.getpid()
    assert {path.name for path in tmp_path.iterdir()} == {"data", "half", "log.txt", "run.toml"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process to kill is forked")
def test_killed_while_the_config_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "replace", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    child = os.fork()
    if not child:
        write_run_config(tmp_path, Config())
        os._exit(1)
    os.waitpid(child, 0)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == [".run.toml.partial"]
    open_run_dir(tmp_path, Config(lr=0.2), FREE)
    write_run_config(tmp_path, Config(lr=0.2))
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_none_survives_the_file(tmp_path):
    write_run_config(tmp_path, Config(clip=None))
    assert load_toml(Config, tmp_path / "run.toml") == Config(clip=None)


def test_a_torn_file_is_named(tmp_path):
    (tmp_path / "run.toml").write_text("lr = ")
    assert "damaged" in (check_run_dir(tmp_path, Config(), FREE) or "")


def test_foreign_files_are_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="not a run"):
        open_run_dir(tmp_path, Config(), FREE)


def test_results_are_added_up(tmp_path):
    add_results(tmp_path, {"bits": {"model": 1.0}})
    add_results(tmp_path, {"bits": {"bigram": 2.0}, "loss": {"model": 3.0}})
    text = (tmp_path / "results.json").read_text()
    assert "bigram" in text
    assert text.count("model") == 2
