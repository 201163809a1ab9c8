"""Fair comparisons in one run: contenders in turns, medians, ratios with intervals, a header.

Every contender lives in its own process, so that compilers, allocators and peak memory do not mix.
Only one of them computes at a time; the others wait at a pipe.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bmforge.device import default_device, device_name
from bmforge.host_memory import resident_bytes
from bmforge.host_tuning import give_back_memory, tuned_host

__all__ = [
    "Contender",
    "Step",
    "build_counter",
    "header",
    "paired_ratio",
    "ratio_interval",
    "run_in_turns",
    "table",
]

MIB = 1 << 20


def build_counter(folder: str) -> str:
    """Compile what counts what torch's allocator gives out; return what goes into LD_PRELOAD."""
    source, library = Path(__file__).with_name("allocator_peak.c"), f"{folder}/allocator_peak.so"
    flags = ["-O2", "-shared", "-fPIC", "-o", library, str(source), "-ldl", "-lpthread"]
    subprocess.run([os.environ.get("CC", "cc"), *flags], check=True)
    return library


@dataclass(frozen=True)
class Step:
    """One timed step.

    `peak_bytes` is its peak memory above the resident set after it; sound only when memory was
    measured, because what the allocator keeps of freed memory counts as resident otherwise.
    """

    seconds: float
    loss: float
    peak_bytes: int


class Contender:
    """A process that runs one step whenever asked.

    Args:
        build: called in the new process with `arguments`; returns a function that runs one step and
            returns its loss. Must be importable.
        arguments: what `build` gets.
        threads: torch's threads in that process.
        tuned: ask the host for what a run of ours asks for (`bmforge.host_tuning`).
    """

    def __init__(
        self,
        build: Callable[..., Callable[[], float]],
        threads: int,
        *arguments: Any,
        tuned: bool = False,
    ):
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        given = (theirs, build, threads, tuned, arguments)
        self._process = context.Process(target=_serve, args=given, daemon=True)
        self._process.start()
        theirs.close()

    def step(self, measure_memory: bool = False) -> Step:
        """Run one step there and wait for it.

        Args:
            measure_memory: hand freed memory back before the resident set is read. The next step
                then pays for fresh pages, so its time does not count.

        Raises:
            RuntimeError: the process is gone.
        """
        self._pipe.send("step with memory" if measure_memory else "step")
        try:
            return self._pipe.recv()
        except EOFError:
            raise RuntimeError("a contender died; its traceback is above") from None

    def close(self) -> None:
        """End the process."""
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
    with tuned_host(default_device()) if tuned else contextlib.nullcontext():
        run = build(*arguments)
        while True:
            try:
                message = pipe.recv()
            except EOFError:
                return
            measures_memory = message == "step with memory"
            if measures_memory:
                give_back_memory()
            _reset_peak()
            start = time.perf_counter()
            loss = run()
            seconds = time.perf_counter() - start
            peak_bytes = _peak_bytes()
            if measures_memory:
                give_back_memory()
            pipe.send(Step(seconds, loss, peak_bytes - resident_bytes()))


def _reset_peak() -> None:
    """Forget this process's high-water mark of resident memory (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    """Return the high-water mark of this process's resident memory in bytes (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM line")


def run_in_turns(
    contenders: Mapping[str, Contender],
    rounds: int,
    budget_s: float,
    between: Callable[[], None] = lambda: None,
) -> dict[str, list[Step]]:
    """Let every contender run one step a round, each round starting with another one.

    Args:
        contenders: name -> contender; warm already.
        rounds: how many rounds at most.
        budget_s: no new round starts later than this; three are run in any case.
        between: called before every round.
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


def ratio_interval(
    ours: Sequence[float], theirs: Sequence[float], resamples: int = 10_000
) -> tuple[float, float, float]:
    """Return median(theirs) / median(ours) of seconds and its 95 % bootstrap interval over rounds.

    Above 1 ours is faster. Rounds are drawn as pairs, so what slows a whole round cancels.
    """
    pairs = np.array([ours, theirs])
    drawn = np.random.default_rng(0).integers(0, pairs.shape[1], (resamples, pairs.shape[1]))
    medians = np.median(pairs[:, drawn], axis=-1)
    low, high = np.percentile(medians[1] / medians[0], [2.5, 97.5])
    return statistics.median(theirs) / statistics.median(ours), float(low), float(high)


def paired_ratio(
    ours: Sequence[float], theirs: Sequence[float], resamples: int = 10_000
) -> tuple[float, float, float]:
    """Return the median over rounds of theirs / ours in seconds and its 95 % bootstrap interval.

    For many short rounds: a drift of the machine's speed over the run cancels within each pair.
    """
    ratios = np.array(theirs) / np.array(ours)
    drawn = np.random.default_rng(0).integers(0, len(ratios), (resamples, len(ratios)))
    low, high = np.percentile(np.median(ratios[drawn], axis=1), [2.5, 97.5])
    return float(np.median(ratios)), float(low), float(high)


def header(command: str, threads: int, packages: Sequence[str] = ("torch", "transformers")) -> str:
    """Return a markdown list of the command, machine, versions and date."""
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
    """Return a markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
