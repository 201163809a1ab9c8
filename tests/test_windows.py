"""Without what only POSIX has, every module is imported, and one process trains and resumes."""

from __future__ import annotations

import ctypes
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bmforge import host_memory
from bmforge.device import memory_room_bytes
from bmforge.files import replace_file

GIB = 1 << 30
TESTS = Path(__file__).resolve().parent
PROGRAM = r'''
import builtins, ctypes, importlib, json, os, pkgutil, signal, sys

POSIX = "fcntl grp posix pty pwd readline resource syslog termios tty crypt curses".split()
real_import, real_open = builtins.__import__, os.open

def refuse(name, globals=None, *rest, **more):
    """What bmforge itself imports; torch and the standard library know where they are."""
    importer = (globals or {}).get("__name__") or ""
    if name.partition(".")[0] in POSIX and importer.partition(".")[0] == "bmforge":
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return real_import(name, globals, *rest, **more)

builtins.__import__ = refuse
import bmforge
for found in pkgutil.walk_packages(bmforge.__path__, "bmforge."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)

sys.path.insert(0, os.path.join(sys.argv[1], "train"))
import trainer_cases as cases

def open_files(path, *rest, **more):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", path)
    return real_open(path, *rest, **more)

os.open = open_files
for module, names in (
    (os, "fork getuid geteuid sysconf sched_getaffinity statvfs uname killpg chown mkfifo"),
    (signal, "SIGKILL SIGHUP SIGUSR1 SIGUSR2 SIGALRM SIGCHLD SIGPIPE alarm setitimer"),
):
    for name in names.split():
        delattr(module, name)
rows, _ = cases.run_interrupted(cases.write_corpus(cases.Path(sys.argv[2], "text")), sys.argv[2], 3)
print(json.dumps([row["loss"] for row in rows]))
'''


def test_every_module_and_a_run_without_posix(tmp_path: Path) -> None:
    settings = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        settings.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(TESTS), str(tmp_path)],
        capture_output=True,
        text=True,
        env=settings,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = json.loads(done.stdout.splitlines()[-1])
    assert len(losses) == 6
    assert losses[-1] < losses[0]


class Kernel:
    """Windows' kernel32, which fills in what it is given as Microsoft's documentation lays it out.

    The machine has 24 GiB, of which 16 are free; the process has 2, and had 3.
    """

    def GlobalMemoryStatusEx(self, place: Any) -> int:  # noqa: N802
        given = memoryview(place).cast("B")
        assert struct.unpack_from("=I", given) == (64,)
        struct.pack_into("=II7Q", given, 0, 64, 33, 24 * GIB, 16 * GIB, 0, 0, 0, 0, 0)
        return 1

    @staticmethod
    def GetCurrentProcess() -> int:  # noqa: N802
        return 7

    def K32GetProcessMemoryInfo(self, process: Any, place: Any, size: Any) -> int:  # noqa: N802
        given = memoryview(place).cast("B")
        assert struct.unpack_from("=I", given) == (72,) == (size.value,)
        struct.pack_into("=II8Q", given, 0, 72, 0, 3 * GIB, 2 * GIB, 0, 0, 0, 0, 0, 0)
        return 1


def test_what_windows_tells_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = SimpleNamespace(kernel32=Kernel())
    monkeypatch.setattr(ctypes, "windll", loader, raising=False)
    monkeypatch.setattr(host_memory, "_PROC", tmp_path)
    monkeypatch.setattr(host_memory, "resource", None)
    monkeypatch.delattr(os, "sysconf")
    assert host_memory.host_memory_bytes() == 24 * GIB
    assert host_memory.available_host_bytes() == 16 * GIB
    assert host_memory.resident_bytes() == 2 * GIB
    assert host_memory.peak_resident_bytes() == 3 * GIB
    assert host_memory.data_room_bytes() is None
    assert memory_room_bytes(torch.device("cpu")) == int(0.97 * 24 * GIB) - 3 * GIB


def test_files_are_replaced_where_directories_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object, flags: int) -> int:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "open", refuse)
    replace_file(tmp_path / "one", "text")
    assert (tmp_path / "one").read_text() == "text"
