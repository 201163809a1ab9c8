"""What the host has left, with files as the kernel writes them, and in a real control group."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bmforge import host_memory

GIB = 1 << 30
MEMINFO = "MemTotal:       25165824 kB\nMemAvailable:   16777216 kB\n"  # 24 and 16 GiB
PROGRAM = "from bmforge.host_memory import *; print(available_host_bytes(), host_memory_bytes())"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty /proc and /sys/fs/cgroup."""
    monkeypatch.setattr(host_memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path / "cgroup")
    write(tmp_path / "proc/meminfo", MEMINFO)
    return tmp_path


def write_group(folder: Path, version: int, limit: str, used: int, cache: int) -> None:
    names = host_memory._VERSION_2 if version == 2 else host_memory._VERSION_1
    write(folder / names[0], f"{limit}\n")
    write(folder / names[1], f"{used}\n")
    write(folder / "memory.stat", f"anon 5\ninactive_anon 1\n{names[2]} {cache}\n")


def test_without_groups_it_is_the_machine(system):
    assert host_memory.available_host_bytes() == 16 * GIB
    assert host_memory.host_memory_bytes() == os.sysconf("SC_PAGE_SIZE") * os.sysconf(
        "SC_PHYS_PAGES"
    )
    (system / "proc/meminfo").unlink()
    assert host_memory.available_host_bytes() is None
    assert host_memory.resident_bytes() == 0


def test_the_narrowest_of_nested_groups_counts(system):
    write(system / "proc/self/cgroup", "0::/pod/one\n")
    write_group(system / "cgroup/pod/one", 2, "max", 4 * GIB, 0)
    write_group(system / "cgroup/pod", 2, str(8 * GIB), 6 * GIB, GIB // 2)
    assert host_memory.available_host_bytes() == 8 * GIB - 6 * GIB + GIB // 2
    assert host_memory.host_memory_bytes() == 8 * GIB
    write_group(system / "cgroup/pod/one", 2, str(2 * GIB), 3 * GIB, 0)
    assert host_memory.available_host_bytes() == 0


def test_a_container_sees_its_group_as_the_root(system):
    write(system / "proc/self/cgroup", "9:pids:/docker/x\n4:memory:/docker/x\n0::/\n")
    write_group(system / "cgroup/memory", 1, str(GIB), GIB // 4, GIB // 8)
    assert host_memory.available_host_bytes() == GIB - GIB // 8
    # Version 1 writes "no limit" as a huge number.
    write_group(system / "cgroup/memory", 1, "9223372036854771712", GIB, 0)
    assert host_memory.available_host_bytes() == 16 * GIB


def make_group() -> tuple[Path, str, str] | None:
    """Make a control group; return it and the names of its limit and of its list of processes."""
    for root, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        folder = root / f"bmforge-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        if (folder / limit).exists():
            return folder, limit, "cgroup.procs"
        folder.rmdir()
    return None


def test_in_a_real_group():
    made = make_group()
    if made is None:
        pytest.skip("no control groups to make here")
    folder, limit, processes = made
    try:
        (folder / limit).write_text(str(GIB))
        command = f'echo $$ > "{folder / processes}" && exec "{sys.executable}" -c "{PROGRAM}"'
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
        available, total = map(int, done.stdout.split())
    finally:
        folder.rmdir()
    assert total == GIB
    assert GIB // 2 < available < GIB
