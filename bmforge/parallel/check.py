"""Validation of a model and layout before `parallelize` changes anything.

All problems are reported in one error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch
from torch import nn

from bmforge.device import has_fast_half, is_host, parse_dtype
from bmforge.errors import BmforgeError, ConfigError
from bmforge.logging import get_logger
from bmforge.parallel.context.divide import context_problems
from bmforge.parallel.distributed import World
from bmforge.parallel.expert import expert_problems
from bmforge.parallel.layout import Layout
from bmforge.parallel.master_weights import master_weight_problems
from bmforge.parallel.parameters import parameter_problems
from bmforge.parallel.pipeline.schedules import schedule_problems, smallest_schedule
from bmforge.parallel.pipeline.stages import PipelineRules, StageAssignment, plan_cutting
from bmforge.parallel.tensor.sharding import ShardingRule, match_sharding_rules, tensor_problems
from bmforge.records import Unit, UnitRules, find_units

__all__ = ["Division", "Rules", "find_division", "plan_pipeline", "step_problems"]


class Rules(PipelineRules, UnitRules, Protocol):
    """Interface of `models.LayoutRules`, the sharding rules of a model.

    They are name globs of the parameters to shard and of the first and last pipeline modules.
    """

    @property
    def tensor_parallel(self) -> tuple[ShardingRule, ...]:
        """Sharding style of each module to shard by tensor parallelism."""


@dataclass(frozen=True)
class Division:
    """Validated plan of `parallelize`: sharding units and styles, pipeline stages, precision."""

    units: tuple[Unit, ...]
    styles: dict[str, ShardingRule]
    stacks: list[nn.Module]
    cutting: StageAssignment | None
    stage_ranks: tuple[int, ...]
    dtype: torch.dtype | None
    is_sharded: bool

    @property
    def gathered(self) -> list[nn.Module]:
        """Modules whose parameters are all-gathered as one unit."""
        return [unit.module for unit in self.units if unit.is_gathered]

    @property
    def blocks(self) -> list[nn.Module]:
        """Blocks: the modules to which recomputation, compilation and activation offload apply."""
        return [unit.module for unit in self.units if unit.is_block]

    def stages_of(self, rank: int) -> list[int]:
        """Return the indices of the stages on a pipeline rank."""
        return [stage for stage, owner in enumerate(self.stage_ranks) if owner == rank]

    def without_dropped(self, model: nn.Module) -> Self:
        """Return a copy of the plan without the modules that `model` no longer has on this rank."""
        left = {id(module) for module in model.modules()}
        return replace(
            self,
            units=tuple(unit for unit in self.units if id(unit.module) in left),
            stacks=[stack for stack in self.stacks if any(True for _ in stack.children())],
        )


def find_division(
    model: nn.Module,
    layout: Layout,
    rules: Rules | None,
    world: World,
    compute: tuple[str, bool],
    need_blocks: bool,
    prefetch: int,
) -> Division:
    """Build the plan of `parallelize`, or raise one `ConfigError` that lists all problems.

    Args:
        compute: pair (compute precision of the blocks, True to upcast trained 16-bit parameters
            to fp32 master weights).
        need_blocks: True if an option such as recomputation needs repeated blocks.
    """
    precision, master_weights = compute
    problems = layout.problems(world.size)
    rules = _rules_of(model, rules)
    units = _find_units(model, rules, problems)
    dtype = _half_dtype(precision, problems)
    if prefetch < 0:
        problems.append(f"prefetch={prefetch} must be at least 0")
    if need_blocks and not problems and not any(unit.is_block for unit in units):
        problems.append("recompute and compile need repeated blocks, but the model has none")
    # FSDP2 also converts parameters to the compute dtype, so 16-bit precision needs it on one
    # process.
    is_sharded = world.size > layout.tp * layout.pp or dtype is not None
    if is_sharded:
        problems += [*_split_ties(model, units), *parameter_problems(model, units, master_weights)]
    if master_weights:
        problems += master_weight_problems(model, precision)
    styles, stacks = _check_blocks(model, layout, rules, problems)
    cutting, stage_ranks = plan_pipeline(model, layout, rules, problems)
    problems += expert_problems(model, layout.ep)
    if problems:
        raise ConfigError(
            f"{layout} cannot be used with this {type(model).__name__}: {'; '.join(problems)}."
        )
    if dtype is not None and not has_fast_half(world.device, dtype):
        name, hint = ("CPU", "") if is_host(world.device) else ("GPU", ". Use precision=fp16.")
        get_logger().warning(
            (
                "this %s has no hardware support for precision=%s and emulates it, many times "
                "slower than fp32%s"
            ),
            *(name, precision, hint),
        )
    units = tuple(replace(unit, stage=_stage_of(unit.name, cutting)) for unit in units)
    return Division(units, styles, stacks, cutting, stage_ranks, dtype, is_sharded)


def _check_blocks(
    model: nn.Module, layout: Layout, rules: Rules | None, problems: list[str]
) -> tuple[dict[str, ShardingRule], list[nn.Module]]:
    """Return the tensor-parallel styles and the stacks of blocks; append errors to `problems`."""
    sharding_rules: tuple[ShardingRule, ...] = ()
    stacks: list[nn.Module] = []
    if rules is not None and (layout.tp > 1 or layout.cp > 1):
        sharding_rules = rules.tensor_parallel
        stacks = [model.get_submodule(name) for name in rules.stacks]
    refusal = getattr(rules, "tensor_refusal", "") if layout.tp > 1 else ""
    if refusal:
        wrong = [f"tp={layout.tp}: {type(model).__name__} cannot be sharded: {refusal}"]
    else:
        wrong = tensor_problems(model, sharding_rules, layout.tp)
    problems += wrong
    problems += context_problems(model, stacks, layout.cp, layout.cp_method, layout.tp)
    return {} if wrong or layout.tp == 1 else match_sharding_rules(model, sharding_rules), stacks


def plan_pipeline(
    model: nn.Module, layout: Layout, rules: Rules | None, problems: list[str]
) -> tuple[StageAssignment | None, tuple[int, ...]]:
    """Return the assignment of modules to stages, and the pipeline rank of each stage."""
    if layout.pp == 1:
        return None, ()
    refusal = getattr(rules, "pipeline_refusal", "")
    if refusal:
        problems.append(
            f"pp={layout.pp}: {type(model).__name__} cannot be split into stages: {refusal}"
        )
        return None, ()
    if rules is None or not rules.stacks:
        problems.append(
            f"pp={layout.pp}: {type(model).__name__} has no layout rules that define "
            "pipeline stages"
        )
        return None, ()
    if not hasattr(model, "stage_inputs"):
        problems.append(
            f"pp={layout.pp}: {type(model).__name__} has no attribute `stage_inputs`, which "
            "holds a stage's input from the previous stage; add `stage_inputs = ()` to the class"
        )
    name, per_rank = layout.pp_schedule, layout.pp_stages_per_rank
    schedule = smallest_schedule(name, layout.pp, per_rank)
    if schedule is None:
        # The batch is not known here. Four micro-batches per rank are a multiple of the ranks, so
        # only problems of other options are listed.
        problems += schedule_problems(name, layout.pp, 4 * layout.pp, per_rank)
        return None, ()
    stages = schedule.num_stages
    blocks = sum(len(list(model.get_submodule(stack).children())) for stack in rules.stacks)
    sizes = layout.pp_cut
    if stages > blocks:
        problems.append(
            f"pp={layout.pp} needs {stages} stages, but the model has only {blocks} blocks"
        )
    elif sizes and (len(sizes) != stages or sum(sizes) != blocks or min(sizes) < 1):
        problems.append(
            f"pp_cut={sizes} must contain {stages} positive numbers, one per stage, with "
            f"the sum {blocks}"
        )
    else:
        return plan_cutting(model, rules, stages, sizes, layout.pp_balance), schedule.stage_ranks
    return None, ()


def step_problems(layout: Layout, num_micro_batches: int) -> list[str]:
    """Return the reasons why the pipeline schedule cannot run this number of micro-batches.

    Problems that do not depend on the number are reported by `find_division`.
    """
    name, size, per_rank = layout.pp_schedule, layout.pp, layout.pp_stages_per_rank
    if size == 1 or smallest_schedule(name, size, per_rank) is None:
        return []
    return schedule_problems(name, size, num_micro_batches, per_rank)


def _rules_of(model: nn.Module, rules: Rules | None) -> Rules | None:
    own: Any = getattr(model, "layout_rules", None)
    return rules or (own() if callable(own) else None)


def _find_units(model: nn.Module, rules: Rules | None, problems: list[str]) -> tuple[Unit, ...]:
    """Return the modules to shard as units; append any error to `problems`."""
    try:
        return find_units(model, rules)
    except BmforgeError as error:
        problems.append(f"zero_units and recompute_units: {error}")
        return ()


def _stage_of(name: str, cutting: StageAssignment | None) -> int | None:
    """Return the first pipeline stage that contains a module."""
    homes = {} if cutting is None else cutting.homes
    first_stages = (min(on) for home, on in homes.items() if f"{name}.".startswith(f"{home}."))
    return next(first_stages, None)


def _half_dtype(precision: str, problems: list[str]) -> torch.dtype | None:
    try:
        dtype = parse_dtype(precision)
    except ConfigError as error:
        problems.append(str(error))
        return None
    return None if dtype == torch.float32 else dtype


def _split_ties(model: nn.Module, units: Sequence[Unit]) -> list[str]:
    """Return an error message for each tied parameter whose modules are in different units."""
    gathered = {unit.name for unit in units if unit.is_gathered}
    owners: dict[int, set[str]] = {}
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        around = (name[:end] for end, letter in enumerate(name) if letter == ".")
        unit = next((u for u in around if u in gathered), "the root")
        owners.setdefault(id(parameter), set()).add(unit)
        names.setdefault(id(parameter), name)
    return [
        (
            f"parameter {names[key]} is shared by the units {', '.join(sorted(sharing))}; leave "
            "these units out of zero_units, so that the root unit contains the parameter"
        )
        for key, sharing in owners.items()
        if len(sharing) > 1
    ]
