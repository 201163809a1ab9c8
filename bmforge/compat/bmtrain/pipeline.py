"""Block list that is split into pipeline stages, and called like an ordinary block list.

The schedule (GPipe) and the messages are those of the engine. One autograd function wraps forward
and backward: it gathers the rows of the pipeline's processes, sends micro-batches through the
stages, and returns to every process the outputs for its own rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bmforge.compat.bmtrain.block import Block, BlockError, TransformerBlockList
from bmforge.compat.bmtrain.inspect import collect_records, record_tensor
from bmforge.compat.bmtrain.module import claim_blocks_
from bmforge.compat.bmtrain.parameter import all_rows, make_parameter, mark_, origin_of
from bmforge.compat.bmtrain.runtime import config
from bmforge.compat.bmtrain.store import allgather_objects
from bmforge.errors import ShapeError
from bmforge.parallel.collectives import gather_tokens, take_tokens
from bmforge.parallel.pipeline.messages import Link, Route, StageMessages, share_from
from bmforge.parallel.pipeline.schedules import StageMessage, forward_only, write_schedule

__all__ = ["PipelineTransformerBlockList"]


class PipelineTransformerBlockList(TransformerBlockList):
    """List of blocks, split evenly and contiguously over `pipe_size` pipeline stages.

    A process has the parameters of the blocks of its stage; for the other blocks it has only the
    parameters' names and shapes. With one stage the list works like a `TransformerBlockList`.

    Args:
        modules: layers of the list, each an ordinary module or a block with mode="PIPE".
        num_hidden: number of leading arguments that a block computes for the next block.
    """

    mode = "PIPE"

    def __init__(self, modules: Iterable[nn.Module], num_hidden: int = 1) -> None:
        super().__init__(modules, num_hidden)
        self.stages, self.stage_id = config["pipe_size"], config["topology"].stage_id
        if self.stages == 1:
            return
        if len(self) < self.stages:
            raise BlockError(
                f"{len(self)} blocks are too few for pipe_size={self.stages} stages. Use a smaller "
                "pipe_size."
            )
        for index, block in enumerate(self):
            _place_(block, self.get_stage_by_layer_id(index))
        claim_blocks_(self)
        self._link = Link(config["pipe_comm"], config.device)
        self._schedule = write_schedule("gpipe", self.stages, config["micros"])
        self._link.connect(list(Route(self._schedule).messages))

    def get_stage_by_layer_id(self, layer_id: int) -> int:
        """Return the pipeline stage of a block."""
        return next(s for s in range(self.stages) if layer_id in self.get_range_by_stage_id(s))

    def get_range_by_stage_id(self, stage_id: int) -> range:
        """Return the block indices of a stage; the first stages may have one block more."""
        size, more = divmod(len(self), self.stages)
        first = stage_id * size + min(stage_id, more)
        return range(first, first + size + (stage_id < more))

    def get_part_len_by_stage_id(self, stage_id: int) -> int:
        """Return the number of blocks of a stage."""
        return len(self.get_range_by_stage_id(stage_id))

    def forward(
        self,
        *args: Any,
        batch_related: Sequence[bool] = (),
        return_hidden_states: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run the blocks on this process's rows; see `TransformerBlockList.forward`.

        Args:
            args: `num_hidden` hidden states, then further arguments of the blocks.
            batch_related: one flag per further argument, True if the argument has a batch dim
                (default: tensors with as many dims and rows as the first argument).
            return_hidden_states: also return the inputs of each block.
            kwargs: keyword arguments, the same for every block and process; without gradient.
        """
        if self.stages == 1:
            return super().forward(*args, return_hidden_states=return_hidden_states, **kwargs)
        hidden, others = args[: self.num_hidden], args[self.num_hidden :]
        batches = self._cut(hidden, others, batch_related)
        call = _Call(self, batches, kwargs, return_hidden_states)
        anchor = torch.zeros((), requires_grad=torch.is_grad_enabled())
        out = _Through.apply(call, anchor, *(t for b in batches for t in b if _is_tensor(t)))
        own = [take_tokens(t, config["pipe_comm"], 0) for t in out]
        final, seen = own[: self.num_hidden], call.record_own(own[self.num_hidden :])
        if return_hidden_states:
            columns = (torch.stack(seen[k :: self.num_hidden]) for k in range(self.num_hidden))
            return *final, *columns
        return tuple(final) if self.num_hidden > 1 else final[0]

    def _cut(
        self, hidden: tuple[Any, ...], others: tuple[Any, ...], related: Sequence[bool]
    ) -> list[list[Any]]:
        """Gather the rows of all processes of the pipeline; return them as micro-batches.

        Args:
            hidden: hidden states.
            others: further arguments of the blocks.
            related: one flag per further argument, True if it has a batch dim; see `forward`.
        """
        micros, group = config["micros"], config["pipe_comm"]
        rows = hidden[0].shape[0]
        if rows * self.stages % micros or micros % self.stages:
            raise ShapeError(
                f"num_micro_batches={micros} must be a multiple of the {self.stages} stages, and "
                f"must divide {rows * self.stages} (batch of {rows} sequences x {self.stages} "
                "stages). Change num_micro_batches or the batch size."
            )
        columns = []
        for index, value in enumerate((*hidden, *others)):
            if not _is_tensor(value):
                columns.append([value] * micros)
                continue
            position = index - len(hidden)
            is_like = value.dim() == hidden[0].dim() and value.shape[:1] == hidden[0].shape[:1]
            if position < 0 or (related[position] if related else is_like):
                columns.append(list(_gather_rows(value, group).chunk(micros)))
            else:
                own = _gather_rows(value[None], group).unbind()
                columns.append([own[number * self.stages // micros] for number in range(micros)])
        return [list(batch) for batch in zip(*columns, strict=True)]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _gather_rows(value: Tensor, group: Any) -> Tensor:
    if value.dtype == torch.bool:
        return gather_tokens(value.byte(), group, 0, summed=True).bool()
    return gather_tokens(value, group, 0, summed=True)


def _place_(block: Block, stage: int) -> None:
    """Keep a block's parameters on its stage's processes; elsewhere keep only names and shapes."""
    new: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in block.modules():
        for name, param in module._parameters.items():
            if param is None:
                continue
            if id(param) not in new:
                new[id(param)] = param, _move(param, stage)
            module._parameters[name] = new[id(param)][1]
    if stage == config["topology"].stage_id:
        block.shard()


def _move(param: nn.Parameter, stage: int) -> nn.Parameter:
    origin = origin_of(param)
    assert origin is not None
    data = all_rows(param)
    origin = replace(origin, stage=stage)
    if stage == config["topology"].stage_id:
        return make_parameter(data, origin, param.requires_grad)
    placed = nn.Parameter(torch.empty_like(data, device="meta"), param.requires_grad)
    mark_(placed, origin)
    return placed


@dataclass
class _Record:
    """Input of a block of any stage, or tensor that the block passed to `record_tensor`.

    Args:
        stage: pipeline stage of the block.
        index: index among the recorded tensors of the stage.
        name: name of the tensor; None for a block's input.
        group: group of the tensor.
        requires_grad: True if the tensor has a gradient.
        tensor: this process's rows, set after the forward pass.
    """

    stage: int
    index: int
    name: str | None
    group: str | None
    requires_grad: bool
    tensor: weakref.ref[Tensor] | None = None


@dataclass
class _Call:
    """State of one call of the block list: its micro-batches, and the data for backward."""

    owner: PipelineTransformerBlockList
    batches: list[list[Any]]
    kwargs: dict[str, Any]
    keeps_hidden: bool
    wire: Any = None
    inputs: list[list[Any]] = field(default_factory=list)
    outputs: list[tuple[Tensor, ...]] = field(default_factory=list)
    records: list[list[dict[str, Any]]] = field(default_factory=list)  # own, by micro-batch
    recorded: list[_Record] = field(default_factory=list)  # of all stages

    def run(self, trains: bool) -> list[Tensor]:
        """Run forward; return the outputs for all rows, then the recorded tensors of all blocks.

        Args:
            trains: True if a backward pass follows.
        """
        owner, stage = self.owner, self.owner.stage_id
        schedule, last = owner._schedule, owner.stages - 1
        if not trains:
            schedule = forward_only(schedule, len(self.batches))
        self.wire = StageMessages(Route(schedule), owner._link)
        for number, batch in enumerate(self.batches):
            leaves = [
                t.detach().requires_grad_(trains and t.requires_grad) if _is_tensor(t) else t
                for t in batch
            ]
            if stage:
                message = StageMessage("forward", stage - 1, number)
                leaves[: owner.num_hidden] = self.wire.receive(message)
            self.inputs.append(leaves)
            with torch.set_grad_enabled(trains):
                self._run_stage(leaves)
            if stage < last:
                self.wire.send(StageMessage("forward", stage, number), self.outputs[-1])
        outputs = self._share(last, self.outputs)
        if self.keeps_hidden or config.inspected:
            outputs += self._share_records()
        if not trains:
            self.wire.finish()
        return outputs

    def _run_stage(self, leaves: list[Any]) -> None:
        count = self.owner.num_hidden
        hidden, others = tuple(leaves[:count]), leaves[count:]
        with collect_records() as records:
            for index in self.owner.get_range_by_stage_id(self.owner.stage_id):
                if self.keeps_hidden:
                    records += [{"name": None, "group": None, "tensor": t} for t in hidden]
                out = self.owner[index](*hidden, *others, **self.kwargs)
                hidden = out if isinstance(out, tuple) else (out,)
        self.outputs.append(hidden)
        self.records.append(records)

    def _share_records(self) -> list[Tensor]:
        """Return the recorded tensors of all stages, with micro-batches concatenated."""
        kinds = [
            [(r["name"], r["group"], r["tensor"].requires_grad) for r in records]
            for records in self.records
        ]
        outputs = []
        for stage, of_stage in enumerate(allgather_objects(kinds, config["pipe_comm"])):
            if any(kind != of_stage[0] for kind in of_stage):
                raise BlockError(
                    f"the blocks of pipeline stage {stage} did not record the same tensors in all "
                    "micro-batches. Call record_tensor with the same names in every micro-batch."
                )
            for index, kind in enumerate(of_stage[0]):
                self.recorded.append(_Record(stage, index, *kind))
                outputs += self._share(stage, self._parts(self.recorded[-1]))
        return outputs

    def _parts(self, record: _Record, of_grad: bool = False) -> list[tuple[Tensor]]:
        """Return a recorded tensor, or its gradient, per micro-batch; [] on other stages."""
        if record.stage != self.owner.stage_id:
            return []
        parts = [records[record.index]["tensor"] for records in self.records]
        if of_grad:
            parts = [torch.zeros_like(t) if t.grad is None else t.grad for t in parts]
        # A tensor without dims has one row per micro-batch.
        return [(torch.atleast_1d(t),) for t in parts]

    def record_own(self, own: list[Tensor]) -> list[Tensor]:
        """Record the named tensors with `record_tensor`; return the inputs of blocks.

        Args:
            own: this process's rows of each recorded tensor.
        """
        for record, tensor in zip(self.recorded, own, strict=True):
            if record.name is not None:
                record_tensor(tensor, record.name, record.group)
                # A strong reference would be a cycle through the graph, which is never collected.
                record.tensor = weakref.ref(tensor)
        return [t for r, t in zip(self.recorded, own, strict=True) if r.name is None]

    def _set_grads(self) -> None:
        """Set `grad` of the recorded tensors to the gradients that the pipeline computed."""
        for record in self.recorded:
            if record.name is not None and record.requires_grad:
                (grad,) = self._share(record.stage, self._parts(record, of_grad=True))
                if record.tensor is not None and (tensor := record.tensor()) is not None:
                    tensor.grad = take_tokens(grad, config["pipe_comm"], 0)

    def _share(self, home: int, own: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
        """Broadcast tensors of stage `home` to all stages, and concatenate the micro-batches.

        `own` are this stage's tensors of each micro-batch; not used on other stages.
        """
        is_here, link = home == self.owner.stage_id, self.owner._link
        parts = [
            share_from(home, own[number] if is_here else None, link)
            for number in range(len(self.batches))
        ]
        return [torch.cat(column) for column in zip(*parts, strict=True)]  # type: ignore[arg-type]

    def run_back(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """Run backward; return the gradients of all inputs of all micro-batches."""
        owner, stage = self.owner, self.owner.stage_id
        last, count = owner.stages - 1, owner.num_hidden
        pieces = [grad.chunk(len(self.batches)) for grad in grads]
        result: list[Tensor | None] = []
        for number, leaves in enumerate(self.inputs):
            if stage == last:
                output_grads: Any = tuple(piece[number] for piece in pieces[:count])
            else:
                output_grads = self.wire.receive(StageMessage("backward", stage + 1, number))
            roots = list(zip(self.outputs[number], output_grads, strict=True))
            for record, piece in zip(self.recorded, pieces[count:], strict=True):
                if record.stage == stage:
                    tensor = self.records[number][record.index]["tensor"]
                    roots.append((tensor, piece[number].view_as(tensor)))
            pairs = [(t, g) for t, g in roots if g is not None and t.requires_grad]
            if pairs:
                torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
            input_grads = tuple(t.grad for t in leaves[:count])
            if stage:
                self.wire.send(StageMessage("backward", stage, number), input_grads)
            for position, (value, leaf) in enumerate(
                zip(self.batches[number], leaves, strict=True)
            ):
                if _is_tensor(value):
                    has_own = stage == 0 or position >= count
                    grad = leaf.grad if has_own and _is_tensor(leaf) else None
                    # Zeros instead of None, since all processes take part in the reduction.
                    result.append(torch.zeros_like(value) if grad is None else grad)
        self.wire.finish()
        self._set_grads()
        return result


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.wants = call, [t.requires_grad for t in tensors]
        outputs = call.run(trains=anchor.requires_grad)
        kinds = [t for t in outputs if not t.is_floating_point()]
        records = zip(call.recorded, outputs[call.owner.num_hidden :], strict=True)
        kinds += [tensor for record, tensor in records if not record.requires_grad]
        ctx.mark_non_differentiable(*kinds)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        with torch.enable_grad():
            input_grads = ctx.call.run_back(grads)
        pairs = zip(input_grads, ctx.wants, strict=True)
        return None, None, *(grad if needs_grad else None for grad, needs_grad in pairs)
