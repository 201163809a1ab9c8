"""Pipeline schedules as data: the order of forward and backward actions of every rank.

A schedule consists of a list of actions per rank, and the rank of every stage. This module is
independent of models and process groups: `run.py` executes the lists, `replay.py` simulates them.

Source: GPipe, Huang et al. 2018; 1F1B and interleaved 1F1B, Narayanan et al. 2021 (2104.04473);
zero bubble (ZB-H1, interleaved) and ZBV, Qi et al. 2023 (2401.10241); DualPipeV, DeepSeek-V3 2024
(2412.19437) and its released code, with the overlapped pairs written one after the other. If the
number of micro-batches is not divisible by the number of ranks, they run in equal rounds, as in
torch's pipelining.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from bmforge.errors import ConfigError, suggest

__all__ = [
    "SCHEDULES",
    "Action",
    "Kind",
    "StageMessage",
    "Schedule",
    "write_schedule",
    "forward_only",
    "schedule_problems",
    "smallest_schedule",
]

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]
F: Kind = "forward"
B: Kind = "backward"
I: Kind = "backward_input"  # noqa: E741
W: Kind = "backward_weight"


class Action(NamedTuple):
    """One action of a rank on a stage and a micro-batch.

    The kind "backward" computes the gradients of the stage's input and weights together;
    "backward_input" computes only the input gradient, and "backward_weight" the weight gradients.
    """

    kind: Kind
    stage: int
    micro_batch: int


class StageMessage(NamedTuple):
    """Tensors that stage `stage` sends: outputs to the next stage or gradients to the previous."""

    kind: Literal["forward", "backward"]
    stage: int
    micro_batch: int

    @property
    def receiver(self) -> int:
        """Stage that receives the message."""
        return self.stage + (1 if self.kind == "forward" else -1)


@dataclass(frozen=True)
class Schedule:
    """Schedule of one optimizer step of a pipeline.

    Args:
        name: name of the schedule.
        num_micro_batches: micro-batches per step.
        stage_ranks: rank of every stage.
        orders: actions of every rank, in execution order.
    """

    name: str
    num_micro_batches: int
    stage_ranks: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.orders)

    @property
    def num_stages(self) -> int:
        """Number of stages on all ranks."""
        return len(self.stage_ranks)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, in the model's order."""
        return tuple(s for s, owner in enumerate(self.stage_ranks) if owner == rank)


class _Writer:
    """Builds the action list of one rank; counts micro-batches per action kind and stage."""

    def __init__(self, rank: int, num_ranks: int, per_rank: int, num_micro_batches: int) -> None:
        self.rank, self.num_ranks, self.per_rank = rank, num_ranks, per_rank
        self.num_micro_batches = num_micro_batches
        self.to_end = num_ranks - 1 - rank
        self.actions: list[Action] = []
        # Actions so far per kind and stage; a full backward counts as one I and one W.
        self.count: Counter[tuple[Kind, int]] = Counter()
        self._waiting: list[int] = []  # stages whose weight gradients are due, oldest first

    def add(self, stage: int, *kinds: Kind) -> None:
        """Append actions for one stage; each gets the next micro-batch index of its kind."""
        for kind in kinds:
            self.actions.append(Action(kind, stage, self.count[I if kind == B else kind, stage]))
            self.count.update((part, stage) for part in ((I, W) if kind == B else (kind,)))
            if kind == I:
                self._waiting.append(stage)
            elif kind == W:
                self._waiting.remove(stage)

    def add_next_weight(self) -> None:
        """Append the weight-gradient action that has waited longest, if one is waiting."""
        if self._waiting:
            self.add(self._waiting[0], W)


def _gpipe(w: _Writer) -> None:
    # All forwards first: simple, but the activations of all micro-batches are alive at once.
    for kind in (F, B):
        for _ in range(w.num_micro_batches):
            w.add(w.rank, kind)


def _1f1b(w: _Writer) -> None:
    # The rank is `to_end` ranks away from the loss, so it runs that many more forwards before its
    # first backward. At most `to_end` + 1 micro-batches are alive, however many there are.
    warm_up = min(w.to_end, w.num_micro_batches)
    for step in range(w.num_micro_batches + warm_up):
        if step < w.num_micro_batches:
            w.add(w.rank, F)
        if step >= warm_up:
            w.add(w.rank, B)


