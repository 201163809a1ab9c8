"""Traces a training step on fake tensors in one process: live memory over time, by category.

`parallelize` itself shards a model with three blocks per stack over a fake process group; the model
then runs forward and backward on fake tensors. The lifetime of every storage is tracked, so that
prefetched shards, saved activations and temporary memory of the head come from the real code. The
second block represents all further blocks of a longer model: see `peak.py`. If blocks differ, every
kind of block has its own trace.
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
from bmforge.parallel.planner.fake_op_cache import FakeOpCache
from bmforge.parallel.planner.sharded_sizes import count_sharded, find_ends, held_bytes, local_bytes
from bmforge.parallel.planner.storage_tracker import (
    FIRST_END,
    INSIDE,
    LAST_END,
    PARTS,
    StorageTracker,
)
from bmforge.parallel.planner.workload import Workload
from bmforge.parallel.zero import param_groups_of
from bmforge.shards import local_tensor
from bmforge.surgery import persistent_tensors

__all__ = ["BLOCKS", "Mark", "Setting", "StepTrace", "trace_step"]

# A first block, a last one, and one between them that represents all others.
BLOCKS = 3
_GRADIENTS, _UNSHARDED = PARTS.index("gradients"), PARTS.index("unsharded gradients")
_COMMUNICATION = PARTS.index("communication")


@dataclass(frozen=True)
class Setting:
    """Configuration of one process, which determines its trace.

    Args:
        layout: degrees of parallelism; `pp` does not cut the traced model, see `piped`.
        shards: number of ZeRO shards or replicas in the trace, including those of the axis `cp`.
        rows: number of sequences in a micro-batch.
        precision: fp32, bf16 or fp16.
        recompute: whether blocks are recomputed in backward.
        prefetch: number of units whose parameters are gathered ahead.
        accumulates: whether a step has several micro-batches.
        piped: whether gradients are reduced only at the end of the step, as in a pipeline.
        copies: whether collectives allocate their own buffer, as they do on CPUs.
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
    """Position in the trace: start of a micro-batch, or of a block's forward or backward.

    Args:
        micro_batch: index of the micro-batch.
        stack: name of the stack.
        block: index of the block, 0 to 2.
        kind: "forward", "backward", or "start" for the start of a micro-batch.
        event: number of preceding events.
        flops: matrix FLOPs so far.
        traffic_bytes: bytes read and written by all other operators so far.
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
    """Trace of one step of the short model (three blocks per stack).

    Args:
        events: memory events in order: (bytes allocated or freed, index in `PARTS`, owner: see
            `storage_tracker.py`).
        marks: starts of blocks and micro-batches.
        static: bytes of the permanent parameters of the whole short model.
        block_static: bytes of the parameters of one block of each stack.
        ends_static: bytes of the parameters before the blocks and after them.
        trained: bytes of all trained parameters.
        block_trained: bytes of the trained parameters of one block of each stack.
        ends_trained: bytes of the trained parameters before the blocks and after them.
        micro_batches: number of traced micro-batches.
        has_gradients: whether gradients of earlier micro-batches exist from the beginning.
        flops: matrix FLOPs of the whole trace.
        traffic_bytes: bytes read and written by all other operators of the whole trace.
        parameters: dict from stack name to the number of elements in one of its blocks, before ZeRO
            shards them; the key "" has the elements outside the blocks.
        carry_bytes: bytes passed from block to block.
        others: pairs (number of blocks, trace) of every further kind of block.
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


def trace_step(
    workload: Workload, setting: Setting, outcomes: FakeOpCache | None = None
) -> StepTrace:
    """Trace one step of the short model on one process, with every kind of block.

    Args:
        workload: model and its batches.
        setting: configuration of the process.
        outcomes: cached operator results of earlier traces.

    Raises:
        ConfigError: the layout does not fit the model; or this process has already joined a process
            group.
    """
    outcomes = outcomes or FakeOpCache()
    others = [
        (count, _trace(replace(workload, build=build), setting, outcomes))
        for build, count in workload.kinds
    ]
    return replace(_trace(workload, setting, outcomes), others=tuple(others))


def _trace(workload: Workload, setting: Setting, outcomes: FakeOpCache) -> StepTrace:
    if dist.is_initialized():
        raise ConfigError(
            "planning cannot run in a process that has joined a process group. Start it "
            "in a separate process."
        )
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
        follower = StorageTracker(setting.copies, outcomes)
        with FakeTensorMode(allow_non_fake_inputs=True), workload.around(follower), _quiet():
            workload.materialize(model)
            return _follow_step(workload, setting, model, ends, follower)
    finally:
        dist.destroy_process_group()


