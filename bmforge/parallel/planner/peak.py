"""Computes the peak memory of a model of any depth from a trace of three blocks.

Between the start of one block and the start of the next, a middle block adds the same bytes every
time. The memory curve of a deeper model is therefore that of the short model plus this difference
for each further block, at the end of the second block in forward and in backward. Over the added
blocks the curve is linear in the block index, so its maximum is at one of its ends, and both were
traced. For blocks of other kinds, the difference from a separate trace is added; the first and last
block are assumed to be of the first kind. Stacks are counted separately, as a pipeline rank may
have many blocks of the encoder and none of the decoder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bmforge.parallel.planner.storage_tracker import FIRST_END, INSIDE, LAST_END, PARTS
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

# Per stack, the number of blocks of every kind; the first kind is that of the main trace.
Counts = Mapping[str, Sequence[float]]
Curve = NDArray[np.float64]
_INDEX = {name: index for index, name in enumerate(PARTS)}
# AdamW's two states, as large as the parameters.
_STATES = 2


@dataclass(frozen=True)
class Memory:
    """Peak memory of a process in bytes, by category."""

    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """Sum over all categories in bytes."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Share:
    """Part of the model on one process, and the sharded and offloaded fractions.

    Args:
        counts: dict from stack name to the number of blocks of every kind.
        in_flight: number of micro-batches whose activations are alive at once on this rank.
        first: whether the modules before the blocks are on this rank.
        last: whether the modules after the blocks are on this rank.
        shard_ratio: number of shards in the trace divided by that in the plan.
        offloaded: fraction of the optimizer's states and master weights that is offloaded.
        half: whether blocks compute in 16 bits; the device then keeps 16-bit copies of
            offloaded parameters.
        gradients_leave: whether gradients of offloaded parameters are offloaded too.
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
    """Return the peak memory of a process.

    Args:
        trace: trace of the model with three blocks.
        share: part of the model on the process.
    """
    ends = {INSIDE} | ({FIRST_END} if share.first else set())
    ends |= {LAST_END} if share.last else set()
    live = [_live(each, ends) for each in _kinds(trace)]
    # The middle block is added before and after itself: it prefetches, which the blocks at the
    # ends do not.
    curves = [_whole_curve(live, trace, share, last) for last in (False, True)]
    at = max((curve[int(curve.sum(1).argmax())] for curve in curves), key=lambda row: row.sum())
    parts = dict(zip(PARTS, at.tolist(), strict=True))
    parts["gradients"] += parts.pop("unsharded gradients")
    # Buffers that blocks pass on count as negative activations, see `_memory_of_untraced_blocks`.
    # If no activations are left, the buffers belong to the collectives that allocated them.
    handed = min(parts["activations"], 0.0)
    parts["activations"] -= handed
    parts["communication"] += handed
    return Memory(parts)


def all_blocks(trace: StepTrace, depth: float) -> Counts:
    """Return the block counts of a whole model with `depth` blocks in every stack."""
    others = [count for count, _ in trace.others]
    return {stack: (depth - sum(others), *others) for stack in trace.block_static}


def _kinds(trace: StepTrace) -> list[StepTrace]:
    """Return the traces of all kinds of blocks; `trace` is the first."""
    return [trace, *(other for _, other in trace.others)]


def _further(trace: StepTrace, counts: Counts) -> Iterator[tuple[StepTrace, dict[str, float]]]:
    """Yield, for every kind of block, its trace and the number of untraced blocks per stack."""
    for kind, each in enumerate(_kinds(trace)):
        traced = 0 if kind else BLOCKS
        yield each, {stack: counts[stack][kind] - traced for stack in trace.block_static}


def _live(trace: StepTrace, ends: set[int]) -> Curve:
    """Return the number of live bytes after every event, by category."""
    live = np.zeros((len(trace.events) + 1, len(PARTS)))
    change, part, end = np.array(trace.events, dtype=np.int64).reshape(-1, 3).T
    live[np.arange(1, len(live)), part] = np.where(np.isin(end, list(ends)), change, 0)
    return live.cumsum(0)


def _whole_curve(lives: list[Curve], trace: StepTrace, share: Share, last: bool) -> Curve:
    curve = lives[0] + _memory_of_untraced_blocks(lives, trace, share, last)
    curve[:, _INDEX["activations"]] += _held_in_flight(curve, trace, share)
    _add_static(curve, trace, share)
    _offload(curve, trace, share)
    return curve


def _memory_of_untraced_blocks(
    lives: list[Curve], trace: StepTrace, share: Share, last: bool
) -> Curve:
    """Return the memory that the untraced blocks add after every event, by category.

    The untraced blocks run before the middle block if `last`, else after it.
    """
    added = np.zeros_like(lives[0])
    for live, (each, extra) in zip(lives, _further(trace, share.counts), strict=True):
        for marks, step in zip(_steps(trace), _steps(each), strict=True):
            difference = live[step[1].event] - live[step[0].event]
            # Gradients accumulate in the buffer of the first gradient, allocated by a collective.
            # This single buffer then changes its category; it is not freed once per block.
            handed = min(difference[_INDEX["communication"]], 0.0)
            difference[_INDEX["communication"]] -= handed
            difference[_INDEX["activations"]] += handed
            more = extra[step[0].stack] * difference
            added[(marks[0] if last else marks[1]).event :] += more
    return added


def _steps(trace: StepTrace) -> Iterator[tuple[Mark, Mark]]:
    """Yield the marks of start and end of the middle block's forward and backward."""
    by_position = {(m.micro_batch, m.stack, m.kind, m.block): m for m in trace.marks}
    for (number, stack, kind, block), mark in by_position.items():
        if block == 1:
            yield mark, by_position[number, stack, kind, 2 if kind == "forward" else 0]


