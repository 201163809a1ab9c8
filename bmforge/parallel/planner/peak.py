"""From a trace of three blocks to the peak of a model of any depth, by part.

Between the start of one block and the start of the next, a middle block adds the same bytes every
time. So a deeper model's curve is the short one's with that difference put in once per further
block: in forward where the second block has ended, in backward where it has. In between the curve
is linear in the block's number, hence its highest point is at one of the ends, which were traced.
Blocks of other kinds put in the difference of their own traces; the ends are taken for the first
kind's. Stacks are counted one by one, as a rank of a pipeline may have many blocks of the encoder
and none of the decoder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bmforge.parallel.planner.follow import FIRST_END, INSIDE, LAST_END, PARTS
from bmforge.parallel.planner.trace import BLOCKS, Mark, StepTrace

__all__ = [
    "Counts",
    "Memory",
    "Share",
    "all_blocks",
    "count_parameters",
    "count_work",
    "peak_memory",
]

# Of every stack, how many blocks there are of every kind, those of the first trace first.
Counts = Mapping[str, Sequence[float]]
Curve = NDArray[np.float64]
_INDEX = {name: index for index, name in enumerate(PARTS)}
# AdamW's two states, as large as the parameters.
_STATES = 2


@dataclass(frozen=True)
class Memory:
    """What a process has at its fullest moment, in bytes by part."""

    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Share:
    """Which part of the model a process has, and of what it has only a part.

    Args:
        counts: of every stack, how many blocks of every kind.
        in_flight: micro-batches whose activations are alive at once on this rank.
        first, last: whether what stands before the blocks, or behind them, is here.
        shard_ratio: shards in the trace over shards in the plan.
        offloaded: fraction of the optimizer's states and master weights that is off the device.
        half: parameters are computed with in 2 bytes; of offloaded ones the device keeps those.
        gradients_leave: what is offloaded takes its gradients with it.
    """

    counts: Counts
    in_flight: float = 1
    first: bool = True
    last: bool = True
    shard_ratio: float = 1.0
    offloaded: float = 0.0
    half: bool = True
    gradients_leave: bool = True


def peak_memory(trace: StepTrace, share: Share) -> Memory:
    """Return the fullest moment of a process.

    Args:
        trace: of the model with three blocks.
        share: what the process has.
    """
    here = {INSIDE} | ({FIRST_END} if share.first else set())
    here |= {LAST_END} if share.last else set()
    live = [_live(each, here) for each in _kinds(trace)]
    # The middle block once as the first of its kind and once as the last: it gathers ahead, which
    # the blocks at the ends do not.
    curves = [_whole_curve(live, trace, share, last) for last in (False, True)]
    at = max((curve[int(curve.sum(1).argmax())] for curve in curves), key=lambda row: row.sum())
    parts = dict(zip(PARTS, at.tolist(), strict=True))
    parts["gradients"] += parts.pop("whole gradients")
    return Memory(parts)


def all_blocks(trace: StepTrace, depth: float) -> Counts:
    """Return the blocks of a model with so many in every stack."""
    others = [count for count, _ in trace.others]
    return {stack: (depth - sum(others), *others) for stack in trace.block_static}


def _kinds(trace: StepTrace) -> list[StepTrace]:
    """Return the traces of all kinds of blocks, this one first."""
    return [trace, *(other for _, other in trace.others)]


def _further(trace: StepTrace, counts: Counts) -> Iterator[tuple[StepTrace, dict[str, float]]]:
    """Yield for every kind how many blocks of every stack there are besides those traced."""
    for kind, each in enumerate(_kinds(trace)):
        traced = 0 if kind else BLOCKS
        yield each, {stack: counts[stack][kind] - traced for stack in trace.block_static}


def _live(trace: StepTrace, here: set[int]) -> Curve:
    """Return the bytes alive after every event, by part."""
    live = np.zeros((len(trace.events) + 1, len(PARTS)))
    change, part, end = np.array(trace.events, dtype=np.int64).reshape(-1, 3).T
    live[np.arange(1, len(live)), part] = np.where(np.isin(end, list(here)), change, 0)
    return live.cumsum(0)


def _whole_curve(lives: list[Curve], trace: StepTrace, share: Share, last: bool) -> Curve:
    curve = lives[0] + _of_more_blocks(lives, trace, share, last)
    curve[:, _INDEX["activations"]] += _held_in_flight(curve, trace, share)
    _add_static(curve, trace, share)
    _offload(curve, trace, share)
    return curve


def _of_more_blocks(lives: list[Curve], trace: StepTrace, share: Share, last: bool) -> Curve:
    """Return what further blocks of every kind add, before or after the middle one."""
    added = np.zeros_like(lives[0])
    for live, (each, extra) in zip(lives, _further(trace, share.counts), strict=True):
        for place, step in zip(_steps(trace), _steps(each), strict=True):
            difference = live[step[1].event] - live[step[0].event]
            # A sum of gradients stands where the first one did, which a collective has made: one
            # buffer that counts for another part from then on, not one less for every block.
            handed = min(difference[_INDEX["communication"]], 0.0)
            difference[_INDEX["communication"]] -= handed
            difference[_INDEX["activations"]] += handed
            more = extra[step[0].stack] * difference
            added[(place[0] if last else place[1]).event :] += more
    return added


def _steps(trace: StepTrace) -> Iterator[tuple[Mark, Mark]]:
    """Yield begin and end of every middle block's forward and backward."""
    known = {(m.micro_batch, m.stack, m.kind, m.block): m for m in trace.marks}
    for (number, stack, kind, block), mark in known.items():
        if block == 1:
            yield mark, known[number, stack, kind, 2 if kind == "forward" else 0]


