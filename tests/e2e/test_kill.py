"""Killed at random instants and started again, a run ends as if nothing had happened.

Real processes and real signals; `benchmarks/training/kill_resume.py` does the same fifty times.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from real_runs import (
    command,
    final_hashes,
    finish,
    kill_in_chain,
    losses,
    start,
    wait_for_step,
    workers_of,
    write_config,
)

from bmforge.config import load_toml
from bmforge.recipes.pretrain import GPT2PretrainConfig, pretrain
from bmforge.testing import run_distributed
from bmforge.train.checkpoint.checkpointer import find_checkpoints

STEPS = 40
TWO = ("--nproc-per-node", "2", "--max-restarts", "2")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("kill"), STEPS)


def pretrain_here(config: Path, run_dir: Path) -> None:
    """The same run inside the pool's workers, which costs no start of a process."""
    loaded = load_toml(GPT2PretrainConfig, config)
    loaded.run_dir = run_dir
    pretrain(loaded)


@pytest.fixture(scope="module")
def unkilled(config: Path) -> Path:
    run_dir = config.parent / "unkilled"
    run_distributed(pretrain_here, 1, config, run_dir)
    return run_dir


@pytest.fixture(scope="module")
def unkilled_by_two(config: Path) -> Path:
    run_dir = config.parent / "unkilled-2"
    run_distributed(pretrain_here, 2, config, run_dir)
    return run_dir


def assert_same_end(run_dir: Path, wanted: Path) -> None:
    assert losses(run_dir) == losses(wanted)
    assert [row[0] for row in losses(run_dir)] == list(range(1, STEPS + 1))
    assert final_hashes(run_dir) == final_hashes(wanted)


@pytest.mark.parametrize(
    ("kills", "seed"),
    [(3, 1), *(pytest.param(10, seed, marks=pytest.mark.long) for seed in range(2, 7))],
)
def test_killed_at_random_instants(config, unkilled, tmp_path: Path, kills, seed) -> None:
    run_dir = tmp_path / "run"
    arguments = command(config, run_dir)
    hits = kill_in_chain(arguments, kills, STEPS, seed)
    status, errors = finish(start(arguments))
    assert status == 0, errors
    assert "training" in hits
    assert_same_end(run_dir, unkilled)


def whole_log(run_dir: Path) -> str:
    return (run_dir / "log.txt").read_text()


def test_stop_signals_save_and_say_so(config, unkilled, tmp_path: Path, monkeypatch) -> None:
    """The status is 130, but where the launcher would start a failed process again."""
    run_dir = tmp_path / "run"
    arguments, stopped_at = command(config, run_dir), 0
    for number, restarts, wanted in ((signal.SIGTERM, "1", 0), (signal.SIGINT, "0", 130)):
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
        process = start(arguments)
        assert wait_for_step(process, 7)
        process.send_signal(number)
        status, errors = finish(process)
        assert status == wanted, errors
        assert "Traceback" not in errors
        assert stopped_at == 0 or f"resumed at step {stopped_at}" in whole_log(run_dir)
        before, stopped_at = stopped_at, losses(run_dir)[-1][0]
        assert before + 7 <= stopped_at < STEPS
        assert f"stopped by a signal at step {stopped_at}" in errors
        assert find_checkpoints(run_dir / "checkpoints")[0].name == f"step-{stopped_at:08d}"
    run_distributed(pretrain_here, 1, config, run_dir)
    assert_same_end(run_dir, unkilled)


@pytest.mark.long
def test_torchrun_does_not_bring_a_stopped_run_back(config, tmp_path: Path) -> None:
    """One of two workers is asked to stop: all save and end, and the agent starts none again.

    Asked itself, the agent passes it on and ends with a status that is not 0.
    """
    run_dir = tmp_path / "run"
    for asked, wanted in (("worker", (0,)), ("agent", (1, -signal.SIGTERM))):
        process = start(command(config, run_dir, TWO))
        assert wait_for_step(process, 5)
        workers = workers_of(process.pid)
        os.kill(workers[1] if asked == "worker" else process.pid, signal.SIGTERM)
        status, errors = finish(process)
        assert status in wanted, errors
        assert "stopped by a signal at step" in errors
        log, second = whole_log(run_dir), asked == "agent"
        assert log.count("stopped by a signal at") == 1 + second
        assert log.count("resumed at step") == second


@pytest.mark.parametrize(
    ("victim", "rendezvous"),
    [
        pytest.param(1, (), id="rank1-default", marks=pytest.mark.long),
        pytest.param(0, (), id="rank0-default", marks=pytest.mark.long),
        pytest.param(0, ("--standalone",), id="rank0-c10d", marks=pytest.mark.long),
    ],
)
def test_torchrun_brings_a_killed_worker_back(
    config, unkilled_by_two, tmp_path: Path, victim, rendezvous
) -> None:
    run_dir = tmp_path / "run"
    process = start(command(config, run_dir, (*TWO, *rendezvous)))
    assert wait_for_step(process, 10)
    workers = workers_of(process.pid)
    assert len(workers) == 2
    os.kill(workers[victim], signal.SIGKILL)
    status, errors = finish(process)
    assert status == 0, errors
    assert "resumed at step" in errors
    assert_same_end(run_dir, unkilled_by_two)
