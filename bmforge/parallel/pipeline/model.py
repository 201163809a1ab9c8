"""Pipelined model: this rank's stages, training steps, other calls and shared parameters.

The model remains one module with the same parameter names, but has only this rank's blocks. Every
stage runs the model's own forward: `span`, set on each stack, selects the blocks, and
`stage_inputs` contains the activations of the previous stage. Outside a training step a call of the
model runs all stages and returns the result on every rank, so evaluation and generation need no
changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from bmforge.balance import balance_whole_step
from bmforge.batch import Batch
from bmforge.errors import ConfigError
from bmforge.parallel.pipeline.messages import Link
from bmforge.parallel.pipeline.run import Pipeline
from bmforge.parallel.pipeline.schedules import Schedule, schedule_problems, write_schedule
from bmforge.parallel.pipeline.stages import StageAssignment
from bmforge.parallel.zero import groups_of_state
from bmforge.records import as_stack_, fill_slot_, find_parallel_record
from bmforge.shards import local_tensor
from bmforge.surgery import wrap_forward_

__all__ = ["PipelinedModel", "Run", "pipeline_of", "reduce_gradients_", "run_step"]

# Function that calls the model on a micro-batch; returns the loss on the last stage.
Run = Callable[[Batch], Any]


@dataclass
class _Stage:
    """One stage of the model; implements `pipeline.Stage`."""

    owner: PipelinedModel
    number: int

    def forward(self, stage_inputs: tuple[Tensor, ...] | None, micro_batch: Batch) -> Any:
        """Run the model with this stage's blocks."""
        model = self.owner.model
        self.owner.show_stage(self.number)
        fill_slot_(model, "stage_inputs", stage_inputs or ())
        result = self.owner.run(micro_batch)
        stage_outputs = self.owner.output.stage_outputs
        self.owner.output = None
        return result if stage_outputs is None else stage_outputs


