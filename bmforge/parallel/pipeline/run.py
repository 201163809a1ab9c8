"""Pipeline execution: runs the micro-batches of a step through this rank's stages.

Start at `Pipeline`. The order comes from `schedules.py`, `messages.py` transfers the tensors, and
`split_backward.py` splits a backward into input gradients and weight gradients. Stages on one rank
exchange tensors without sending them. The inputs of a stage are leaves of a separate autograd
graph. Only the gradient edges of its outputs are kept until backward, so an activation that
backward does not need is freed after it is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from bmforge.batch import Batch
from bmforge.errors import ConfigError, ShapeError
from bmforge.parallel.pipeline.messages import Link, Route, StageMessages, Tensors, share_from
from bmforge.parallel.pipeline.schedules import Action, Schedule, StageMessage, forward_only
from bmforge.parallel.pipeline.split_backward import WeightBackward, backward_input

__all__ = ["Pipeline", "Stage", "Sync"]

Sync = Callable[[int, bool], None]


class Stage(Protocol):
    """One pipeline stage of a model."""

    def forward(self, stage_inputs: Tensors | None, micro_batch: Batch) -> Tensors | Tensor:
        """Run the forward of this stage.

        Args:
            stage_inputs: output of the previous stage; None for the first stage. It must not be
                changed in place, because its send may still be running.
            micro_batch: complete micro-batch; every stage uses the fields that it needs.

        Returns:
            inputs of the next stage, up to 16 tensors of any dtype and shape, or None in place of a
            tensor. The last stage returns the scaled loss, a scalar; in `run_forward_only` any
            tensor or tuple.
        """
        ...


@dataclass
class _ForwardState:
    """State that a forward pass keeps for its backward pass."""

    inputs: list[Tensor | None]  # inputs that require a gradient; None for the others
    outputs: list[GradientEdge | None]


@dataclass
class _ScheduleState:
    """State of one execution of a schedule."""

    wire: StageMessages
    micro_batches: Sequence[Batch]
    handed: dict[StageMessage, Tensors] = field(default_factory=dict)
    saved: dict[tuple[int, int], _ForwardState] = field(default_factory=dict)
    weights: dict[tuple[int, int], WeightBackward] = field(default_factory=dict)
    results: dict[int, Tensors] = field(default_factory=dict)


class Pipeline:
    """Runs this rank's stages in the order of a schedule.

    Args:
        schedule: schedule built by `write_schedule`.
        stages: dict from stage index to `Stage`, for the stages on this rank.
        link: connection to the other ranks.
        sync: function called as sync(stage, is_last) before each backward of a stage; `is_last` is
            True once per step, before the backward that completes the stage's gradients. The
            function configures modules that reduce gradients in backward (FSDP2:
            set_requires_gradient_sync, set_reshard_after_backward, set_is_last_backward). If
            backward is split, the last backward then runs unsplit, since such modules need one
            complete backward; that costs one more input gradient per stage and step.
        split: stages whose backward is split into input and weight gradients if the schedule has
            these actions; None for all. The other stages run the full backward at the
            input-gradient action. Exclude stages with sharded or compiled blocks or an in-place
            backward (the loss); for recomputed blocks a full backward is cheaper.

    Comm: per (micro-batch, edge, direction) one header and one message per tensor. `messages.py`
    explains why no order of sends and receives can hang.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, Stage],
        link: Link,
        *,
        sync: Sync | None = None,
        split: Collection[int] | None = None,
    ) -> None:
        own_stages = schedule.stages_of(link.rank)
        if link.size != schedule.num_ranks or set(stages) != set(own_stages):
            raise ConfigError(
                f"rank {link.rank} of {link.size} has the stages {sorted(stages)}, but the "
                f"schedule {schedule.name} for {schedule.num_ranks} ranks assigns "
                f"{list(own_stages)} to this rank. Pass these stages."
            )
        self.schedule, self.link = schedule, link
        self._stages, self._sync = dict(stages), sync
        self._split = set(stages if split is None else split)
        self._last = schedule.num_stages - 1
        self._route = Route(schedule)
        self._completing = self._find_completing()
        self._connected = False

    @property
    def last_rank(self) -> int:
        """Rank of the last stage, which computes the losses."""
        return self.schedule.stage_ranks[-1]

    def step(self, micro_batches: Sequence[Batch]) -> list[Tensor]:
        """Run forward and backward of every micro-batch; gradients accumulate in `.grad`.

        Args:
            micro_batches: micro-batches, the same on every rank.

        Returns:
            detached losses in the order of the micro-batches on `last_rank`; [] on other ranks

        Raises:
            ConfigError: the number of micro-batches differs from that of the schedule.
            DistributedError: another rank failed or hangs; the message names the rank and the
                action.
        """
        if len(micro_batches) != self.schedule.num_micro_batches:
            raise ConfigError(
                f"the batch has {len(micro_batches)} micro-batches, but this "
                f"{self.schedule.name} schedule was built for {self.schedule.num_micro_batches}. "
                "Build a schedule for the number of micro-batches."
            )
        run = self._start(self._route, micro_batches)
        for action in self.schedule.orders[self.link.rank]:
            if action.kind == "forward":
                self._forward(run, action.stage, action.micro_batch)
            else:
                self._backward(run, action)
        run.wire.finish()
        return [loss for _, (loss,) in sorted(run.results.items()) if loss is not None]

    def run_forward_only(
        self, micro_batches: Sequence[Batch], *, share: bool = False
    ) -> list[Tensors]:
        """Run forward without gradients, for evaluation and generation.

        Args:
            micro_batches: any number of micro-batches, the same on every rank.
            share: broadcast the results to every rank.

        Returns:
            outputs of the last stage per micro-batch, always as tuples, on `last_rank` or, with
            `share`, on every rank; [] on other ranks
        """
        schedule = forward_only(self.schedule, len(micro_batches))
        run = self._start(Route(schedule), micro_batches)
        with torch.no_grad():
            for _, stage, micro_batch in schedule.orders[self.link.rank]:
                self._forward(run, stage, micro_batch)
        run.wire.finish()
        if share:
            numbers = range(len(micro_batches))
            return [share_from(self.last_rank, run.results.get(n), self.link) for n in numbers]
        return [outputs for _, outputs in sorted(run.results.items())]

    def _start(self, route: Route, micro_batches: Sequence[Batch]) -> _ScheduleState:
        if not self._connected:
            self.link.connect(list(self._route.messages))
            self._connected = True
        return _ScheduleState(StageMessages(route, self.link), micro_batches)

    def _find_completing(self) -> set[Action]:
        """Return, per stage of this rank, the last action that adds to its gradients."""
        last: dict[int, Action] = {}
        for action in self.schedule.orders[self.link.rank]:
            # An unsplit stage computes its weight gradients together with the input gradient.
            half = "backward_weight" if action.stage in self._split else "backward_input"
            if action.kind in ("backward", half):
                last[action.stage] = action
        return set(last.values())

    def _forward(self, run: _ScheduleState, stage: int, micro_batch: int) -> None:
        message = StageMessage("forward", stage, micro_batch)
        stage_inputs = self._take(run, message._replace(stage=stage - 1)) if stage else None
        result = self._stages[stage].forward(stage_inputs, run.micro_batches[micro_batch])
        outputs = (result,) if isinstance(result, Tensor) else result
        training = torch.is_grad_enabled()
        if training:
            # Gradient edges instead of outputs: the graph does not need the values of the outputs,
            # whose memory is freed after the send.
            run.saved[stage, micro_batch] = _ForwardState(
                [t if t is not None and t.requires_grad else None for t in stage_inputs or ()],
                [get_gradient_edge(t) if _wants_gradient(t) else None for t in outputs],
            )
        if stage < self._last:
            self._give(run, message, outputs)
        else:
            if training:
                _check_loss(result, stage)
            # Detached, because results are kept until the end of the step and would keep their
            # graphs.
            run.results[micro_batch] = tuple(t if t is None else t.detach() for t in outputs)

    def _backward(self, run: _ScheduleState, action: Action) -> None:
        kind, stage, micro_batch = action
        is_whole = kind == "backward" or stage not in self._split
        if kind == "backward_weight" and is_whole:
            return
        completes = action in self._completing
        if self._sync is not None:
            self._sync(stage, completes)
        if kind == "backward_weight":
            weights = run.weights.pop((stage, micro_batch))
            weights.run(all_groups=completes and self._sync is not None)
            return
        edges, grads, inputs = self._gather(run, stage, micro_batch)
        if is_whole:
            # Without edges no output needs a gradient, as in a stage with frozen weights only.
            if edges:
                torch.autograd.backward(edges, grads)
        else:
            tensors = [t for t in inputs if t is not None]
            run.weights[stage, micro_batch] = backward_input(edges, grads, tensors)
        if stage:
            own_grads = tuple(None if t is None else t.grad for t in inputs)
            for tensor in inputs:
                if tensor is not None:
                    tensor.grad = None  # is being sent, so the weight part must not add to it
            self._give(run, StageMessage("backward", stage, micro_batch), own_grads)

    def _gather(
        self, run: _ScheduleState, stage: int, micro_batch: int
    ) -> tuple[list[GradientEdge], list[Tensor], list[Tensor | None]]:
        """Return three lists: a stage's outputs with gradients, these gradients, and its inputs."""
        saved = run.saved.pop((stage, micro_batch))
        grads: Tensors
        if stage == self._last:
            # The derivative of the loss with respect to itself.
            grads = tuple(torch.ones_like(t) for t in run.results[micro_batch] if t is not None)
        else:
            grads = self._take(run, StageMessage("backward", stage + 1, micro_batch))
        pairs = zip(saved.outputs, grads, strict=True)
        edges_and_grads = [(e, g) for e, g in pairs if e is not None and g is not None]
        return (
            [edge for edge, _ in edges_and_grads],
            [grad for _, grad in edges_and_grads],
            saved.inputs,
        )

    def _give(self, run: _ScheduleState, message: StageMessage, tensors: Tensors) -> None:
        if self.schedule.stage_ranks[message.receiver] != self.link.rank:
            run.wire.send(message, tensors)
            return
        # Detached into a new leaf, as a received message is, so that the stages' graphs stay
        # separate.
        run.handed[message] = tuple(
            None if t is None else t.detach().requires_grad_(t.requires_grad) for t in tensors
        )

    def _take(self, run: _ScheduleState, message: StageMessage) -> Tensors:
        if message in run.handed:
            return run.handed.pop(message)
        return run.wire.receive(message)


def _wants_gradient(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _check_loss(result: object, stage: int) -> None:
    if not _wants_gradient(result) or result.dim() != 0:  # type: ignore[attr-defined]
        returned = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise ShapeError(
            f"the last stage ({stage}) returned {returned} (needed: the loss, a scalar that "
            "requires a gradient)."
        )
