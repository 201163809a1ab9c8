"""A finished run releases its model, states, threads and process groups."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
from test_offload import DISK, USUAL, run_streamed
from torch.distributed.device_mesh import DeviceMesh
from trainer_cases import run, write_corpus

from bmforge.parallel import Layout, OffloadConfig
from bmforge.testing import run_distributed
from bmforge.train import Trainer
from bmforge.train.offload.states import StateOffload

LEAVING = OffloadConfig(1.0, gradients="leave")
SHARES = OffloadConfig(0.5)
STREAMED = OffloadConfig(1.0, weights=True)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "tokens")


def count() -> dict[str, int]:
    """Count what is alive once the garbage is collected."""
    gc.collect()
    found = dict.fromkeys(("threads", "models", "meshes", "trainers"), 0)
    for thread in threading.enumerate():
        if "bmforge" in thread.name:  # told to end when its owner went
            thread.join(timeout=10.0)
            found["threads"] += thread.is_alive()
    for one in gc.get_objects():
        found["models"] += type(one).__name__ == "GPT2"
        found["meshes"] += issubclass(type(one), DeviceMesh)
        found["trainers"] += issubclass(type(one), Trainer | StateOffload)
    return found


def train_and_count(
    prefix: str, run_dir: str, is_streamed: bool, **changes: Any
) -> tuple[dict[str, int], dict[str, int]]:
    """Count before and after two runs, in the job of the first, whose group still lives."""
    before = count()
    for number in range(2):
        folder = str(Path(run_dir) / str(number))
        if is_streamed:
            run_streamed(prefix, folder, **changes)
        else:
            run(prefix, folder, **changes)
    return before, count()


@pytest.mark.parametrize(
    ("world", "is_streamed", "options"),
    [
        (1, False, {}),
        (2, False, {"layout": Layout(zero=3), "offload": SHARES}),
        pytest.param(
            2, False, {"layout": Layout(zero=2), "offload": LEAVING}, marks=pytest.mark.long
        ),
        (2, False, {"layout": Layout(zero=2), "offload_activations": True}),
        (2, False, {"layout": Layout(pp=2), "offload": LEAVING}),
        pytest.param(2, False, {"layout": Layout(tp=2)}, marks=pytest.mark.long),
        pytest.param(2, False, {"layout": Layout(cp=2)}, marks=pytest.mark.long),
        (1, False, {"offload": DISK}),
        (1, True, {"offload": STREAMED}),
    ],
)
def test_a_run_that_is_over_is_freed(prefix, tmp_path, world, is_streamed, options):
    changes = {**USUAL, "steps": 2, "save_every_steps": 1, **options}
    at_first = run_distributed(count, world)  # what earlier tests of this program left
    args = (train_and_count, world, prefix, str(tmp_path), is_streamed)
    for before, after in run_distributed(*args, **changes):
        # torch's caches of DTensor keep the meshes of the last shapes; the pool clears them.
        assert {**after, "meshes": 0} == {**before, "meshes": 0}
    for now, then in zip(run_distributed(count, world), at_first, strict=True):
        assert all(now[kind] <= then[kind] for kind in now), (now, then)
