"""The one function that lays a model out, in the one order.

check everything -> recompute -> compile per block -> shard per unit. Each step is a function in its
own file and does nothing at size 1, so one process takes the same way as many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from bmforge.device import has_fast_half, parse_dtype
from bmforge.errors import BmforgeError, ConfigError
from bmforge.logging import get_logger
from bmforge.parallel.distributed import World, init_distributed
from bmforge.parallel.layout import Layout, build_mesh
from bmforge.parallel.recompute import apply_recompute_
from bmforge.parallel.zero import apply_zero_
from bmforge.surgery import find_modules, find_repeated_blocks

__all__ = ["Rules", "parallelize"]


class Rules(Protocol):
    """Name globs of what is cut where; `models.LayoutRules` is one."""

    @property
    def zero_units(self) -> tuple[str, ...]:
        """Modules whose parameters are gathered together."""

    @property
    def recompute_units(self) -> tuple[str, ...]:
        """Modules whose activations may be recomputed."""


def parallelize(
    model: nn.Module,
    layout: Layout | None = None,
    rules: Rules | None = None,
    *,
    mesh: DeviceMesh | None = None,
    precision: str = "fp32",
    recompute: bool = False,
    compile: bool = False,
    prefetch: int = 1,
) -> nn.Module:
    """Lay a model out over the processes, in place, and return it.

    Works on any model: with `rules` (or the model's own `layout_rules()`) the globs say what a unit
    is; without, the repeated blocks are found. The model may be on meta and is then initialised or
    loaded afterwards.

    Args:
        model: any nn.Module; a bmforge model brings its rules.
        layout: which axes; None takes ZeRO-3 over all processes.
        rules: name globs; None asks the model, then looks for repeated blocks.
        mesh: the layout's mesh when it has been built already.
        precision: fp32, or bf16 / fp16 compute with fp32 parameters and fp32 gradient reduction.
        recompute: recompute blocks in backward.
        compile: compile every block with `torch.compile`.
        prefetch: how many units ahead parameters are gathered.

    Raises:
        ConfigError: everything that does not fit, in one message, the same on every process, before
            the first collective.
    """
    layout = layout or Layout()
    world = init_distributed()
    plan = _check(model, layout, rules, world, precision, recompute or compile, prefetch)
    mesh = mesh or build_mesh(layout, world.device)
    if recompute:
        apply_recompute_(plan.blocks)
    if compile:
        for block in plan.blocks:
            block.compile()
    if plan.is_sharded:
        apply_zero_(model, plan.units, mesh, zero=layout.zero, dtype=plan.dtype, prefetch=prefetch)
    return model


@dataclass(frozen=True)
class _Plan:
    """What is to be done, once everything has been checked."""

    units: list[nn.Module]
    blocks: list[nn.Module]
    dtype: torch.dtype | None
    is_sharded: bool


def _check(
    model: nn.Module,
    layout: Layout,
    rules: Rules | None,
    world: World,
    precision: str,
    need_blocks: bool,
    prefetch: int,
) -> _Plan:
    """Find the units, or raise everything that does not fit in one `ConfigError`."""
    problems = layout.problems(world.size)
    units = _collect(model, rules, "zero_units", problems)
    blocks = _collect(model, rules, "recompute_units", problems) if need_blocks else {}
    dtype = _half_dtype(precision, problems)
    if prefetch < 0:
        problems.append(f"prefetch={prefetch} must not be negative")
    if need_blocks and not blocks and not problems:
        problems.append("recompute and compile work on repeated blocks, and the model has none")
    is_sharded = world.size > 1 or dtype is not None
    if is_sharded:
        problems += _split_ties(model, units)
    if problems:
        raise ConfigError(
            f"cannot lay out {type(model).__name__} as {layout}: " + "; ".join(problems) + "."
        )
    if dtype is not None and not has_fast_half(world.device, dtype):
        get_logger().warning(
            "precision=%s: this CPU has no such products and emulates them, many times slower than "
            "fp32",
            precision,
        )
    return _Plan(list(units.values()), list(blocks.values()), dtype, is_sharded)


def _collect(
    model: nn.Module, rules: Rules | None, which: str, problems: list[str]
) -> dict[str, nn.Module]:
    """Return name -> module of the units; what goes wrong is added to `problems`."""
    own: Any = getattr(model, "layout_rules", None)
    rules = rules or (own() if callable(own) else None)
    if rules is None:
        return find_repeated_blocks(model)
    try:
        return find_modules(model, globs=getattr(rules, which))
    except BmforgeError as error:
        problems.append(f"{which}: {error}")
        return {}


def _half_dtype(precision: str, problems: list[str]) -> torch.dtype | None:
    try:
        dtype = parse_dtype(precision)
    except ConfigError as error:
        problems.append(str(error))
        return None
    return None if dtype == torch.float32 else dtype


def _split_ties(model: nn.Module, units: dict[str, nn.Module]) -> list[str]:
    """Return a problem for every parameter that two units, or a unit and the root, share."""
    owners: dict[int, set[str]] = {}
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        unit = next((u for u in units if name.startswith(f"{u}.")), "the root")
        owners.setdefault(id(parameter), set()).add(unit)
        names.setdefault(id(parameter), name)
    return [
        f"parameter {names[key]} is shared by {', '.join(sorted(found))}; "
        "leave one of them out of zero_units so that both lie in the root"
        for key, found in owners.items()
        if len(found) > 1
    ]
