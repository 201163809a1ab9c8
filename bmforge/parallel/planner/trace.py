"""One training step traced without memory and without the others: what is alive when, by part.

A model with three blocks per stack is laid out by `parallelize` itself, over a group of processes
that are not there, and runs forward and backward on fake tensors. Every storage is followed from
its making to its end, so that what sharding gathers ahead, what blocks keep for backward and what
the head needs for a moment are the engine's own. The second block stands for all that a longer
model has more: see `peak.py`. Where blocks differ, there is a trace of every kind.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule

from bmforge.errors import ConfigError
from bmforge.logging import get_logger
from bmforge.parallel.layout import Layout, build_mesh
from bmforge.parallel.parallelize import parallelize
from bmforge.parallel.pipeline.model import reduce_gradients_
from bmforge.parallel.planner.dry_run import join_fakes
from bmforge.parallel.planner.follow import (
    FIRST_END,
    INSIDE,
    LAST_END,
    PARTS,
    Follower,
)
from bmforge.parallel.planner.held import count_sharded, find_ends, held_bytes, local_bytes
from bmforge.parallel.planner.outcomes import Outcomes
from bmforge.parallel.planner.workload import Workload
from bmforge.parallel.zero import param_groups_of
from bmforge.shards import local_tensor
from bmforge.surgery import persistent_tensors

__all__ = ["BLOCKS", "Mark", "Setting", "StepTrace", "trace_step"]

# A first, a last, and one between them that stands for all others.
BLOCKS = 3
_GRADIENTS, _WHOLE = PARTS.index("gradients"), PARTS.index("whole gradients")
_COMMUNICATION = PARTS.index("communication")


@dataclass(frozen=True)
class Setting:
    """How one process works: what a trace depends on.

    Args:
        layout: which axes; pp does not cut here, see `piped`.
        shards: over how many processes ZeRO shards in the trace, or has replicas; those of the axis
            `cp` are among them.
        rows: of a micro-batch.
        precision: fp32, bf16 or fp16.
        recompute: blocks are recomputed in backward.
        prefetch: units gathered ahead.
        accumulates: there are several micro-batches a step.
        piped: gradients are reduced at the end of the step only, as a pipeline does.
        copies: collectives make a buffer of their own, as on processors.
    """

    layout: Layout
    shards: int
    rows: int
    precision: str = "bf16"
    recompute: bool = False
    prefetch: int = 1
    accumulates: bool = False
    piped: bool = False
    copies: bool = False


@dataclass(frozen=True)
class Mark:
    """A micro-batch, or a block's forward or backward, begins.

    Args:
        micro_batch: of which micro-batch.
        stack: the stack's name.
        block: which of its three.
        kind: "forward" or "backward"; "start" of a micro-batch.
        event: how many events there were before.
        flops: matrix products so far.
        traffic_bytes: read and written by everything else so far.
    """

    micro_batch: int
    stack: str
    block: int
    kind: str
    event: int
    flops: float
    traffic_bytes: float


@dataclass(frozen=True)
class StepTrace:
    """What a step of the short model did.

    Args:
        events: (bytes more or less, index in `PARTS`, whose: see `plan_follow.py`), in order.
        marks: where blocks begin.
        static: bytes of parameters that are there all the time, of the whole short model.
        block_static: of one block of each stack.
        ends_static: of what stands before the blocks and behind them.
        trained, block_trained, ends_trained: the same, of those parameters that are trained.
        micro_batches: how many were traced.
        has_gradients: those of earlier micro-batches are there from the beginning.
        flops, traffic_bytes: of the whole trace.
        parameters: numbers in one block of each stack, before ZeRO shards them, and under "" in
            everything else.
        carry_bytes: what goes from block to block.
        others: of every further kind of block, how many there are and the same step with these.
    """

    events: tuple[tuple[int, int, int], ...]
    marks: tuple[Mark, ...]
    static: int
    block_static: dict[str, int]
    ends_static: tuple[int, int]
    trained: int
    block_trained: dict[str, int]
    ends_trained: tuple[int, int]
    micro_batches: int
    has_gradients: bool
    flops: float
    traffic_bytes: float
    parameters: dict[str, int]
    carry_bytes: int
    others: tuple[tuple[int, StepTrace], ...] = ()


def trace_step(workload: Workload, setting: Setting, outcomes: Outcomes | None = None) -> StepTrace:
    """Trace one step of the short model on one process, with every kind of blocks.

    Args:
        workload: the model and its rows.
        setting: how the process works.
        outcomes: of operators in earlier traces, which need not be found out again.

    Raises:
        ConfigError: the layout does not fit the model; or this process has joined others already.
    """
    outcomes = outcomes or Outcomes()
    others = [
        (count, _trace(replace(workload, build=build), setting, outcomes))
        for build, count in workload.kinds
    ]
    return replace(_trace(workload, setting, outcomes), others=tuple(others))


def _trace(workload: Workload, setting: Setting, outcomes: Outcomes) -> StepTrace:
    if dist.is_initialized():
        raise ConfigError("a plan needs a process of its own: this one has joined a group.")
    layout = setting.layout
    join_fakes(0, setting.shards * layout.tp)
    try:
        mesh = build_mesh(layout)
        model = workload.build(BLOCKS)
        ends = find_ends(model)
        with _quiet():
            parallelize(
                model,
                layout,
                mesh=mesh,
                precision=setting.precision,
                recompute=setting.recompute,
                prefetch=setting.prefetch,
            )
        follower = Follower(setting.copies, outcomes)
        with FakeTensorMode(allow_non_fake_inputs=True), workload.around(follower), _quiet():
            workload.materialize(model)
            return _follow_step(workload, setting, model, ends, follower)
    finally:
        dist.destroy_process_group()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what is said to people who train: here it would be said once per layout."""
    logger, level = get_logger(), get_logger().level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _follow_step(
    workload: Workload,
    setting: Setting,
    model: nn.Module,
    ends: tuple[set[str], set[str]],
    follower: Follower,
) -> StepTrace:
    marks = _Marks(model, follower)
    owners = _owners(model, ends)
    count = 2 if setting.piped and setting.accumulates else 1
    sharded = [m for m in model.modules() if isinstance(m, FSDPModule)]
    _prepare_(sharded, setting)
    with torch.no_grad():  # where a shard is taken out without noting it for autograd
        follower.know(local_tensor(t) for t in persistent_tensors(model).values())
    model.train()
    with follower:
        if setting.accumulates and not setting.piped:
            _begin_gradients_(model)
            _assign(follower, model, owners)
        for number in range(count):
            marks.start(number)
            workload.run(model, workload.make_batch(setting.rows)).backward()
            follower.end = INSIDE
            _assign(follower, model, owners)
        if setting.piped:
            reduce_gradients_(model, sharded)
            _assign(follower, model, owners)
    return StepTrace(
        tuple(follower.events),
        tuple(marks.found),
        *held_bytes(model, marks.stacks, ends, lambda _: True),
        *held_bytes(model, marks.stacks, ends, lambda tensor: tensor.requires_grad),
        count,
        setting.accumulates and not setting.piped,
        follower.flops,
        follower.traffic_bytes,
        count_sharded(model, marks.stacks),
        marks.carry_bytes,
    )


