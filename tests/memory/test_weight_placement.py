"""Where state lives: every home gives back what was put, and nothing is left behind."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from bmforge.errors import ConfigError
from bmforge.memory.copies import make_copy_engine
from bmforge.memory.offload import OffloadConfig, check_host_memory, choose_parameters
from bmforge.memory.spill import SpillFile
from bmforge.memory.state_storage import BLOCK_ELEMENTS, StateStorage, storage_bytes

SIZES = [1, 255, 256, 1000, 70_001]


def make_home(tmp_path: Path, on_disk: bool, numel: int, kind: Any, **more: Any) -> StateStorage:
    disk = SpillFile(tmp_path, SpillFile.rounded(storage_bytes(numel, kind))) if on_disk else None
    return StateStorage(numel, kind, disk=disk, **more)


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("numel", SIZES)
def test_exact(tmp_path: Path, on_disk: bool, numel: int) -> None:
    home = make_home(tmp_path, on_disk, numel, "fp32")
    assert not home.fetch().any()
    values = torch.randn(numel)
    home.put(0, values)
    assert torch.equal(home.fetch(), values)
    start = numel // 2 // BLOCK_ELEMENTS * BLOCK_ELEMENTS
    home.put(start, -values[start:])
    assert torch.equal(home.fetch(start), -values[start:])
    assert torch.equal(home.fetch(0, start), values[:start])


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("numel", SIZES)
def test_bf16(tmp_path: Path, on_disk: bool, numel: int) -> None:
    home, values = make_home(tmp_path, on_disk, numel, "bf16"), torch.randn(numel)
    home.put(0, values)
    assert torch.equal(home.fetch(), values.bfloat16().float())


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("numel", SIZES)
def test_8bit(tmp_path: Path, on_disk: bool, numel: int, signed: bool) -> None:
    """Close, with the largest of every block exact, and stable."""
    home = make_home(tmp_path, on_disk, numel, "8bit", signed=signed)
    assert not home.fetch().any()
    values = torch.randn(numel) * torch.logspace(-4, 2, numel)
    values = values if signed else values.abs()
    home.put(0, values)
    kept = home.fetch()
    for block, back in zip(values.split(BLOCK_ELEMENTS), kept.split(BLOCK_ELEMENTS), strict=True):
        top = block.abs().max()
        assert back.abs().max() == top
        # Half the gap between levels of the largest decade, nine tenths in 64 or 128 steps.
        assert ((block - back).abs() <= 1.01 * 0.45 / (64 if signed else 128) * top).all()
    home.put(0, kept)
    assert torch.equal(home.fetch(), kept)


def test_8bit_error_is_small_for_moments() -> None:
    """Of normal values the root mean square error is about half a percent of a block's largest."""
    values = torch.randn(1 << 16)
    home = StateStorage(values.numel(), "8bit")
    home.put(0, values)
    error = (home.fetch() - values).square().mean().sqrt()
    assert error < 0.02


def test_8bit_second_moments_stay_above_zero() -> None:
    """A step is divided by their root: what is not zero must not become it."""
    values = torch.tensor([1.0, 1e-12, 0.0, *([0.5] * 253)])
    home = StateStorage(256, "8bit", signed=False)
    home.put(0, values)
    kept = home.fetch()
    assert kept[1] > 0
    assert kept[2] == 0


def test_a_closed_engine_refuses_work() -> None:
    engine = make_copy_engine(torch.device("cpu"))
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.run(lambda: None)


def test_a_spill_file_has_no_name(tmp_path: Path) -> None:
    """A killed run leaves nothing: no directory lists the file."""
    disk = SpillFile(tmp_path, 1 << 20)
    assert not list(tmp_path.iterdir())
    held = os.fstat(disk._file.fileno())
    assert held.st_nlink == 0
    assert held.st_blocks * 512 >= 1 << 20
    disk.close()


def test_a_full_disk_is_told_before(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"free space, but 1024\.0 TiB are needed"):
        SpillFile(tmp_path, 1 << 50)


@pytest.mark.parametrize("what", ["missing", "a file", "read-only"])
def test_a_directory_that_cannot_be_used(tmp_path: Path, what: str) -> None:
    place = tmp_path / "spill"
    if what == "a file":
        place.touch()
    if what == "read-only":
        if os.geteuid() == 0:
            place = Path("/proc")  # nobody may write here, root neither
        else:
            place.mkdir(mode=0o500)
    with pytest.raises(ConfigError, match="cannot be used"):
        SpillFile(place, 4096)


def test_too_little_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    check_host_memory(1 << 20)
    with pytest.raises(ConfigError, match=r"needs 4\.0 PiB|needs 4096\.0 TiB.*4 processes"):
        check_host_memory(1 << 50)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"fraction": 1.5}, "must be between 0"),
        ({"fraction": -0.1}, "must be between 0"),
        ({"fraction": float("nan")}, "must be between 0"),
        ({"target": "disk"}, "no effect"),
        ({"states": "8bit"}, "no effect"),
        ({"fraction": 0.5, "directory": Path("x")}, "no effect"),
        ({"fraction": 0.5, "weights": True}, "needs offload.fraction=1"),
    ],
)
def test_settings_that_do_not_fit(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        OffloadConfig(**fields)


@pytest.mark.parametrize(
    ("fraction", "count"), [(0.0, 0), (0.01, 1), (0.25, 1), (0.3, 2), (1.0, 4)]
)
def test_the_last_parameters_leave(fraction: float, count: int) -> None:
    parameters = [torch.nn.Parameter(torch.empty(5, 2)) for _ in range(4)]
    assert choose_parameters(parameters, fraction) == {id(p) for p in parameters[4 - count :]}


def test_work_is_done_in_order_and_errors_come_back() -> None:
    engine = make_copy_engine(torch.device("cpu"), records=True)
    target, done = torch.zeros(3), []
    engine.copy_(target, torch.ones(3), "first")
    ticket = engine.run(lambda: done.append(target.sum().item()), "second")
    ticket.wait()
    assert done == [3.0]
    kinds = [(e.kind, e.label) for e in engine.events if e.kind in ("started", "done")]
    assert kinds == [
        ("started", "first"),
        ("done", "first"),
        ("started", "second"),
        ("done", "second"),
    ]
    failing = engine.run(lambda: 1 // 0, "third")  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):
        failing.wait()
    engine.run(lambda: done.append(0.0)).wait()  # it goes on
    assert done == [3.0, 0.0]
    engine.close()


def test_room_under_a_limit() -> None:
    """A limit on the process's data is what the device holds."""
    from bmforge.device import memory_room_bytes

    device = torch.device("cpu")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    free = memory_room_bytes(device)
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, before[1]))
        assert memory_room_bytes(device) < min(free, 8 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