class PipelinedModel:
    """Runs the stages of a model that was cut into a pipeline.

    Args:
        model: model with this rank's blocks.
        cutting: assignment of modules to stages.
        mesh: mesh with all axes.
        schedule: name of the schedule and stages per rank.
        shared: parameters that exist on several stages, see `stages.drop_the_rest_`.
        slices: send the messages between stages in slices, one per process of the axis `tp`.
        splits: allow splitting backward into input gradients and weight gradients; False if blocks
            are sharded, compiled or recomputed.
        frees: free the gathered parameters after every backward, not at the end of the step.

    Attributes:
        rank: pipeline rank of this process.
        size: number of pipeline ranks.
        copied: names of the parameters that an earlier rank also has; they are counted on that
            rank.
    """

    def __init__(
        self,
        model: nn.Module,
        cutting: StageAssignment,
        mesh: DeviceMesh,
        schedule: tuple[str, int | None],
        shared: Mapping[str, Sequence[int]],
        *,
        slices: bool = False,
        frees: bool = True,
        splits: bool = True,
    ) -> None:
        self.model, self.cutting, self.mesh, self.schedule = model, cutting, mesh, schedule
        self.frees, self._splits = frees, splits
        self.run: Run = self._refuse
        self.output: Any = None
        self._pipelines: dict[int, Pipeline] = {}
        slice_group = mesh["tp"].get_group() if slices and mesh["tp"].size() > 1 else None
        device = torch.device(mesh.device_type)
        self._link = Link(mesh["pp"].get_group(), device, slice_group)
        self._is_inside = False
        self.rank, self.size = mesh.get_local_rank("pp"), mesh["pp"].size()
        self._owners = owners = self._build(num_micro_batches=None).stage_ranks
        self.show_stage(owners.index(self.rank))
        ranks = {name: sorted({owners[s] for s in stages}) for name, stages in shared.items()}
        self.copied = frozenset(
            n for n, owner_ranks in ranks.items() if owner_ranks[0] != self.rank
        )
        self._groups = _build_groups(mesh, {tuple(r) for r in self._all_sets(owners)})
        self._shared = {
            n: tuple(owner_ranks) for n, owner_ranks in ranks.items() if len(owner_ranks) > 1
        }
        wrap_forward_(model, self._forward, "stages")
        model.register_forward_hook(self._note_output)

    @property
    def stages_here(self) -> tuple[int, ...]:
        """Stages on this rank."""
        return tuple(s for s, owner in enumerate(self._owners) if owner == self.rank)

    @property
    def shared_names(self) -> tuple[str, ...]:
        """Names of the parameters that several stages have; their gradients are summed."""
        return tuple(sorted(self._shared))

    def show_stage(self, number: int) -> None:
        """Make every stack run only the blocks of one stage."""
        for stack, span in self.cutting.spans[number].items():
            as_stack_(self.model.get_submodule(stack)).span = span

    def rank_of(self, name: str) -> int:
        """Return the first pipeline rank that has the named parameter or buffer.

        Buffers of the modules that contain the stacks are on every rank.
        """
        homes = self.cutting.homes
        stages = (h for n, h in homes.items() if name == n or name.startswith(f"{n}."))
        return min(self._owners[stage] for stage in next(stages, range(self.cutting.num_stages)))

    @property
    def group(self) -> dist.ProcessGroup:
        """Process group of this pipeline."""
        return self.mesh["pp"].get_group()

    def _all_sets(self, owners: Sequence[int]) -> list[list[int]]:
        """Return all sets of ranks that share modules or parameters (equal on every rank).

        `owners` contains the pipeline rank of every stage.
        """
        sets = {tuple(sorted({owners[s] for s in homes})) for homes in self.cutting.homes.values()}
        return [list(ranks) for ranks in sorted(sets) if len(ranks) > 1]

    def step(self, run: Run, micro_batches: Sequence[Batch]) -> list[Tensor]:
        """Run forward and backward of a step's micro-batches; return their losses on the last rank.

        Args:
            run: function that calls the model once on a micro-batch and returns the loss.
            micro_batches: micro-batches, the same on every rank of the pipeline.

        Raises:
            ConfigError: there are fewer micro-batches than the schedule needs.
        """
        pipeline = self._pipeline(len(micro_batches))
        sharded = [m for m in self.model.modules() if isinstance(m, FSDPModule)]
        for module in sharded:
            # Gradients of all micro-batches are summed without communication and reduced once at
            # the end.
            module.set_requires_gradient_sync(False, recurse=False)
            module.set_is_last_backward(False)
            module.set_reshard_after_backward(self.frees, recurse=False)
        self.run, self._is_inside = run, True
        try:
            losses = pipeline.step(micro_batches)
        finally:
            self.run, self._is_inside = self._refuse, False
            fill_slot_(self.model, "stage_inputs", ())
        reduce_gradients_(self.model, sharded)
        # After the reduction over replicas, so that only the local shards are sent.
        self._sum_shared_gradients_()
        return losses

    def run_forward(self, run: Run, micro_batches: Sequence[Batch]) -> None:
        """Run only the forward of a step's micro-batches, and discard the outputs."""
        self._run_forward(run, micro_batches, share=False)

    def _run_forward(self, run: Run, micro_batches: Sequence[Batch], share: bool) -> list[Any]:
        # Any of them: a forward-only schedule runs any number of micro-batches.
        pipeline = next(iter(self._pipelines.values()), None) or self._pipeline(self._least())
        self.run, self._is_inside = run, True
        try:
            return pipeline.run_forward_only(micro_batches, share=share)
        finally:
            self.run, self._is_inside = self._refuse, False
            fill_slot_(self.model, "stage_inputs", ())

    def _forward(self, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Replacement of the model's forward: run one stage inside a step, otherwise all stages."""
        if self._is_inside:
            return inner(*args, **kwargs)
        if torch.is_grad_enabled():
            raise ConfigError(
                "a pipelined model cannot compute gradients in a direct forward call. Use the "
                "Trainer or run_step to train, or torch.no_grad for a call without gradients."
            )
        if kwargs.get("output_hidden_states"):
            raise ConfigError(
                "output_hidden_states is not supported with pp above 1. Record hidden states "
                "with train.inspect_activations, or use a layout with pp=1."
            )
        kind: list[Any] = []

        def run(inputs: Batch) -> Any:
            self.output = inner(*args, **inputs)
            kind.append(self.output)
            if self.output.stage_outputs is not None:
                return None
            return tuple(v if isinstance(v, Tensor) else None for v in self.output)

        (outputs,) = self._run_forward(run, [kwargs], share=True)
        return type(kind[-1])(*outputs)

    def _note_output(self, module: nn.Module, args: Any, out: Any) -> None:
        if self._is_inside:
            self.output = out

    def _refuse(self, micro_batch: Batch) -> Any:
        raise AssertionError("a pipeline stage ran outside of a training step.")

    def _least(self) -> int:
        """Minimum number of micro-batches of the schedule."""
        name, per_rank = self.schedule
        size = self.mesh["pp"].size()
        return next(n for n in range(1, 8 * size) if not schedule_problems(name, size, n, per_rank))

    def _build(self, num_micro_batches: int | None) -> Schedule:
        name, per_rank = self.schedule
        count = self._least() if num_micro_batches is None else num_micro_batches
        return write_schedule(name, self.mesh["pp"].size(), count, per_rank)

    def _pipeline(self, num_micro_batches: int) -> Pipeline:
        if num_micro_batches not in self._pipelines:
            schedule = self._build(num_micro_batches)
            own_stages = schedule.stages_of(self._link.rank)
            stages = {number: _Stage(self, number) for number in own_stages}
            # The loss changes its gradient in place, so its backward cannot be split.
            halves = set(own_stages) - {schedule.num_stages - 1} if self._splits else ()
            pipeline = Pipeline(schedule, stages, self._link, split=halves)
            self._pipelines[num_micro_batches] = pipeline
        return self._pipelines[num_micro_batches]

    def _sum_shared_gradients_(self) -> None:
        """Sum the gradients of each parameter that several stages have, over these stages."""
        parameters = dict(self.model.named_parameters())
        for name, ranks in sorted(self._shared.items()):
            parameter = parameters[name]
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                # All ranks of the group must take part in the all-reduce, or it hangs.
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(local_tensor(parameter.grad), group=self._groups[ranks])


def run_step(model: nn.Module, run: Run, micro_batches: Sequence[Batch]) -> list[Tensor]:
    """Run forward and backward of a step's micro-batches on a model of any layout.

    Args:
        model: model whose gradients are computed.
        run: function that calls the model on one micro-batch and returns the loss; in a
            pipeline, only the last stage returns a loss.
        micro_batches: this process's micro-batches.

    Returns:
        detached losses of the micro-batches; in a pipeline only on the rank of the last stage
    """
    pipeline = pipeline_of(model)

    def run_all() -> None:
        if pipeline is not None:
            pipeline.run_forward(run, micro_batches)
        else:
            for micro_batch in micro_batches:
                run(micro_batch)

    with balance_whole_step(model, run_all, len(micro_batches)):
        if pipeline is not None:
            return pipeline.step(run, micro_batches)
        losses = []
        for micro_batch in micro_batches:
            loss = run(micro_batch)
            loss.backward()
            losses.append(loss.detach())
        return losses


def pipeline_of(model: nn.Module) -> PipelinedModel | None:
    """Return the `PipelinedModel` of a pipelined model; None for any other model."""
    record = find_parallel_record(model)
    return None if record is None else record.pipeline


def _build_groups(
    mesh: DeviceMesh, sets: set[tuple[int, ...]]
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Create a process group for each set of pipeline ranks, in every parallel pipeline."""
    groups = {}
    axis = (mesh.mesh_dim_names or ()).index("pp")
    lines = mesh.mesh.movedim(axis, 0).flatten(1).T.tolist()
    # Creating groups is collective: every process creates all of them, in the same order.
    for ranks in sorted(sets):
        members = [[line[rank] for rank in ranks] for line in lines]
        group, _ = dist.new_subgroups_by_enumeration(members)
        if group is not None:
            groups[ranks] = group
    return groups


def reduce_gradients_(model: nn.Module, sharded: Sequence[FSDPModule]) -> None:
    """Reduce the accumulated gradients of FSDP2 modules and reshard their parameters.

    The schedule runs one backward per stage and micro-batch, and FSDP2 cannot know which of them is
    the last for a module. torch.distributed.pipelining does the same at the end of a step.
    """
    if not sharded:
        return
    for module in sharded:
        module.set_requires_gradient_sync(True, recurse=False)
        module.set_is_last_backward(True)
        module.set_reshard_after_backward(True, recurse=False)
    root: Any = fully_shard.state(model)  # type: ignore[attr-defined]
    for state in root._state_ctx.all_states:
        for group in groups_of_state(state):
            group.post_backward()
    root._root_post_backward_final_callback()
