"""A program is started by any launcher, or by none, and prints the same losses."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import bmforge.compat.bmtrain as bmt
from bmforge.errors import ConfigError
from bmforge.testing import run_distributed

PROGRAM = str(Path(__file__).resolve().parents[2] / "examples" / "bmtrain_program.py")
RUN = [sys.executable, "-m", "torch.distributed.run"]
LAUNCH = [sys.executable, "-W", "ignore", "-m", "torch.distributed.launch"]


def start(command: list[str]) -> subprocess.Popen[str]:
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    settings = {k: v for k, v in os.environ.items() if k not in hidden}
    return subprocess.Popen(
        [*command, PROGRAM, "--steps", "4"],
        env={**settings, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def losses(process: subprocess.Popen[str]) -> list[float]:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return [float(text) for text in re.findall(r"loss (\S+)", out)]


@cache
def alone() -> list[float]:
    found = losses(start([sys.executable]))
    assert len(found) == 4
    return found


def free_port() -> str:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return str(place.getsockname()[1])


def test_without_a_launcher_and_under_torchrun() -> None:
    torch.testing.assert_close(
        losses(start([*RUN, "--standalone", "--nproc-per-node", "2"])), alone(), rtol=1e-5, atol=0
    )


@pytest.mark.long
def test_under_the_old_launcher() -> None:
    found = losses(start([*LAUNCH, "--nproc-per-node", "2", "--master-port", free_port()]))
    torch.testing.assert_close(found, alone(), rtol=1e-5, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("launcher", [RUN, LAUNCH], ids=["run", "launch"])
def test_two_launchers_as_two_nodes(launcher: list[str]) -> None:
    shared = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
    shared += ["--master-port", free_port()]
    nodes = [start([*launcher, *shared, "--node-rank", str(n)]) for n in range(2)]
    first, second = (losses(node) for node in nodes)
    torch.testing.assert_close(first, alone(), rtol=1e-5, atol=0)
    assert second == []  # one process prints


def adopt() -> tuple[int, int]:
    group = dist.group.WORLD
    bmt.init_distributed(seed=0)
    assert dist.group.WORLD is group
    assert bmt.config["initialized"]
    drawn = torch.randn(())
    bmt.init_distributed(seed=0)
    assert torch.equal(drawn, torch.randn(()))
    with pytest.raises(ConfigError, match="tp=3"):
        bmt.init_distributed(tp_size=3)
    with pytest.raises(ConfigError, match="zero_level=1"):
        bmt.init_distributed(zero_level=1)
    bmt.synchronize()
    return bmt.rank(), bmt.world_size()


def test_a_group_of_the_program_is_adopted() -> None:
    assert run_distributed(adopt, 2) == [(0, 2), (1, 2)]
