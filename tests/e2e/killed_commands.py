"""Runs a command many times, killed before every STRIDE-th change of a file.

    python killed_commands.py FOLDER STRIDE COMMAND...

`{}` in the command becomes the new directory FOLDER/N/m. After a kill the command is repeated.
FOLDER/whole/m is the result of the command when it is not killed. Every command runs in a fork of
this process, which never starts threads. The output is the number of kills.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path
from typing import Any

import bmforge.cli.merge
import bmforge.cli.quantize  # noqa: F401 - imported once, not in every fork
from bmforge.cli import main

# Audit events of the operations that change files.
CHANGES = ("os.rename", "os.mkdir", "os.remove", "shutil.rmtree", "shutil.copyfile")


def changes_file(event: str, arguments: tuple[Any, ...]) -> bool:
    """Return True for the audit event of an operation that changes a file."""
    if event == "open":
        return isinstance(arguments[2], int) and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
    return event in CHANGES


def run(words: list[str], folder: Path, number: int | None = None) -> int:
    """Run a command in a fork, which is killed before the change `number`; return its exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    count = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if changes_file(event, arguments) and str(arguments[0]).startswith(str(folder)):
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    status = 70  # of an exception
    try:
        status = main([word.format(folder / "m") for word in words])
    finally:
        os._exit(status)


def kill_at_changes(root: Path, stride: int, words: list[str]) -> int:
    """Kill a command at its changes and repeat it; return the number of kills."""
    (root / "whole").mkdir()
    assert run(words, root / "whole") == 0
    for number in itertools.count():
        (folder := root / str(number)).mkdir()
        status = run(words, folder, 1 + number * stride)
        if status != -signal.SIGKILL:
            break
        # A complete model is not replaced; temporary files behind it may stay.
        if not (folder / "m").exists():
            assert run(words, folder) == 0, number
            assert [path.name for path in folder.iterdir()] == ["m"], number
    assert status == 0, status
    return number


if __name__ == "__main__":
    print(kill_at_changes(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
