"""The planner: finds the layouts with which a model fits on given hardware, and their speed.

Start at `plan`. For every sensible layout, with and without recompute and offload, an estimate
(`estimate.py`) combines the peak memory of a process (`trace.py`, `peak.py`) and the time of a step
(`step_time.py`) on the devices of `hardware.py`. Nothing is trained and no device is needed.

Tracing takes most of the time, half a second per setting. So each layout is traced only near its
expected optimum: with the micro-batch size that should fit according to earlier traces.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bmforge.errors import BmforgeError, ConfigError
from bmforge.parallel.layout import Layout
from bmforge.parallel.planner.estimate import Estimator, PlanRequest, PlanRow, TrainingSetup
from bmforge.parallel.planner.peak import Memory
from bmforge.parallel.planner.step_time import Times
from bmforge.parallel.planner.trace_cache import TraceStore

__all__ = [
    "TrainingSetup",
    "Plan",
    "PlanRequest",
    "PlanRow",
    "explain_refusal",
    "plan",
    "sensible_layouts",
]

_LONG_ROW = 16384
_FRACTIONS = tuple(n / 20 for n in range(1, 21))
# Seconds of work that justify a new process, which has to import torch.
_WORTH_A_PROCESS_S = 10.0


@dataclass(frozen=True)
class Plan:
    """Estimates, best first: those that fit by speed, then the rest by missing memory.

    Args:
        request: model, machines and constraints.
        rows: estimates.
        refused: impossible layouts and the reasons.
        least: estimate of the best layout with micro-batches of one sequence and recompute, which
            needs the least memory without offloading; None if no layout is possible.
    """

    request: PlanRequest
    rows: tuple[PlanRow, ...]
    refused: tuple[tuple[Layout, str], ...] = ()
    least: PlanRow | None = None

    @property
    def winner(self) -> PlanRow:
        """Fastest configuration that fits.

        Raises:
            ConfigError: no configuration fits; the message names the memory that the closest
                configuration lacks.
        """
        if not self.rows:
            raise ConfigError(explain_refusal(self.request, self.refused))
        first = self.rows[0]
        if not first.fits:
            missing = max(first.short_bytes, first.host_short_bytes) / 2**30
            where = "on the host" if first.short_bytes <= 0 else "per device"
            raise ConfigError(
                f"no layout fits into memory: the closest, {first.choice.layout}, lacks "
                f"{missing:.2f} GiB {where}. Use more or larger GPUs, a smaller --seq, or "
                "another model."
            )
        return first


def plan(
    request: PlanRequest,
    *,
    note: Callable[[str], None] = lambda _: None,
    layouts: tuple[Layout, ...] = (),
    processes: int = 1,
    keep: Path | None = None,
) -> Plan:
    """Estimate memory and speed of all sensible configurations and rank them.

    Args:
        request: model, machines and constraints.
        note: callback for progress messages, called for every layout.
        layouts: layouts to estimate; if empty, all sensible layouts.
        processes: number of processes; above 1, they are spawned, so the calling program must be
            importable (`if __name__ == "__main__"`), and the workload picklable.
        keep: directory of the trace cache; if None, traces are not cached on disk.
    """
    every = layouts or tuple(sensible_layouts(request))
    groups = _group_by_trace(every)
    look = _LayoutEstimator(request, keep)
    by_layout: dict[Layout, _LayoutEstimates] = {}

    def take(looks: list[_LayoutEstimates]) -> None:
        by_layout.update({look.layout: look for look in looks})
        for seen in looks:
            note(str(seen.layout))

    # The time of the first group predicts that of the others.
    start = time.perf_counter()
    for group in groups[:1]:
        take(look(group))
    left = (time.perf_counter() - start) * (len(groups) - 1)
    with _workers(min(processes, int(left / _WORTH_A_PROCESS_S))) as spread:
        for looked in spread(look, groups[1:]):
            take(looked)
    looks = [by_layout[layout] for layout in every]
    rows = sorted((row for look in looks for row in look.rows), key=_rank)
    refused = tuple((look.layout, look.refused) for look in looks if look.refused)
    return Plan(request, tuple(rows), refused, _find_least(rows, look.estimator))


def _find_least(rows: Sequence[PlanRow], estimator: Estimator) -> PlanRow | None:
    """Estimate the best layout for micro-batches of one sequence with recompute."""
    if not rows or not rows[0].traced:
        return None
    choice = TrainingSetup(rows[0].choice.layout, 1, recompute=True)
    same = (row for row in rows if row.choice == choice)
    return next(same, None) or estimator.estimate(choice)


@dataclass(frozen=True)
class _LayoutEstimates:
    """Estimates of one layout, or the reason why the layout is impossible."""

    layout: Layout
    rows: tuple[PlanRow, ...] = ()
    refused: str = ""


def _group_by_trace(layouts: Sequence[Layout]) -> list[list[Layout]]:
    """Group layouts that can share traces, such as pipelines of any length."""
    groups: dict[Layout, list[Layout]] = {}
    for layout in layouts:
        alike = replace(layout, pp=min(layout.pp, 2), pp_cut=())
        groups.setdefault(alike, []).append(layout)
    return list(groups.values())


@contextmanager
def _workers(processes: int) -> Iterator[Callable[..., Iterator[list[_LayoutEstimates]]]]:
    """Context manager: yield a map function that runs in this process or in a process pool."""
    if processes < 2:
        yield map
        return
    # Spawned, not forked: threads and device contexts do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        yield pool.map


class _LayoutEstimator:
    """Estimates layouts and reuses their traces; a new process starts without traces."""

    def __init__(self, request: PlanRequest, keep: Path | None) -> None:
        self.request, self.keep = request, keep
        store = None if keep is None else TraceStore(keep)
        self.estimator = Estimator(request, store=store)
        # Activation bytes of one sequence, by recompute and the axes that shard a sequence.
        self.per_row: dict[tuple[bool, int, int], float] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _LayoutEstimator, (self.request, self.keep)

    def __call__(self, layouts: Sequence[Layout]) -> list[_LayoutEstimates]:
        """Estimate each layout of a group."""
        looks = []
        for layout in layouts:
            try:
                layout.check(self.request.cluster.count)
                looks.append(_LayoutEstimates(layout, tuple(self._find_rows(layout))))
            except BmforgeError as error:
                looks.append(_LayoutEstimates(layout, refused=str(error)))
        return looks

    def _find_rows(self, layout: Layout) -> Iterator[PlanRow]:
        """Yield the best estimate of a layout, and one with recompute if that could be faster."""
        process_rows = self._rows_of_a_process(layout)
        plain = self._best(layout, False, process_rows)
        yield plain
        # With all rows in one micro-batch, or the shortest bubble, recompute gains nothing.
        at_best = plain.choice.rows == _largest(layout, process_rows)
        if not (at_best and plain.fits and not plain.choice.offloaded):
            yield self._best(layout, True, process_rows)

    def _rows_of_a_process(self, layout: Layout) -> int:
        batch = self.request.batch
        _, replicas = self.estimator.shards(layout)
        if batch % replicas:
            near = batch // replicas * replicas
            nearest = " or ".join(str(n) for n in (near, near + replicas) if n)
            raise ConfigError(
                f"a batch of {batch} sequences cannot be divided evenly among {replicas} "
                f"data-parallel processes. Use a batch of {nearest} sequences."
            )
        return batch // replicas

    def _best(self, layout: Layout, recompute: bool, process_rows: int) -> PlanRow:
        """Return the fastest estimate that fits; if none fits, the one that lacks the least memory.

        The largest micro-batch that fits is searched twice: with the optimizer on the device, and
        with the optimizer offloaded.
        """
        tried: dict[int, PlanRow] = {}
        axes = recompute, layout.tp, layout.cp
        for offloaded in (0.0, 1.0) if self.request.offload else (0.0,):
            rows = self._expect(
                TrainingSetup(layout, _largest(layout, process_rows), recompute, offloaded)
            )
            while True:
                if rows not in tried:
                    tried[rows] = _fitting(self.estimator, TrainingSetup(layout, rows, recompute))
                row = tried[rows]
                if row.traced and layout.pp == 1:
                    self.per_row[axes] = row.memory.parts["activations"] / rows
                if rows == 1 or (row.fits and row.choice.offloaded <= offloaded):
                    break
                rows //= 2
            if not row.traced or (rows == _largest(layout, process_rows) and row.fits):
                break
        return min(tried.values(), key=_rank)

    def _expect(self, choice: TrainingSetup) -> int:
        """Return the micro-batch size expected to fit, at most `choice.rows`; 1 if unknown."""
        room = self.request.cluster.device.memory_bytes
        bytes_per_row = self.per_row.get((choice.recompute, choice.layout.tp, choice.layout.cp))
        if bytes_per_row is None:
            return 1
        left, rows = room - self.estimator.least_static(choice), choice.rows
        while rows > 1 and rows * bytes_per_row > left:
            rows //= 2
        return rows


def _largest(layout: Layout, process_rows: int) -> int:
    """Return the fastest micro-batch size, a power of two, regardless of memory.

    `process_rows` is the number of sequences per step and data-parallel process.

    In a pipeline this size is 1, because the bubble is proportional to the micro-batch size.
    """
    return 1 if layout.pp > 1 else process_rows & -process_rows


def explain_refusal(request: PlanRequest, refused: Sequence[tuple[Layout, str]]) -> str:
    """Explain why no layout is possible, and suggest the nearest possible request."""
    count, batch = request.cluster.count, request.batch
    reasons = list(dict.fromkeys(reason for _, reason in refused))
    text = f"no layout of {request.workload.name} on {count} devices is possible: "
    text += " ".join(reasons[:3])
    # Without other axes every device processes different sequences.
    fits_alone = next((r for layout, r in refused if layout.row_groups(count) == count), "")
    if batch % count and "cannot be divided evenly" in fits_alone:
        below = batch // count * count
        batches = [n for n in (below, below + count) if n]
        counts = [n for n in range(1, 2 * count) if batch % n == 0 and request.cluster.holds(n)]
        near = min(counts, key=lambda n: abs(n - count))
        text += (
            " Nearest batch that works: --batch "
            f"{min(batches, key=lambda n: abs(n - batch))}, or --gpus {near} for this batch."
        )
    return text


def _rank(row: PlanRow) -> tuple[bool, float]:
    missing = max(row.short_bytes, row.host_short_bytes)
    return not row.fits, row.times.total if row.fits else missing


def sensible_layouts(request: PlanRequest) -> Iterator[Layout]:
    """Yield the layouts to estimate: tensor parallelism within nodes, pipelines across nodes."""
    count, workload = request.cluster.count, request.workload
    inside = min(request.cluster.per_node, count)
    contexts = (1, 2, 4, 8) if workload.row_tokens >= _LONG_ROW else (1,)
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4, 8, 16, 32, 64):
            for cp in contexts:
                shards, left = divmod(count, tp * pp * cp)
                fits = tp <= inside and pp <= workload.depth and not left and shards
                if not fits or (pp > 1 and cp > 1):
                    continue
                sharded: tuple[int, ...] = (0,) if shards * cp == 1 else (0, 2, 3)
                if pp > 1:
                    sharded = sharded[:2]
                for zero in sharded:
                    yield Layout(
                        zero=zero,  # type: ignore[arg-type]
                        tp=tp,
                        pp=pp,
                        cp=cp,
                        sequence_parallel=tp > 1,
                    )


def _fitting(estimator: Estimator, choice: TrainingSetup) -> PlanRow:
    """Return the estimate with the smallest offloaded fraction that fits; if none, the largest."""
    room = estimator.request.cluster.device.memory_bytes
    most = replace(choice, offloaded=1.0 if estimator.request.offload else 0.0)
    least = estimator.least_static(most)
    if least > room:
        parts = {"parameters": least}
        return PlanRow(most, Memory(parts), least - room, Times({}), 0.0, 0, traced=False)
    row = estimator.estimate(choice)
    if row.fits or not estimator.request.offload:
        return row
    row = estimator.estimate(most)
    if not row.fits:
        return row
    # Device memory decreases with the offloaded fraction, so bisection applies.
    few, many = 0, len(_FRACTIONS) - 1
    while few < many:
        middle = (few + many) // 2
        tried = estimator.estimate(replace(choice, offloaded=_FRACTIONS[middle]))
        few, many = (few, middle) if tried.fits else (middle + 1, many)
    return estimator.estimate(replace(choice, offloaded=_FRACTIONS[few]))