def _held_in_flight(curve: Curve, trace: StepTrace, share: Share) -> float:
    """Return the bytes of the micro-batches that wait for their backward on this rank.

    The bytes are those of activations and, except on the first rank, of received messages; one more
    message is in transit.
    """
    number = trace.micro_batches - 1
    start, *others = (m.event for m in trace.marks if m.micro_batch == number and not m.stack)
    assert not others
    backward = (m.event for m in trace.marks if m.micro_batch == number and m.kind == "backward")
    column = curve[:, _INDEX["activations"]]
    waiting = (column[next(backward)] - column[start]) * (share.in_flight - 1)
    if share.first and share.last:
        return waiting
    return waiting + trace.carry_bytes * (1 + (0 if share.first else share.in_flight))


def _add_static(live: Curve, trace: StepTrace, share: Share) -> None:
    """Add parameters and optimizer states to the memory curve; scale it to the plan's shards."""
    static, trained = (_rank_bytes(trace, share, what) for what in ("static", "trained"))
    live[:, _INDEX["parameters"]] += static
    if trace.has_gradients:
        live[:, _INDEX["gradients"]] += sum(
            extra[stack] * size
            for each, extra in _further(trace, share.counts)
            for stack, size in each.block_trained.items()
        )
    live[:, _INDEX["optimizer"]] += _STATES * trained
    for name in ("parameters", "gradients", "optimizer"):
        live[:, _INDEX[name]] *= share.shard_ratio


def _rank_bytes(trace: StepTrace, share: Share, what: str) -> float:
    """Return the bytes of a rank's parameters: all (`what` = "static") or trained ("trained")."""
    total = float(getattr(trace, what))
    for each, extra in _further(trace, share.counts):
        total += sum(extra[k] * size for k, size in getattr(each, f"block_{what}").items())
    first, last = getattr(trace, f"ends_{what}")
    return total - (0 if share.first else first) - (0 if share.last else last)


def _offload(live: Curve, trace: StepTrace, share: Share) -> None:
    """Subtract the offloaded bytes from the memory curve `live`, in place.

    The gradients of two blocks at a time stay on the device.
    """
    if not share.offloaded:
        return
    left = 1.0 - share.offloaded
    live[:, _INDEX["optimizer"]] *= left
    if share.half:  # the 2-byte compute copies of trained parameters stay on the device
        away = 0.5 * share.offloaded * _rank_bytes(trace, share, "trained") * share.shard_ratio
        live[:, _INDEX["parameters"]] -= away
    if not share.gradients_leave:
        return
    live[:, _INDEX["gradients"]] *= left
    block = max(max(each.block_trained.values()) for each in _kinds(trace)) * share.shard_ratio
    live[:, _INDEX["communication"]] += 2 * block * share.offloaded


def count_parameters(trace: StepTrace, counts: Counts, ends: int = 2) -> tuple[float, float]:
    """Return the total and the trained number of parameters of a rank, before ZeRO sharding.

    Args:
        trace: trace of the model with three blocks.
        counts: number of blocks of the rank.
        ends: number of model ends (the modules before and those after the blocks) on the rank.
    """
    outside = [float(total) for total in (trace.static, trace.trained)]
    for stack in trace.block_static:
        outside[0] -= BLOCKS * trace.block_static[stack]
        outside[1] -= BLOCKS * trace.block_trained[stack]
    numbers = trace.parameters[""] * ends / 2
    trained = numbers * outside[1] / max(1.0, outside[0])
    for kind, each in enumerate(_kinds(trace)):
        for stack, size in each.block_static.items():
            block_count = counts[stack][kind] * each.parameters[stack]
            numbers += block_count
            trained += block_count * each.block_trained[stack] / max(1, size)
    return numbers, trained


def count_work(trace: StepTrace, counts: Counts, last: bool = True) -> tuple[float, float]:
    """Return (matrix FLOPs, memory traffic in bytes) of one micro-batch on a rank.

    The result is the mean over the traced micro-batches. Work outside the blocks, mostly that of
    the head, counts for the last rank only.
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
