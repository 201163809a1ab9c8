"""The planner: which layouts of a model fit on machines that are not here, and how fast they are.

Start at `plan`. For every sensible layout, with and without recompute and offload, an estimate
(`plan_estimate.py`) puts together the peak memory of a process (`plan_trace.py`, `plan_memory.py`)
and the time of a step (`plan_time.py`) on the devices of `hardware.py`. Nothing is trained and no
device is needed.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from bmforge.errors import BmforgeError, ConfigError
from bmforge.parallel.layout import Layout
from bmforge.parallel.planner.estimate import Choice, Estimator, Request, Row
from bmforge.parallel.planner.peak import Memory
from bmforge.parallel.planner.step_time import Times

__all__ = ["Choice", "Plan", "Request", "Row", "plan", "sensible_layouts"]

_LONG_ROW = 16384
_FRACTIONS = tuple(n / 20 for n in range(1, 21))
# So many groups of layouts take longer to look at than a process takes to start.
_WORTH_A_PROCESS = 4


@dataclass(frozen=True)
class Plan:
    """All rows, best first: what fits by its speed, then what does not by what is missing."""

    request: Request
    rows: tuple[Row, ...]
    refused: tuple[tuple[Layout, str], ...] = ()

    @property
    def winner(self) -> Row:
        """The fastest that fits.

        Raises:
            ConfigError: nothing fits; says by how much the nearest does not.
        """
        if not self.rows:
            said = "; ".join(reason for _, reason in self.refused[:3])
            raise ConfigError(f"no layout is possible for this batch and model. {said}".strip())
        first = self.rows[0]
        if not first.fits:
            missing = max(first.short_bytes, first.host_short_bytes) / 2**30
            where = "on the host" if first.short_bytes <= 0 else "per device"
            raise ConfigError(
                f"nothing fits: {first.choice.layout} lacks least, {missing:.2f} GiB {where}. Use "
                "more or larger GPUs, a smaller --seq, or another model."
            )
        return first


def plan(
    request: Request,
    *,
    note: Callable[[str], None] = lambda _: None,
    layouts: tuple[Layout, ...] = (),
    processes: int = 1,
) -> Plan:
    """Estimate every sensible choice.

    Args:
        request: what is asked.
        note: told what has been looked at.
        layouts: look at these only; empty looks at all sensible ones.
        processes: work on the layouts; more than one are new ones, so a program that asks for them
            must be importable (`if __name__ == "__main__"`), and the workload picklable.
    """
    every = layouts or tuple(sensible_layouts(request))
    groups = _that_share(every)
    work = partial(_look_at, request)
    processes = min(processes, len(groups) // _WORTH_A_PROCESS)
    found: dict[Layout, _Look] = {}
    with _workers(processes) as spread:
        for looks in spread(work, groups):
            found |= {look.layout: look for look in looks}
            note(str(looks[-1].layout))
    looks = [found[layout] for layout in every]
    rows = sorted((row for look in looks for row in look.rows), key=_rank)
    refused = tuple((look.layout, look.refused) for look in looks if look.refused)
    return Plan(request, tuple(rows), refused)


@dataclass(frozen=True)
class _Look:
    """What came of one layout: rows, or why it is not possible."""

    layout: Layout
    rows: tuple[Row, ...] = ()
    refused: str = ""


def _that_share(layouts: Sequence[Layout]) -> list[list[Layout]]:
    """Return layouts in groups whose traces are the same in part: pipelines of any length are."""
    groups: dict[Layout, list[Layout]] = {}
    for layout in layouts:
        alike = replace(layout, pp=min(layout.pp, 2), pp_cut=())
        groups.setdefault(alike, []).append(layout)
    return list(groups.values())


@contextmanager
def _workers(processes: int) -> Iterator[Callable[..., Iterator[list[_Look]]]]:
    """Yield what maps a function: in this process, or in new ones side by side."""
    if processes < 2:
        yield map
        return
    # New ones, not copies of this one: threads and devices do not survive copying.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        yield pool.map


def _look_at(request: Request, layouts: Sequence[Layout]) -> list[_Look]:
    estimator = Estimator(request)
    looks = []
    for layout in layouts:
        try:
            layout.check(request.cluster.count)
            found = [_best(estimator, layout, recompute) for recompute in (False, True)]
            looks.append(_Look(layout, tuple(row for row in found if row is not None)))
        except BmforgeError as error:
            looks.append(_Look(layout, refused=str(error)))
    return looks


def _rank(row: Row) -> tuple[bool, float]:
    missing = max(row.short_bytes, row.host_short_bytes)
    return not row.fits, row.times.total if row.fits else missing


def sensible_layouts(request: Request) -> Iterator[Layout]:
    """Yield layouts worth looking at: tensor parallel inside a node, pipelines over nodes."""
    count, workload = request.cluster.count, request.workload
    inside = min(request.cluster.per_node, count)
    contexts = (1, 2, 4, 8) if workload.row_tokens >= _LONG_ROW else (1,)
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4, 8, 16, 32, 64):
            for cp in contexts:
                rest, left = divmod(count, tp * pp * cp)
                fits = tp <= inside and pp <= workload.depth and not left and rest
                if not fits or (pp > 1 and cp > 1):
                    continue
                sharded: tuple[int, ...] = (0,) if rest * cp == 1 else (0, 2, 3)
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


def _best(estimator: Estimator, layout: Layout, recompute: bool) -> Row | None:
    """Return the fastest micro-batch that fits, or what is missing with a single row."""
    request = estimator.request
    _, replicas = estimator.shards(layout)
    if request.batch % replicas:
        return None
    share = request.batch // replicas
    first = _fitting(estimator, Choice(layout, 1, recompute))
    if not first.fits or share % 2:
        return first
    second = _fitting(estimator, Choice(layout, 2, recompute))
    found = [first, second]
    rows = _most_rows(first, second, share, request.cluster.device.memory_bytes)
    while rows > 2:
        found.append(_fitting(estimator, Choice(layout, rows, recompute)))
        if found[-1].fits:
            break
        rows //= 2
    return min(found, key=_rank)


def _most_rows(first: Row, second: Row, share: int, room: float) -> int:
    """Return the largest micro-batch that may fit: activations grow with the rows."""
    one, two = (row.memory.parts["activations"] for row in (first, second))
    others = first.memory.total - one
    if second.choice.offloaded < 1.0:
        others *= 0.5  # more can be offloaded yet
    rows = 1
    while share % (2 * rows) == 0 and others + one + (2 * rows - 1) * (two - one) <= room:
        rows *= 2
    return rows if second.fits else 1


def _fitting(estimator: Estimator, choice: Choice) -> Row:
    """Return the choice with as little offloaded as makes it fit."""
    room = estimator.request.cluster.device.memory_bytes
    most = replace(choice, offloaded=1.0 if estimator.request.offload else 0.0)
    least = estimator.least_static(most)
    if least > room:
        parts = {"parameters": least}
        return Row(most, Memory(parts), least - room, Times({}), 0.0, 0, traced=False)
    row = estimator.estimate(choice)
    if row.fits or not estimator.request.offload:
        return row
    row = estimator.estimate(most)
    for fraction in _FRACTIONS if row.fits else ():
        tried = estimator.estimate(replace(choice, offloaded=fraction))
        if tried.fits:
            return tried
    return row
