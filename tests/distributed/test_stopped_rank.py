"""A rank that gets SIGSTOP: every other process ends within the timeout, and names the rank."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import bmforge
from bmforge.parallel import Layout, build_mesh
from bmforge.parallel.expert import build_expert_mesh
from bmforge.parallel.groups import flatten_mesh, group_timeout
from bmforge.testing import run_distributed
from bmforge.train.checkpoint.peers import Peers

PROGRAM = Path(__file__).parent / "stopped_program.py"
TIMEOUT_S = 5.0
MARGIN_S = 10.0
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (2, {"zero": 0}),
    (2, {"tp": 2}),
    (2, {"pp": 2}),
    (2, {"cp": 2, "cp_method": "ring"}),
    (2, {"ep": 2}),
    (3, {"zero": 2}),
    (4, {"dp_replicate": 2}),
    (4, {"tp": 2, "pp": 2}),
    (4, {"cp": 2, "zero": 0}),
    (8, {"pp": 2, "tp": 2}),
    (8, {"pp": 2, "ep": 2, "dp_replicate": 2}),
]
POINTS = ("step", "forward", "backward", "save")


@contextmanager
def started(world: int, *arguments: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the program on all ranks; the store stays in this process, as in torchrun's agent."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(bmforge.__file__).parents[1]),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), *arguments],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for rank in range(world)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def check(world: int, layout: dict[str, Any], point: str, rank: int, folder: Path) -> None:
    """Stop a rank at a point; the others end in time, with an error that names the rank."""
    case = f"{layout} on {world}, rank {rank} stopped in {point}"
    with started(
        world, json.dumps(layout), point, str(rank), str(TIMEOUT_S), str(folder)
    ) as processes:
        output = processes[rank].stdout
        assert output is not None
        if output.readline() != b"stopped\n":
            pytest.fail(f"{case}: not reached: {processes[rank].communicate()}")
        end = time.monotonic() + TIMEOUT_S + MARGIN_S
        for other, process in enumerate(processes):
            if other == rank:
                continue
            try:
                _, errors = process.communicate(timeout=max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired as expired:
                pytest.fail(f"{case}: rank {other} still waits: {expired.stderr}")
            assert process.returncode != 0, case
            assert f"ranks [{rank}] are dead or hang" in errors.decode(), (case, errors.decode())


@pytest.mark.parametrize(
    ("world", "layout", "point", "rank"),
    [(2, {}, "save", 0), (3, {"pp": 3}, "forward", 1)],
    ids=["zero3-save", "pp-forward"],
)
def test_a_stopped_rank_is_named(
    world: int, layout: dict[str, Any], point: str, rank: int, tmp_path: Path
) -> None:
    check(world, layout, point, rank, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(LAYOUTS) * len(POINTS)))
def test_a_stopped_rank_is_named_on_any_layout(number: int, tmp_path: Path) -> None:
    (world, layout), point = list(itertools.product(LAYOUTS, POINTS))[number]
    check(world, layout, point, random.Random(number).randrange(world), tmp_path)


def timeouts(layout: Layout) -> list[timedelta]:
    """Set the timeout of the default group and return those of all groups made after that."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=17))
    mesh = build_mesh(layout)
    meshes = [mesh, build_expert_mesh(mesh, 2), flatten_mesh(mesh["dp_shard", "tp"])]
    groups = [m.get_group(name) for m in meshes for name in m.mesh_dim_names or ()]
    groups.append(Peers()._group)
    return [group_timeout(group) for group in groups]


def test_all_groups_have_the_timeout_of_the_default_group() -> None:
    for found in run_distributed(timeouts, 4, Layout(tp=2)):
        assert set(found) == {timedelta(seconds=17)}