def _interleaved(w: _Writer, split: bool = False) -> None:
    """Build the interleaved 1F1B schedule: rounds of micro-batches run depth first."""
    total = w.per_rank * w.num_micro_batches
    per_round = w.num_micro_batches // _rounds(w.num_ranks, w.num_micro_batches)
    hop = 1 if split else 2  # early input gradients need fewer micro-batches in flight
    # One round for each further stage of the rank, and `hop` forwards for each later rank.
    warm_up = min((w.per_rank - 1) * per_round + hop * w.to_end, total)

    def stage(step: int) -> int:
        return step // per_round % w.per_rank * w.num_ranks + w.rank

    # Backward visits the stages in reverse order.
    last = (w.per_rank - 1) * w.num_ranks + 2 * w.rank
    for step in range(total + warm_up):
        if step < total:
            w.add(stage(step), F)
        if step >= warm_up:
            w.add(last - stage(step - warm_up), I if split else B)
            # Each rank delays as many weight gradients as fill its bubble at the end.
            if split and step - warm_up >= w.rank:
                w.add_next_weight()
    for _ in range(total if split else 0):
        w.add_next_weight()


def _interleaved_zero_bubble(w: _Writer) -> None:
    _interleaved(w, split=True)


def _zbv(w: _Writer) -> None:
    """Build the ZBV (zero-bubble, V-shaped) schedule (Qi et al., section 6).

    It is built for at least 2p - 1 micro-batches on p ranks and truncated to the requested number.
    """
    down, up = w.rank, 2 * w.num_ranks - 1 - w.rank
    total = max(2 * w.num_ranks - 1, w.num_micro_batches)
    # Until micro-batch 0 has run down to the last rank and back up to this one.
    for _ in range(2 * w.to_end + 1):
        w.add(down, F)
    # Until its gradient has come back from the last stage, on rank 0: `rank` hops each way.
    for _ in range(w.rank):
        w.add(up, F)
        w.add(down, F)
    for _ in range(w.to_end + 1):
        w.add(up, F, I, W)
    # Steady state: both directions alternate, and no weight gradient is delayed.
    while w.count[F, up] < total:
        if w.count[F, down] < total:
            w.add(down, F)
        w.add(down, I, W)
        w.add(up, F, I, W)
    # No forward is left. The other ranks wait for input gradients only, so weight gradients are
    # delayed and fill the bubble at the end.
    for _ in range(w.rank):
        w.add(down, I)
        w.add(up, I)
    for _ in range(w.to_end + 1):
        w.add(down, I, W)
    for stage in (up, down):
        while w.count[W, stage] < total:
            w.add(stage, W)
    w.actions = [a for a in w.actions if a.micro_batch < w.num_micro_batches]


def _dualpipev(w: _Writer) -> None:
    """Build the eight phases of DeepSeek's DualPipeV schedule."""
    down, up = w.rank, 2 * w.num_ranks - 1 - w.rank
    # The loops are steps 1 to 8 of the released code: F0; F0-F1; I1-W1-F1; F0-B1-F1-B0 (main);
    # B1-F1-B0; B1-B0; W-I0; W. Here 0 is the stage on the way down, and 1 the one on the way up.
    for _ in range(2 * w.to_end):
        w.add(down, F)
    for _ in range(w.rank + 1):
        w.add(down, F)
        w.add(up, F)
    for _ in range(w.to_end):
        w.add(up, I, W, F)
    for _ in range(w.num_micro_batches - 2 * w.num_ranks + w.rank + 1):
        w.add(down, F)
        w.add(up, B)
        w.add(up, F)
        w.add(down, B)
    for _ in range(w.to_end):
        w.add(up, B)
        w.add(up, F)
        w.add(down, B)
    # From the middle of this phase on, weight gradients are delayed to fill later bubbles.
    for index in range(2 * (w.rank + 1)):
        w.add((up, down)[index % 2], I if index > w.rank else B)
    for _ in range(w.to_end):
        w.add_next_weight()
        w.add(down, I)
    for _ in range(w.rank + 1):
        w.add_next_weight()


@dataclass(frozen=True)
class _Recipe:
    """Function that builds a schedule, and the numbers of stages and ranks that it requires."""

    write: Callable[[_Writer], None]
    placement: Literal["loop", "v"] = "loop"
    fewest_per_rank: int = 1
    most_per_rank: int | None = 1
    in_rounds: bool = False
    fewest_per_stage: int = 0  # minimum micro-batches per stage


_RECIPES: Mapping[str, _Recipe] = {
    "gpipe": _Recipe(_gpipe),
    "1f1b": _Recipe(_1f1b),
    "interleaved-1f1b": _Recipe(
        _interleaved, fewest_per_rank=2, most_per_rank=None, in_rounds=True
    ),
    "interleaved-zero-bubble": _Recipe(
        _interleaved_zero_bubble, most_per_rank=None, in_rounds=True
    ),
    "zbv": _Recipe(_zbv, "v", fewest_per_rank=2, most_per_rank=2),
    "dualpipev": _Recipe(_dualpipev, "v", fewest_per_rank=2, most_per_rank=2, fewest_per_stage=1),
}
SCHEDULES: tuple[str, ...] = tuple(_RECIPES)


