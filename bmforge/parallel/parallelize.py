"""`parallelize`: applies a parallel layout to a model, in a fixed order.

The order is: validation; tensor, sequence, context and expert parallelism; recomputation;
compilation of each block; ZeRO sharding of each unit. Each step is a function in its own file,
which does nothing at size 1, so one process and many processes run the same code.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from bmforge.errors import ConfigError
from bmforge.memory.activations import apply_activation_offload_
from bmforge.memory.copies import make_copy_engine
from bmforge.memory.recompute import apply_recompute_, disable_caches_
from bmforge.parallel.check import Division, Rules, find_division
from bmforge.parallel.context.divide import apply_context_parallel_
from bmforge.parallel.distributed import init_distributed
from bmforge.parallel.expert import (
    apply_expert_parallel_,
    build_expert_mesh,
    share_statistics_,
)
from bmforge.parallel.initial_sync import sync_module_states_
from bmforge.parallel.layout import Layout, build_mesh
from bmforge.parallel.master_weights import upcast_trained_
from bmforge.parallel.parameters import make_contiguous_
from bmforge.parallel.pipeline.model import PipelinedModel
from bmforge.parallel.pipeline.stages import StageAssignment, drop_the_rest_
from bmforge.parallel.tensor.sharding import apply_tensor_parallel_
from bmforge.parallel.zero import apply_zero_, refuse_calls_outside_
from bmforge.records import parallel_record_of
from bmforge.surgery import copy_to_meta

__all__ = ["Rules", "parallelize"]


def parallelize(
    model: nn.Module,
    layout: Layout | None = None,
    rules: Rules | None = None,
    *,
    mesh: DeviceMesh | None = None,
    precision: str = "fp32",
    master_weights: bool = True,
    recompute: bool = False,
    compile: bool = False,
    prefetch: int = 1,
    offload_activations: bool = False,
) -> nn.Module:
    """Apply a parallel layout to a model, in place, and return the model.

    Works on any model: `rules` (or the model's own `layout_rules()`) select the sharding units by
    name globs; without rules, repeated blocks become the units. A model on the meta device is
    initialized or loaded afterwards. If existing values differ between processes, those of rank 0
    are used; they are copied before any sharding, because afterwards no process has all of them.

    Args:
        model: any nn.Module; a bmforge model has its own rules.
        layout: degrees of parallelism; None means ZeRO-3 over all processes.
        rules: name globs; None means the model's own rules or, without rules, the repeated blocks.
        mesh: mesh of the layout, if it has already been built.
        precision: fp32, or bf16 / fp16 compute with fp32 parameters and fp32 gradient reduction.
        master_weights: upcast trained 16-bit parameters to fp32, so that no small update is lost
            (default: on). If off, these parameters and their optimizer states stay in 16 bits.
        recompute: recompute blocks in backward.
        compile: compile every block with `torch.compile`.
        prefetch: number of units whose parameters are gathered ahead.
        offload_activations: offload the saved activations of blocks to the host until backward;
            with `recompute` these are the block inputs.

    Raises:
        ConfigError: the layout does not fit the model or the processes. One message lists all
            problems, the same on every process, before the first collective.
    """
    layout = layout or Layout()
    _check_wrapping(offload_activations, compile)
    world = init_distributed()
    need_blocks = recompute or compile or offload_activations
    compute = (precision, master_weights)
    division = find_division(model, layout, rules, world, compute, need_blocks, prefetch)
    if master_weights:
        upcast_trained_(model, precision)
    mesh = build_mesh(layout, world.device) if mesh is None else _check_mesh(mesh, layout)
    sync_module_states_(model, mesh)
    if division.is_sharded:
        make_contiguous_(model)
    record = parallel_record_of(model)
    record.mesh, record.layout, record.prefetch = mesh, layout, prefetch
    shared: dict[str, list[int]] = {}
    if division.cutting is not None:
        record.whole = copy_to_meta(model)
        shared = drop_the_rest_(
            model, division.cutting, division.stages_of(mesh.get_local_rank("pp"))
        )
        division = division.without_dropped(model)
    _divide_blocks_(model, layout, division, mesh)
    share_statistics_(model, mesh)
    expert_mesh = build_expert_mesh(mesh, layout.ep) if layout.ep > 1 else None
    experts = [] if expert_mesh is None else apply_expert_parallel_(model, expert_mesh)
    if recompute:
        disable_caches_(model)
    _wrap_blocks_(division.blocks, world.device, recompute, offload_activations, compile)
    if division.is_sharded:
        apply_zero_(
            model,
            division.gathered,
            mesh,
            zero=layout.zero,
            dtype=division.dtype,
            prefetch=prefetch,
            experts=experts,
            expert_mesh=expert_mesh,
        )
        if division.styles == {} and layout.zero == 3 and not compile:
            refuse_calls_outside_({u.name: u.module for u in division.units if u.is_gathered})
    if division.cutting is not None:
        splits = not (division.is_sharded or recompute or compile or offload_activations)
        record.pipeline = _build_pipeline(model, layout, division.cutting, mesh, shared, splits)
    record.units, record.precision = division.units, precision
    record.master_weights = master_weights
    return model


def _build_pipeline(
    model: nn.Module,
    layout: Layout,
    cutting: StageAssignment,
    mesh: DeviceMesh,
    shared: dict[str, list[int]],
    splits: bool,
) -> PipelinedModel:
    """Build the `PipelinedModel`; `shared` maps parameter names to the stages that have them."""
    return PipelinedModel(
        model,
        cutting,
        mesh,
        (layout.pp_schedule, layout.pp_stages_per_rank),
        shared,
        slices=layout.tp > 1,
        frees=layout.zero == 3,
        splits=splits,
    )


def _check_mesh(mesh: DeviceMesh, layout: Layout) -> DeviceMesh:
    """Return the mesh if its axes match the layout; raise ConfigError otherwise."""
    axes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    needed = layout.axis_lengths(dist.get_world_size())
    if axes != needed:
        raise ConfigError(
            f"mesh has the axes {axes}, but {layout} needs {needed}. Leave mesh out, or create "
            "it with build_mesh(layout)."
        )
    return mesh


def _divide_blocks_(model: nn.Module, layout: Layout, division: Division, mesh: DeviceMesh) -> None:
    """Apply tensor, sequence and context parallelism to the blocks."""
    if layout.tp > 1:
        sequence = layout.sequence_parallel
        apply_tensor_parallel_(
            model, division.styles, division.stacks, mesh["tp"], sequence=sequence
        )
    if layout.cp > 1:
        unit = layout.tp if layout.sequence_parallel else 1
        apply_context_parallel_(
            model, division.stacks, mesh["cp"], method=layout.cp_method, unit=unit
        )


def _wrap_blocks_(
    blocks: Sequence[nn.Module],
    device: torch.device,
    recompute: bool,
    offload_activations: bool,
    compile: bool,
) -> None:
    """Apply recomputation, activation offload and compilation to the blocks."""
    if recompute:
        apply_recompute_(blocks)
    if offload_activations:
        engine = make_copy_engine(device, "bmforge-activations")
        apply_activation_offload_(blocks, engine)
    if compile:
        for block in blocks:
            block.compile()


def _check_wrapping(offload_activations: bool, compile: bool) -> None:
    if compile and offload_activations:
        raise ConfigError(
            "compile and offload_activations cannot be used together, because a compiled block "
            "chooses itself which activations it saves. Leave one of them out."
        )
