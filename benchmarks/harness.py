"""Shared parts of the benchmarks: alternating timings, ratios with intervals, headers and tables.

The two sides of a comparison run alternately in one run, so that a change of the machine's speed
affects both. A `Contender` runs in its own process, so that compilers, allocators and peak memory
do not mix; only one contender computes at a time. `time_in_turns` is for functions that can share
a process. `paired_ratio` computes every ratio of speeds and names both sides.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing as mp
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

import __main__
from bmforge.device import default_device, device_name
from bmforge.host_memory import resident_bytes, trim_memory
from bmforge.host_tuning import tune_host

__all__ = [
    "MIB",
    "Contender",
    "Ratio",
    "Step",
    "build_counter",
    "header",
    "make_parser",
    "paired_ratio",
    "rerun_command",
    "run_in_turns",
    "table",
    "table_row",
    "time_in_turns",
]

MIB = 1 << 20


def build_counter(folder: str) -> str:
    """Compile `allocator_peak.c`, which counts the allocations of torch's CPU allocator.

    Returns:
        Path of the shared library, for LD_PRELOAD.
    """
    source, library = Path(__file__).with_name("allocator_peak.c"), f"{folder}/allocator_peak.so"
    flags = ["-O2", "-shared", "-fPIC", "-o", library, str(source), "-ldl", "-lpthread"]
    subprocess.run([os.environ.get("CC", "cc"), *flags], check=True)
    return library


@dataclass(frozen=True)
class Step:
    """One timed step of a contender.

    Attributes:
        seconds: wall time.
        loss: loss that the step returned.
        peak_bytes: peak resident memory during the step above the resident memory after it. Only
            valid if the step measured memory; otherwise the memory that the allocator keeps after
            a free counts as resident.
        cpu_seconds: CPU time of all threads; on a busy machine it varies less than wall time.
    """

    seconds: float
    loss: float
    peak_bytes: int
    cpu_seconds: float


class Contender:
    """A process that runs one step per request.

    Args:
        build: importable function, called in the new process with `arguments`; returns a function
            that runs one step and returns its loss.
        threads: number of torch's threads in the process.
        arguments: arguments of `build`.
        tuned: apply the host settings of a bmforge run (`bmforge.host_tuning`).
    """

    def __init__(
        self,
        build: Callable[..., Callable[[], float]],
        threads: int,
        *arguments: Any,
        tuned: bool = False,
    ):
        context = mp.get_context("spawn")
        self._pipe, child_end = context.Pipe()
        options = (child_end, build, threads, tuned, arguments)
        self._process = context.Process(target=_serve, args=options, daemon=True)
        self._process.start()
        child_end.close()

    def step(self, measure_memory: bool = False) -> Step:
        """Run one step in the process and wait for its result.

        Args:
            measure_memory: return freed memory to the system before the resident memory is read.
                The next step then pays for page faults, so its time must not be used.

        Raises:
            RuntimeError: the process has ended.
        """
        self._pipe.send("step with memory" if measure_memory else "step")
        try:
            return self._pipe.recv()
        except EOFError:
            raise RuntimeError("A contender has ended. Its traceback is above.") from None

    def close(self) -> None:
        """Stop the process."""
        self._pipe.close()
        self._process.join()


def _serve(
    pipe: Connection,
    build: Callable[..., Callable[[], float]],
    threads: int,
    tuned: bool,
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(threads)
    with tune_host(default_device()) if tuned else contextlib.nullcontext():
        run = build(*arguments)
        while True:
            try:
                message = pipe.recv()
            except EOFError:
                return
            measures_memory = message == "step with memory"
            if measures_memory:
                trim_memory()
            _reset_peak()
            start, cpu_start = time.perf_counter(), time.process_time()
            loss = run()
            seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
            peak_bytes = _peak_bytes()
            if measures_memory:
                trim_memory()
            pipe.send(Step(seconds, loss, peak_bytes - resident_bytes(), cpu_seconds))


def _reset_peak() -> None:
    """Reset the peak of this process's resident memory (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    """Return the peak of this process's resident memory in bytes (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM line.")


def run_in_turns(
    contenders: Mapping[str, Contender],
    rounds: int,
    budget_s: float,
    between: Callable[[], None] = lambda: None,
) -> dict[str, list[Step]]:
    """Run one step of every contender per round; each round starts with another contender.

    Args:
        contenders: contenders by name, after their warm-up steps.
        rounds: maximum number of rounds.
        budget_s: time in seconds after which no round starts; the first three always run.
        between: function that is called before every round.
    """
    steps: dict[str, list[Step]] = {name: [] for name in contenders}
    names = list(contenders)
    start = time.perf_counter()
    for number in range(rounds):
        spent = time.perf_counter() - start
        if number >= 3 and spent * (number + 1) / number > budget_s:
            break
        between()
        for name in names[number % len(names) :] + names[: number % len(names)]:
            steps[name].append(contenders[name].step())
    return steps


def time_in_turns(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of every function in every round, after one round of warm-up.

    Args:
        runs: functions by name; each round starts with another one.
        rounds: number of rounds.
        clock: returns seconds; `time.thread_time` counts the CPU time of one thread.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            start = clock()
            runs[name]()
            if number:
                seconds[name].append(clock() - start)
    return seconds


@dataclass(frozen=True)
class Ratio:
    """Speed of one side divided by the speed of another one.

    `f"{ratio}"` shows the sides, the median and the interval, `f"{ratio:.3f}"` the last two.

    Attributes:
        sides: names of both sides, as "A / B"; above 1, A is faster.
        median: median over the rounds.
        low, high: 95 % bootstrap interval of the median.
    """

    sides: str
    median: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        if not spec:
            return str(self)
        median, low, high = (format(x, spec) for x in (self.median, self.low, self.high))
        return f"{median} ({low} to {high})"

    def __str__(self) -> str:
        return f"speed, {self.sides}: {self:.2f}"


def paired_ratio(
    seconds: Mapping[str, Sequence[float]], first: str, second: str, resamples: int = 10_000
) -> Ratio:
    """Return the median over rounds of the speed of `first` divided by the speed of `second`.

    The ratio of each round is taken first, so a drift of the machine's speed over the run cancels.

    Args:
        seconds: times of each side by name; equal positions belong to the same round.
        first, second: names of the two sides.
        resamples: number of bootstrap samples for the 95 % interval.
    """
    ratios = np.array(seconds[second]) / np.array(seconds[first])
    chosen = np.random.default_rng(0).integers(0, len(ratios), (resamples, len(ratios)))
    low, high = np.percentile(np.median(ratios[chosen], axis=1), [2.5, 97.5])
    return Ratio(f"{first} / {second}", float(np.median(ratios)), float(low), float(high))


def rerun_command(*arguments: str) -> list[str]:
    """Return the command that runs the current script in a new process with other arguments."""
    spec = getattr(__main__, "__spec__", None)
    script = [__main__.__file__] if spec is None else ["-m", spec.name]
    return [sys.executable, *script, *arguments]


def make_parser(doc: str) -> argparse.ArgumentParser:
    """Return an argument parser whose help begins with a script's docstring."""
    _, *script = rerun_command()
    return argparse.ArgumentParser(
        prog=shlex.join(["python", *script]),
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def header(threads: int, packages: Sequence[str] = ("torch", "transformers")) -> str:
    """Return a Markdown list of this command, the machine, the versions and the date."""
    _, *script = rerun_command()
    command = shlex.join(["python", *script, *sys.argv[1:]])
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    instructions = torch.backends.cpu.get_cpu_capability()
    load = Path("/proc/loadavg").read_text().split()[0]
    return "\n".join(
        [
            f"- command: `{command}`",
            f"- machine: {device_name(default_device())}, {mp.cpu_count()} cores, {instructions}, "
            f"{platform.system()} {platform.machine()}; {threads} threads; load before: {load}",
            f"- versions: Python {platform.python_version()}, {versions}",
            f"- date: {time.strftime('%Y-%m-%d %H:%M')}",
        ]
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table; without rows, its first two lines."""
    return "\n".join(map(table_row, [columns, ["---"] * len(columns), *rows]))


def table_row(cells: Sequence[object]) -> str:
    """Return one line of a Markdown table."""
    return "| " + " | ".join(str(cell) for cell in cells) + " |"