@contextmanager
def _quiet() -> Iterator[None]:
    """Context manager: suppress log messages and warnings, which are the same for every layout."""
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
    follower: StorageTracker,
) -> StepTrace:
    marks = _Marks(model, follower)
    owners = _owners(model, ends)
    # In a pipeline the gradients stay unsharded until the end of the step; the second micro-batch
    # shows the memory of adding to those of the first.
    count = 2 if setting.piped and setting.accumulates else 1
    sharded = [m for m in model.modules() if isinstance(m, FSDPModule)]
    _prepare_(sharded, setting)
    with torch.no_grad():  # sharding slices parameters without autograd
        follower.register(local_tensor(t) for t in persistent_tensors(model).values())
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
    """Configure the FSDP modules as `PipelinedModel.step` does."""
    for module in sharded if setting.piped else ():
        module.set_requires_gradient_sync(False, recurse=False)
        module.set_is_last_backward(False)
        module.set_reshard_after_backward(setting.layout.zero == 3, recurse=False)


def _begin_gradients_(model: nn.Module) -> None:
    """Allocate gradients, as if earlier micro-batches had accumulated them."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)


def _owners(model: nn.Module, ends: tuple[set[str], set[str]]) -> dict[int, int]:
    """Map the `id` of each parameter outside the blocks to its end: before or after the blocks."""
    first, last = ({id(p) for n in names for p in getattr(model, n).parameters()} for names in ends)
    # A tied head is in both sets and is assigned to neither end.
    owners = dict.fromkeys(first - last, FIRST_END)
    return owners | dict.fromkeys(last - first, LAST_END)


@torch.no_grad()
def _assign(follower: StorageTracker, model: nn.Module, owners: dict[int, int]) -> None:
    """Set the category and owner of the storages of gradients and gathered parameters."""
    for p in model.parameters():
        if p.grad is not None:
            follower.assign([local_tensor(p.grad)], _GRADIENTS, owners.get(id(p), INSIDE))
    for module in model.modules():
        for p in (p for group in param_groups_of(module) for p in group.fsdp_params):
            end = owners.get(id(p.sharded_param), INSIDE)
            follower.assign(getattr(p, "all_gather_outputs", ()), _COMMUNICATION, end)
            # An unsharded gradient that is reduced at the end of a pipeline's step.
            gradient = getattr(p, "unsharded_accumulated_grad", None)
            follower.assign([] if gradient is None else [local_tensor(gradient)], _UNSHARDED, end)


class _Marks:
    """Hooks that record the start of each block's forward and backward.

    They also set the tracker's `end`: whether the modules before, in or after the blocks run.

    Args:
        model: parallelized model.
        follower: memory tracker.
    """

    def __init__(self, model: nn.Module, follower: StorageTracker) -> None:
        self.found: list[Mark] = []
        self.micro_batch, self.carry_bytes = 0, 0
        self.follower = follower
        rules: Any = getattr(model, "layout_rules", None)
        names = rules().stacks if callable(rules) else ()
        if not names:
            raise ConfigError(
                f"{type(model).__name__} has no layout rules that list its blocks. Define a method "
                "layout_rules() that returns LayoutRules(stacks=...)."
            )
        self.stacks = {name: list(model.get_submodule(name).children()) for name in names}
        for stack, blocks in self.stacks.items():
            for number, block in enumerate(blocks):
                self._watch(stack, number, block)
        every = [block for blocks in self.stacks.values() for block in blocks]
        self._watch_ends(every[0], every[-1])

    def start(self, micro_batch: int) -> None:
        """Mark the start of a micro-batch."""
        self.micro_batch = micro_batch
        self.follower.end = FIRST_END
        self._note("", 0, "start")

    def _watch(self, stack: str, number: int, block: nn.Module) -> None:
        # Before FSDP's own hooks, at which point every block has only its prefetched parameters.
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
                # These blocks are frozen, but blocks of other kinds are trained: in the worst case
                # gradients pass through all of these.
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
        position = (self.micro_batch, stack, number, kind)
        self.found.append(Mark(*position, len(seen.events), seen.flops, seen.traffic_bytes))