def _held_in_flight(curve: Curve, trace: StepTrace, share: Share) -> float:
    """Return the activations of the micro-batches that wait for their backward, and messages.

    A rank that is not the first keeps what it received with each; one message beside is on its way.
    """
    number = trace.micro_batches - 1
    start, *others = (m.event for m in trace.marks if m.micro_batch == number and not m.stack)
    assert not others
    backward = (m.event for m in trace.marks if m.micro_batch == number and m.kind == "backward")
    column = curve[:, _INDEX["activations"]]
    held = (column[next(backward)] - column[start]) * (share.in_flight - 1)
    if share.first and share.last:
        return held
    return held + trace.carry_bytes * (1 + (0 if share.first else share.in_flight))


def _add_static(live: Curve, trace: StepTrace, share: Share) -> None:
    """Add parameters and the optimizer's states, and shard all three kinds further."""
    held, trained = (_held(trace, share, what) for what in ("static", "trained"))
    live[:, _INDEX["parameters"]] += held
    if trace.has_gradients:
        live[:, _INDEX["gradients"]] += sum(
            extra[stack] * size
            for each, extra in _further(trace, share.counts)
            for stack, size in each.block_trained.items()
        )
    live[:, _INDEX["optimizer"]] += _STATES * trained
    for name in ("parameters", "gradients", "optimizer"):
        live[:, _INDEX[name]] *= share.shard_ratio


def _held(trace: StepTrace, share: Share, what: str) -> float:
    """Return bytes of a rank's parameters: "static" of all, "trained" of those with gradients."""
    found = float(getattr(trace, what))
    for each, extra in _further(trace, share.counts):
        found += sum(extra[k] * size for k, size in getattr(each, f"block_{what}").items())
    first, last = getattr(trace, f"ends_{what}")
    return found - (0 if share.first else first) - (0 if share.last else last)


def _offload(live: Curve, trace: StepTrace, share: Share) -> None:
    """Take off the device what is offloaded; two blocks' gradients are on their way at a time."""
    if not share.offloaded:
        return
    left = 1.0 - share.offloaded
    live[:, _INDEX["optimizer"]] *= left
    if share.half:  # of what is trained, half as much stays: what is computed with
        away = 0.5 * share.offloaded * _held(trace, share, "trained") * share.shard_ratio
        live[:, _INDEX["parameters"]] -= away
    if not share.gradients_leave:
        return
    live[:, _INDEX["gradients"]] *= left
    block = max(max(each.block_trained.values()) for each in _kinds(trace)) * share.shard_ratio
    live[:, _INDEX["communication"]] += 2 * block * share.offloaded


def count_parameters(trace: StepTrace, counts: Counts, ends: int = 2) -> tuple[float, float]:
    """Return the numbers of a rank's parameters before ZeRO shards them, and of the trained ones.

    Args:
        trace: of the model with three blocks.
        counts: the blocks of the rank.
        ends: how many of the model's two ends it has.
    """
    outside = [float(total) for total in (trace.static, trace.trained)]
    for stack in trace.block_static:
        outside[0] -= BLOCKS * trace.block_static[stack]
        outside[1] -= BLOCKS * trace.block_trained[stack]
    numbers = trace.parameters[""] * ends / 2
    trained = numbers * outside[1] / max(1.0, outside[0])
    for kind, each in enumerate(_kinds(trace)):
        for stack, size in each.block_static.items():
            here = counts[stack][kind] * each.parameters[stack]
            numbers += here
            trained += here * each.block_trained[stack] / max(1, size)
    return numbers, trained


def count_work(trace: StepTrace, counts: Counts, last: bool = True) -> tuple[float, float]:
    """Return (matrix FLOPs, bytes of everything else) of one micro-batch on a rank.

    Of several micro-batches in the trace the last is looked at. What is done outside the blocks is
    nearly all the head's, and counted for the rank that is `last`.
    """
    flops, traffic = trace.flops / trace.micro_batches, trace.traffic_bytes / trace.micro_batches
    if not last:
        flops = traffic = 0.0
    for kind, each in enumerate(_kinds(trace)):
        traced = BLOCKS if last and not kind else 0
        for earlier, later in _steps(each):
            if later.micro_batch == trace.micro_batches - 1:
                extra = counts[later.stack][kind] - traced
                flops += extra * (later.flops - earlier.flops)
                traffic += extra * (later.traffic_bytes - earlier.traffic_bytes)
    return flops, traffic