def _prepare_(sharded: list[FSDPModule], setting: Setting) -> None:
    """Tell sharded modules what `PipelinedModel.step` tells them."""
    for module in sharded if setting.piped else ():
        module.set_requires_gradient_sync(False, recurse=False)
        module.set_is_last_backward(False)
        module.set_reshard_after_backward(setting.layout.zero == 3, recurse=False)


def _begin_gradients_(model: nn.Module) -> None:
    """Give every parameter the gradient that earlier micro-batches have left."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)


def _owners(model: nn.Module, ends: tuple[set[str], set[str]]) -> dict[int, int]:
    """Return at which end parameters are, by id; what is at both counts as inside, for both."""
    first, last = ({id(p) for n in names for p in getattr(model, n).parameters()} for names in ends)
    found = dict.fromkeys(first - last, FIRST_END)
    return found | dict.fromkeys(last - first, LAST_END)


@torch.no_grad()
def _assign(follower: Follower, model: nn.Module, owners: dict[int, int]) -> None:
    """Tell gradients, and what is gathered, by their parameters."""
    for p in model.parameters():
        if p.grad is not None:
            follower.assign([local_tensor(p.grad)], _GRADIENTS, owners.get(id(p), INSIDE))
    for module in model.modules():
        for p in (p for group in param_groups_of(module) for p in group.fsdp_params):
            end = owners.get(id(p.sharded_param), INSIDE)
            follower.assign(getattr(p, "all_gather_outputs", ()), _COMMUNICATION, end)
            # A whole gradient that waits for the end of a pipeline's step.
            held = getattr(p, "unsharded_accumulated_grad", None)
            follower.assign([] if held is None else [local_tensor(held)], _WHOLE, end)


class _Marks:
    """Hooks on every block that note where forward and backward of it begin, and whose turn it is.

    Args:
        model: laid out.
        follower: is told when what stands before the blocks and behind them runs.
    """

    def __init__(self, model: nn.Module, follower: Follower) -> None:
        self.found: list[Mark] = []
        self.micro_batch, self.carry_bytes = 0, 0
        self.follower = follower
        rules: Any = getattr(model, "layout_rules", None)
        names = rules().stacks if callable(rules) else ()
        if not names:
            raise ConfigError(f"{type(model).__name__} has no rules that name its blocks.")
        self.stacks = {name: list(model.get_submodule(name).children()) for name in names}
        for stack, blocks in self.stacks.items():
            for number, block in enumerate(blocks):
                self._watch(stack, number, block)
        every = [block for blocks in self.stacks.values() for block in blocks]
        self._watch_ends(every[0], every[-1])

    def start(self, micro_batch: int) -> None:
        """Begin a micro-batch."""
        self.micro_batch = micro_batch
        self.follower.end = FIRST_END
        self._note("", 0, "start")

    def _watch(self, stack: str, number: int, block: nn.Module) -> None:
        # In front of sharding's own hooks, where every block finds what was gathered ahead for it.
        block.register_forward_pre_hook(
            lambda *_: self._note(stack, number, "forward"), prepend=True
        )

        def after(module: nn.Module, args: Any, out: Any) -> None:
            first = out[0] if isinstance(out, tuple) else out
            if first.requires_grad:
                first.register_hook(lambda _: self._note(stack, number, "backward"))

        block.register_forward_hook(after, prepend=True)

    def _watch_ends(self, first: nn.Module, last: nn.Module) -> None:
        def turn(end: int) -> None:
            self.follower.end = end

        trains = any(parameter.requires_grad for parameter in first.parameters())

        def enter(module: nn.Module, args: Any) -> Any:
            turn(INSIDE)
            self.carry_bytes = local_bytes(args[0])
            if not args[0].requires_grad and not trains:
                # Other blocks are trained: at most, gradients go through all of these.
                args = (args[0].detach().requires_grad_(), *args[1:])
            if args[0].requires_grad:
                args[0].register_hook(lambda _: turn(FIRST_END))
            return args

        def leave(module: nn.Module, args: Any, out: Any) -> None:
            turn(LAST_END)
            first = out[0] if isinstance(out, tuple) else out
            if first.requires_grad:
                first.register_hook(lambda _: turn(INSIDE))

        first.register_forward_pre_hook(enter, prepend=True)
        last.register_forward_hook(leave)

    def _note(self, stack: str, number: int, kind: str) -> None:
        seen = self.follower
        seen.note_resizes()
        place = (self.micro_batch, stack, number, kind)
        self.found.append(Mark(*place, len(seen.events), seen.flops, seen.traffic_bytes))
