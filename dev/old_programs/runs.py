"""Runs programs in forked processes, so that torch is imported once for all of them."""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

__all__ = ["run_program"]

_LAST_LINES = 40


def run_program(
    program: Path,
    arguments: Sequence[str],
    processes: int,
    folder: Path,
    timeout_s: float,
    typed: str = "",
) -> str:
    """Run a program as `__main__` on some processes.

    Args:
        program: file to run.
        arguments: command-line arguments.
        processes: number of processes, connected by the variables that torchrun sets.
        folder: working directory, which receives the outputs as `NAME.RANK.log`.
        timeout_s: time limit in seconds.
        typed: text that is typed on the terminal of every process.

    Returns:
        "" if every process ended with code 0, else the last error.
    """
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    logs = [folder / f"{program.stem}.{processes}.{rank}.log" for rank in range(processes)]
    pids = []
    for rank, log in enumerate(logs):
        pid = os.fork()
        if pid == 0:
            _run_child(program, arguments, (rank, processes, port), folder, log, typed)
        pids.append(pid)
    codes = _wait(pids, timeout_s)
    errors = [_last_error(log) for log, code in zip(logs, codes, strict=True) if code]
    if any(code is None for code in codes) and not any(codes):
        return f"no end within {timeout_s:.0f} s"
    return errors[0] if errors else ""


def _run_child(
    program: Path,
    arguments: Sequence[str],
    place: tuple[int, int, int],
    folder: Path,
    log: Path,
    typed: str,
) -> None:
    rank, processes, port = place
    code = 1
    try:
        os.setpgrp()
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(target, stream)
        with tempfile.TemporaryFile() as terminal:
            terminal.write(typed.encode())
            terminal.seek(0)
            os.dup2(terminal.fileno(), 0)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(processes),
            LOCAL_WORLD_SIZE=str(processes),
            MASTER_ADDR="localhost",
            MASTER_PORT=str(port),
        )
        os.chdir(folder)
        sys.argv = [str(program), *arguments]
        sys.path.insert(0, str(program.parent))
        runpy.run_path(str(program), run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = 0 if stop.code in (0, None) else 1
        print(f"SystemExit: {stop.code}", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pids: list[int], timeout_s: float) -> list[int | None]:
    """Return the exit code of each process; None for those ended at the time limit."""
    codes: dict[int, int | None] = {}
    end = time.monotonic() + timeout_s
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if any(codes.values()):  # the others wait for the process that failed
            end = min(end, time.monotonic() + 5)
        if time.monotonic() > end:
            for pid in set(pids) - set(codes):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[pid] = None
        time.sleep(0.05)
    return [codes[pid] for pid in pids]


def _last_error(log: Path) -> str:
    """Return the last line of a log that names an error, with the line of the program."""
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    lines = lines[-_LAST_LINES:]
    errors = [line.strip() for line in lines if "Error" in line.partition(":")[0]]
    return (errors or lines or ["no output"])[-1]
