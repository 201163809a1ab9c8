"""A process killed, or a disk full, at any phase of saving: the newest whole checkpoint is used.

Run as a script it is the process that gets killed: ``python test_checkpoint_faults.py DIRECTORY``
makes one folder per phase, with a forked child each, so torch is imported once.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from bmforge.errors import CheckpointError
from bmforge.train.checkpoint.checkpointer import (
    FAULT_POINTS,
    Checkpointer,
    find_checkpoints,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)

PUBLISHED = FAULT_POINTS.index("renamed")
DYING_STEP = 4


def make(step: int) -> tuple[nn.Module, AdamW]:
    """A model and an optimizer whose contents are a function of `step`, one frozen layer's too."""
    torch.manual_seed(step)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(16, 16))
    model[2].requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = AdamW(trained, lr=0.1, fused=True)
    for parameter in trained:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def save_until_killed(directory: Path, point: str) -> None:
    """Save steps 1 to 4 with two kept; the process dies in the fourth, at `point`."""
    step = 0

    def kill(phase: str) -> None:
        if step == DYING_STEP and phase == point:
            os.kill(os.getpid(), signal.SIGKILL)

    with Checkpointer(directory, keep_last=2, fault=kill) as checkpointer:
        for current in range(1, DYING_STEP + 1):
            step = current
            checkpointer.save(current, *make(current), state={"step": current})
            checkpointer.wait()


def kill_at_every_point(root: Path) -> None:
    """Fork one child per phase and report how each ended."""
    torch.set_num_threads(1)
    make(0)  # imports what torch imports on first use, once for all children
    for point in FAULT_POINTS:
        child = os.fork()
        if child == 0:
            save_until_killed(root / point, point)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(point, os.waitstatus_to_exitcode(status), flush=True)


def assert_is_step(directory: Path, step: int) -> None:
    """The newest sound checkpoint is that of `step`, and equals what was saved, bit for bit."""
    model, optimizer = make(99)
    with Checkpointer(directory, keep_last=2) as checkpointer:
        assert checkpointer.load_newest(model, optimizer) == (step, {"step": step})
        assert not list(directory.glob(".tmp*"))
        expected, expected_optimizer = make(step)
        for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(mine, theirs)
            for key, value in expected_optimizer.state[theirs].items():
                assert torch.equal(optimizer.state[mine][key], value)
        checkpointer.save(DYING_STEP, *make(DYING_STEP), state={"step": DYING_STEP})
        checkpointer.wait()
        assert checkpointer.last_error is None
    named = set()
    for path in find_checkpoints(directory):
        files = verify_checkpoint(path)["files"]
        named |= {name for name, record in files.items() if "shared" in record}
    assert {path.name for path in (directory / "frozen").iterdir()} == named
    assert named  # the killed save had some to write


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    root = tmp_path_factory.mktemp("killed")
    result = subprocess.run(
        [sys.executable, __file__, str(root)],
        capture_output=True,
        text=True,
        timeout=240,
        # Without accelerators: a forked child cannot use one that its parent has looked at.
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        check=True,
    )
    lines = [line.split() for line in result.stdout.splitlines()]
    return root, {point: int(code) for point, code in lines}


@pytest.mark.parametrize("point", FAULT_POINTS)
def test_killed_at(point: str, killed: tuple[Path, dict[str, int]]) -> None:
    root, codes = killed
    assert codes[point] == -signal.SIGKILL
    published = FAULT_POINTS.index(point) >= PUBLISHED
    assert_is_step(root / point, DYING_STEP if published else DYING_STEP - 1)
    assert find_checkpoints(root / point)[0].name == f"step-{DYING_STEP:08d}"


@pytest.mark.parametrize("point", FAULT_POINTS[1:PUBLISHED])
def test_full_disk_leaves_the_last_good_one(point: str, tmp_path: Path) -> None:
    full = False

    def fill(phase: str) -> None:
        if full and phase == point:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Checkpointer(tmp_path, keep_last=1, fault=fill) as checkpointer:
        checkpointer.save(1, *make(1), state={"step": 1})
        checkpointer.wait()
        full = True
        checkpointer.save(2, *make(2), state={"step": 2})
        checkpointer.wait()
        assert isinstance(checkpointer.last_error, CheckpointError)
        assert "No space left on device" in str(checkpointer.last_error)
        assert {path.name for path in tmp_path.iterdir()} == {"step-00000001", "latest", "frozen"}
        assert load_checkpoint(tmp_path, *make(99)) == {"step": 1}
        full = False
        checkpointer.save(3, *make(3), state={"step": 3})
        checkpointer.wait()
        assert checkpointer.last_error is None
    assert load_checkpoint(tmp_path, *make(99)) == {"step": 3}


def test_write_that_the_system_refuses(tmp_path: Path) -> None:
    """A real refused write (file size limit) instead of a pretended one."""
    save_checkpoint(tmp_path, nn.Linear(4, 4), step=1, state={"n": 1})
    big = nn.Linear(600, 600)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
        with pytest.raises(CheckpointError, match="File too large"):
            save_checkpoint(tmp_path, big, step=2)
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(2, big)
            checkpointer.wait()
            assert "File too large" in str(checkpointer.last_error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000001", "latest"}
    assert load_checkpoint(tmp_path, nn.Linear(4, 4)) == {"n": 1}


if __name__ == "__main__":
    kill_at_every_point(Path(sys.argv[1]))
