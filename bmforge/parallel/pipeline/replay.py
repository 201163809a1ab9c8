"""Simulation of a pipeline schedule: duration, bubbles and peak number of live activations.

The simulation also gives the order of the messages between two ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from bmforge.errors import ConfigError
from bmforge.parallel.pipeline.schedules import Action, Kind, Schedule, StageMessage

__all__ = ["Replay", "order_messages", "replay"]

_UNIT_TIMES: Mapping[Kind, float] = {
    "forward": 1.0,
    "backward": 2.0,
    "backward_input": 1.0,
    "backward_weight": 1.0,
}
# Change of the number of live activations by an action.
_ALIVE: Mapping[Kind, int] = {
    "forward": 1,
    "backward": -1,
    "backward_input": 0,
    "backward_weight": -1,
}


@dataclass(frozen=True)
class Replay:
    """Simulated cost of a schedule.

    Args:
        total: time from the first action to the end of the last.
        bubble_ratios: idle fraction of `total` per rank.
        peak_micro_batches: largest number of (stage, micro-batch) pairs with live activations per
            rank: from the start of forward to the end of backward; if backward is split, to the end
            of its weight-gradient part.
    """

    total: float
    bubble_ratios: tuple[float, ...]
    peak_micro_batches: tuple[int, ...]


def replay(
    schedule: Schedule,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    backward_input: float | None = None,
) -> Replay:
    """Simulate a schedule: every action starts as early as its rank and its inputs allow.

    Args:
        schedule: schedule to simulate.
        forward: time of one stage's forward of one micro-batch.
        backward: time of one stage's backward of one micro-batch.
        backward_input: time of the input-gradient part of backward; None means half of `backward`.

    Raises:
        ConfigError: the schedule deadlocks; the message names the action for which each rank waits.
    """
    first_half = backward / 2 if backward_input is None else backward_input
    durations: dict[Kind, float] = {
        "forward": forward,
        "backward": backward,
        "backward_input": first_half,
        "backward_weight": backward - first_half,
    }
    finished = _finish_times(schedule, durations)
    total = max(finished.values(), default=0.0)
    idle = tuple(
        1.0 - sum(durations[a.kind] for a in order) / total if total else 0.0
        for order in schedule.orders
    )
    return Replay(total, idle, tuple(_peak(order) for order in schedule.orders))


def _peak(order: tuple[Action, ...]) -> int:
    alive = peak = 0
    for action in order:
        alive += _ALIVE[action.kind]
        peak = max(peak, alive)
    return peak


def _input_half(action: Action) -> Action:
    """Replace a full backward with its input-gradient part, on which other actions depend."""
    return action._replace(kind="backward_input") if action.kind == "backward" else action


def _needs(action: Action, last_stage: int) -> list[Action]:
    """Return the actions on which an action depends.

    A full backward is represented by its input-gradient part.
    """
    kind, stage, micro_batch = action
    if kind == "forward":
        return [Action("forward", stage - 1, micro_batch)] if stage else []
    if kind == "backward_weight":
        # Weight gradients use only this rank's tensors, so no other action waits for them.
        return [Action("backward_input", stage, micro_batch)]
    after = [Action("backward_input", stage + 1, micro_batch)] if stage < last_stage else []
    return [Action("forward", stage, micro_batch), *after]


def _finish_times(schedule: Schedule, durations: Mapping[Kind, float]) -> dict[Action, float]:
    """Return the end time of every action, in a valid sequential order."""
    finished: dict[Action, float] = {}
    ready: dict[Action, float] = {}  # a full backward appears as its input part
    clocks = [0.0] * schedule.num_ranks
    todo = [list(reversed(order)) for order in schedule.orders]
    # Every pass runs each rank as far as its inputs allow; if no rank gets further, they wait for
    # each other in a circle.
    while any(todo):
        moved = False
        for rank, order in enumerate(todo):
            while order and all(n in ready for n in _needs(order[-1], schedule.num_stages - 1)):
                action = order.pop()
                needs = [ready[n] for n in _needs(action, schedule.num_stages - 1)]
                clocks[rank] = max([clocks[rank], *needs]) + durations[action.kind]
                finished[action] = clocks[rank]
                ready[_input_half(action)] = clocks[rank]
                moved = True
        if not moved:
            waiting = [f"rank {r} waits at {order[-1]}" for r, order in enumerate(todo) if order]
            raise ConfigError(
                f"the pipeline schedule {schedule.name} deadlocks: {'; '.join(waiting)}."
            )
    return finished


def order_messages(schedule: Schedule) -> dict[tuple[int, int], list[StageMessage]]:
    """Return the order of the messages between each pair of ranks (lower rank first).

    Messages are ordered by the time at which their senders finish if actions take the times of
    `_UNIT_TIMES`. That order agrees with the action order of every rank, so a rank that waits for a
    message waits only for earlier work.
    """
    messages: dict[tuple[int, int], list[StageMessage]] = {}
    times = _finish_times(schedule, _UNIT_TIMES)
    # `sorted` is stable, so actions that end at the same time keep the valid order of `times`.
    for action in sorted(times, key=lambda a: times[a]):
        if action.kind == "backward_weight":
            continue
        kind: Literal["forward", "backward"]
        kind = "forward" if action.kind == "forward" else "backward"
        message = StageMessage(kind, action.stage, action.micro_batch)
        if 0 <= message.receiver < schedule.num_stages:
            ends = schedule.stage_ranks[message.stage], schedule.stage_ranks[message.receiver]
            if ends[0] != ends[1]:
                messages.setdefault((min(ends), max(ends)), []).append(message)
    return messages