def _rounds(num_ranks: int, num_micro_batches: int) -> int:
    return max(1, num_micro_batches // num_ranks)


def schedule_problems(
    name: str, num_ranks: int, num_micro_batches: int, stages_per_rank: int | None = None
) -> list[str]:
    """Return the reasons why this schedule cannot be built; see `write_schedule`."""
    if name not in _RECIPES:
        return [
            (
                f"schedule={name!r} is unknown (supported: {', '.join(SCHEDULES)}"
                f"{suggest(name, SCHEDULES).replace(' Did', '; did')})"
            )
        ]
    recipe = _RECIPES[name]
    per_rank = recipe.fewest_per_rank if stages_per_rank is None else stages_per_rank
    counts = {"num_ranks": num_ranks, "num_micro_batches": num_micro_batches}
    reasons = [f"{key}={value} must be at least 1" for key, value in counts.items() if value < 1]
    most = recipe.most_per_rank
    if per_rank < recipe.fewest_per_rank or (most is not None and per_rank > most):
        need = f"exactly {most}" if most is not None else f"at least {recipe.fewest_per_rank}"
        reasons.append(f"stages_per_rank={per_rank} must be {need} for the schedule {name}")
    if reasons:
        return reasons
    fewest = recipe.fewest_per_stage * num_ranks * per_rank
    if num_micro_batches < fewest:
        reasons.append(
            f"num_micro_batches={num_micro_batches} must be at least {fewest} for the schedule "
            f"{name} on {num_ranks} ranks; use smaller micro-batches or the schedule zbv"
        )
    if recipe.in_rounds and num_micro_batches % _rounds(num_ranks, num_micro_batches):
        rounded = -(-num_micro_batches // num_ranks) * num_ranks
        reasons.append(
            f"num_micro_batches={num_micro_batches} does not divide into the "
            f"{_rounds(num_ranks, num_micro_batches)} equal rounds that {name} needs on "
            f"{num_ranks} ranks; use {rounded} micro-batches"
        )
    return reasons


def write_schedule(
    name: str, num_ranks: int, num_micro_batches: int, stages_per_rank: int | None = None
) -> Schedule:
    """Build a schedule.

    Args:
        name: schedule name, one of `SCHEDULES`. gpipe and 1f1b have one stage per rank; the
            interleaved schedules have several, stage s on rank s mod num_ranks; zbv and dualpipev
            have two in a V shape: rank r holds stages r and 2 num_ranks - 1 - r, so rank 0 holds
            the first and the last stage.
        num_ranks: number of pipeline ranks.
        num_micro_batches: micro-batches per optimizer step.
        stages_per_rank: pipeline stages per rank; None means the fewest that the schedule supports.

    Raises:
        ConfigError: the name is unknown or the numbers are invalid; the message lists all
            `schedule_problems`.
    """
    reasons = schedule_problems(name, num_ranks, num_micro_batches, stages_per_rank)
    if reasons:
        raise ConfigError(f"the pipeline schedule cannot be built: {'; '.join(reasons)}.")
    recipe = _RECIPES[name]
    per_rank = recipe.fewest_per_rank if stages_per_rank is None else stages_per_rank
    ranks = list(range(num_ranks))
    if recipe.placement == "v":
        stage_ranks = ranks + ranks[::-1]
    else:
        stage_ranks = ranks * per_rank
    orders = []
    for rank in ranks:
        writer = _Writer(rank, num_ranks, per_rank, num_micro_batches)
        recipe.write(writer)
        orders.append(tuple(writer.actions))
    return Schedule(name, num_micro_batches, tuple(stage_ranks), tuple(orders))


def smallest_schedule(name: str, ranks: int, per_rank: int | None) -> Schedule | None:
    """Build the schedule with the fewest micro-batches; return None if no number is supported.

    The result is used to look up the rank of each stage.
    """
    counts = range(1, 16 * ranks + 1)
    fits = (n for n in counts if not schedule_problems(name, ranks, n, per_rank))
    count = next(fits, None)
    return None if count is None else write_schedule(name, ranks, count, per_rank)


def forward_only(schedule: Schedule, num_micro_batches: int) -> Schedule:
    """Return a forward-only schedule on the same stages, for any number of micro-batches.

    Micro-batches run in rounds of one per rank; each round runs through a rank's stages in order.
    """
    size = schedule.num_ranks
    rounds = [
        range(first, min(first + size, num_micro_batches))
        for first in range(0, num_micro_batches, size)
    ]
    orders = tuple(
        tuple(
            Action(F, stage, micro_batch)
            for round_ in rounds
            for stage in schedule.stages_of(rank)
            for micro_batch in round_
        )
        for rank in range(size)
    )
    return Schedule(f"{schedule.name}, forward", num_micro_batches, schedule.stage_ranks, orders)
