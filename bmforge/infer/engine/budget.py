"""One budget for the whole model: what stays, what comes and goes, and what a step needs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from torch import nn

from bmforge.device import device_size_bytes, is_host, memory_room_bytes
from bmforge.errors import ConfigError
from bmforge.host_memory import available_host_bytes, host_memory_bytes
from bmforge.infer.engine.request import RequestsConfig
from bmforge.infer.engine.runtime import runtime_bytes
from bmforge.infer.engine.workspace import Workspace, find_workspace
from bmforge.memory.experts_away import LEAST_EXPERTS, expert_bytes, find_experts
from bmforge.memory.packed import packed_bytes
from bmforge.memory.resident import NUM_SLOTS, choose_resident, smallest_room
from bmforge.memory.spill import format_bytes
from bmforge.memory.streaming import Stays
from bmforge.records import units_of
from bmforge.surgery import persistent_tensors, shared_tensors
from bmforge.tune.delta.held import delta_tensors

__all__ = [
    "EngineConfig",
    "MemoryPlan",
    "check_budgets",
    "find_staying",
    "plan_memory",
    "plan_weights",
]

# The allocator keeps some of what is freed.
_SLACK = 1.15
_LONGEST = 1024


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine is planned for.

    Args:
        max_rows: rows at once: prompts, times beams or sequences of each.
        max_tokens: of a row, new ones included; of an encoder-decoder, of a source and of a target
            each. None takes 1,024, or what the model has positions for where that is less.
        spill_directory: where weights of a model that is in memory already go; None takes the
            system's temporary directory.
        stream_experts: experts of a directory are read when the router chooses them, and those that
            were used last stay as far as the budget goes; everything else stays. No gradients.
        beside_bytes: of the budget that are left free for what is put beside the model once it is
            open, such as deltas.
        requests: those that are submitted, and run beside each other.
    """

    max_rows: int = 1
    max_tokens: int | None = None
    spill_directory: Path | None = None
    stream_experts: bool = False
    beside_bytes: int = 0
    requests: RequestsConfig = field(default_factory=RequestsConfig)

    def __post_init__(self) -> None:
        """Raise `ConfigError` for numbers out of range."""
        if self.max_rows < 1 or (self.max_tokens is not None and self.max_tokens < 2):
            raise ConfigError(
                f"EngineConfig: max_rows={self.max_rows} must be at least 1, and max_tokens="
                f"{self.max_tokens} at least 2, or None."
            )
        if self.beside_bytes < 0:
            raise ConfigError(f"EngineConfig: beside_bytes={self.beside_bytes} is below 0.")

    def tokens_of(self, model: nn.Module) -> int:
        """Return the longest row for a model."""
        limit = getattr(model, "position_limit", None)
        tokens = self.max_tokens or min(_LONGEST, limit or _LONGEST)
        if limit is not None and tokens > limit:
            raise ConfigError(
                f"EngineConfig: max_tokens={tokens} is more than the model's {limit} positions."
            )
        return tokens


@dataclass(frozen=True)
class MemoryPlan:
    """Where everything goes. All figures in bytes.

    Args:
        budget_bytes: of the device.
        smallest_bytes: the least budget that works.
        weights_bytes: of what stays: all that is in no block, and resident blocks.
        slots_bytes: through which the other blocks come and go.
        cache_bytes: keys and values of the longest rows.
        step_bytes: what the largest step needs besides.
        runtime_bytes: what the process needs besides tensors.
        resident: names of blocks that stay.
        on_host: names of blocks that wait in host memory.
        on_disk: names of blocks that are read whenever they run.
        moved_bytes: of all blocks that come and go.
        experts_bytes: for experts that are here, where they are read when they are chosen.
        beside_bytes: for what is put beside the model once it is open.
    """

    budget_bytes: int
    smallest_bytes: int
    weights_bytes: int
    slots_bytes: int
    cache_bytes: int
    step_bytes: int
    runtime_bytes: int
    resident: tuple[str, ...]
    on_host: tuple[str, ...]
    on_disk: tuple[str, ...]
    moved_bytes: int
    experts_bytes: int = 0
    beside_bytes: int = 0

    @property
    def used_bytes(self) -> int:
        """What of the budget is taken."""
        return sum(size for _, size in self.parts())

    def parts(self) -> list[tuple[str, int]]:
        """Return what the budget goes to, with its bytes."""
        return [
            ("weights that stay", self.weights_bytes),
            ("slots for blocks that move", self.slots_bytes),
            *([("experts that are here", self.experts_bytes)] if self.experts_bytes else []),
            ("keys and values", self.cache_bytes),
            ("largest step", self.step_bytes),
            ("runtime", self.runtime_bytes),
            *([("beside the model", self.beside_bytes)] if self.beside_bytes else []),
        ]

    def line(self) -> str:
        """Return the plan in one line."""
        blocks = len(self.resident) + len(self.on_host) + len(self.on_disk)
        moved = format_bytes(self.moved_bytes)
        return (
            f"{len(self.resident)} of {blocks} blocks stay, {len(self.on_host)} wait on the host, "
            f"{len(self.on_disk)} on disk ({moved} a pass); {format_bytes(self.used_bytes)} of "
            f"{format_bytes(self.budget_bytes)} are planned for"
        )

    def table(self) -> Table:
        """Return the plan for a terminal: a line and a bar for every part."""
        table = Table(title=f"memory: {format_bytes(self.budget_bytes)}", title_justify="left")
        table.add_column("part")
        table.add_column("size", justify="right")
        table.add_column("share of the budget", min_width=24)
        begin = 0
        for name, size in [*self.parts(), ("free", self.budget_bytes - self.used_bytes)]:
            bar = Bar(self.budget_bytes, begin, begin + size, width=24)
            table.add_row(name, format_bytes(size), bar)
            begin += size
        table.caption = self.line()
        return table

    def __str__(self) -> str:
        """The table as text."""
        console = Console(width=80, no_color=True, highlight=False)
        with console.capture() as captured:
            console.print(self.table())
        return captured.get().rstrip()


def find_staying(model: nn.Module) -> Stays:
    """Return what tells of a block that comes and goes which of its tensors stay themselves.

    Norms, biases and deltas: they are small, and who trains them trains them where they are.
    """
    own = delta_tensors(model)
    return lambda name, tensor: tensor.dim() < 2 or name in own


def plan_memory(
    model: nn.Module,
    device: torch.device,
    config: EngineConfig,
    device_budget_bytes: int | None,
    host_budget_bytes: int | None,
) -> MemoryPlan:
    """Return where a model's tensors go.

    Args:
        model: on meta, or as it is.
        device: where it computes.
        config: what is asked of it.
        device_budget_bytes: None takes what is free.
        host_budget_bytes: likewise of the host, where that is another memory.

    Raises:
        ConfigError: a budget is too small, which says the smallest that works; or too large.
    """
    budget = check_budgets(device, device_budget_bytes, host_budget_bytes)
    blocks = {unit.name: unit.module for unit in units_of(model) if unit.is_block}
    tokens = config.tokens_of(model)
    work = find_workspace(model, config.max_rows, tokens)
    work = Workspace(work.cache_bytes, int(_SLACK * work.step_bytes))
    runtime = runtime_bytes(model, work.cache_bytes + work.step_bytes, device)
    beside, room = config.beside_bytes, budget - config.beside_bytes
    if config.stream_experts:
        found = _plan_experts(model, blocks, room, work, runtime)
    else:
        found = _divide(model, blocks, device, room, host_budget_bytes, work, runtime)
    plan, smallest, fixed = found
    if plan is None:
        raise ConfigError(_too_small(budget, smallest + beside, fixed, work, tokens))
    least = plan.smallest_bytes + beside
    return replace(plan, budget_bytes=budget, smallest_bytes=least, beside_bytes=beside)


def plan_weights(
    model: nn.Module,
    device: torch.device,
    limit_bytes: int,
    blocks: Mapping[str, nn.Module],
    option: str = "memory_limit",
) -> MemoryPlan:
    """Return where a model's tensors go by a limit on weights and slots alone.

    Args:
        model: as it is.
        device: where it computes.
        limit_bytes: of all weights and buffers on the device, and of slots.
        blocks: name -> module of what may come and go, in the order in which it runs.
        option: what a person calls the limit.

    Raises:
        ConfigError: it is too small, with the smallest that works.
    """
    nothing = Workspace(0, 0)
    plan, smallest, fixed = _divide(model, blocks, device, limit_bytes, None, nothing, 0)
    if plan is None:
        raise ConfigError(
            f"{option}={limit_bytes} ({format_bytes(limit_bytes)}) is too small: {smallest} "
            f"({format_bytes(smallest)}) is the smallest that works. {format_bytes(fixed)} of it "
            "are weights and buffers outside of the blocks."
        )
    return plan


def _plan_experts(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    budget: int,
    work: Workspace,
    runtime: int,
) -> tuple[MemoryPlan | None, int, int]:
    """Return the same as `_divide` where experts come when they are chosen and all else stays.

    Raises:
        ConfigError: the model has no experts.
    """
    layers = find_experts(model)
    if not layers:
        raise ConfigError(
            f"EngineConfig(stream_experts=True): a {type(model).__name__} has no layers of experts."
        )
    away = {id(t) for _, module in layers for t in module.parameters()}
    everything = {id(t): t for t in (*model.parameters(), *model.buffers())}
    fixed = sum(packed_bytes(t) for key, t in everything.items() if key not in away)
    one = max(expert_bytes(module) for _, module in layers)
    count = sum(next(module.parameters()).shape[0] for _, module in layers)
    rest = fixed + work.cache_bytes + work.step_bytes + runtime
    room = min(count, (budget - rest) // one)
    smallest = rest + LEAST_EXPERTS * one
    if room < LEAST_EXPERTS:
        return None, smallest, fixed
    plan = MemoryPlan(
        budget, smallest, fixed, 0, work.cache_bytes, work.step_bytes, runtime, tuple(blocks), (),
        (), 0, room * one,
    )  # fmt: skip
    return plan, smallest, fixed


def _divide(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    device: torch.device,
    budget: int,
    host_budget_bytes: int | None,
    work: Workspace,
    runtime: int,
) -> tuple[MemoryPlan | None, int, int]:
    """Return the plan, the smallest budget that has one, and the bytes outside of blocks."""
    stacks = _find_stacks(model, blocks)
    sizes = [[size for _, size in stack] for stack in stacks]
    everything = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
    fixed = sum(packed_bytes(t) for t in everything) - sum(map(sum, sizes))
    rest = fixed + work.cache_bytes + work.step_bytes + runtime
    smallest = rest + smallest_room(sizes)
    kept = choose_resident(sizes, budget - rest)
    if kept is None:
        return None, smallest, fixed
    resident = {stack[i][0] for stack, ids in zip(stacks, kept, strict=True) for i in ids}
    moved = [one for stack in stacks for one in stack if one[0] not in resident]
    on_host = _fill_host(moved, device, host_budget_bytes)
    moved_bytes = sum(size for _, size in moved)
    plan = MemoryPlan(
        budget,
        smallest,
        fixed + sum(map(sum, sizes)) - moved_bytes,
        min(NUM_SLOTS, len(moved)) * max((size for _, size in moved), default=0),
        work.cache_bytes,
        work.step_bytes,
        runtime,
        tuple(name for name in blocks if name in resident),
        tuple(name for name, _ in moved if name in on_host),
        tuple(name for name, _ in moved if name not in on_host),
        moved_bytes,
    )
    return plan, smallest, fixed


def _too_small(budget: int, smallest: int, fixed: int, work: Workspace, tokens: int) -> str:
    return (
        f"device_budget_bytes={budget} ({format_bytes(budget)}) is too small: {smallest} "
        f"({format_bytes(smallest)}) is the smallest that works. {format_bytes(fixed)} of it are "
        f"weights outside of the blocks, {format_bytes(work.cache_bytes + work.step_bytes)} what "
        f"a step of {tokens} tokens needs. Give more, or plan for less: EngineConfig(max_tokens=)."
    )


def check_budgets(
    device: torch.device, device_budget_bytes: int | None, host_budget_bytes: int | None
) -> int:
    """Return the device's budget: the given one, or what is free.

    Raises:
        ConfigError: a budget is not above 0, more than the machine has, or of a host that is the
            device.
    """
    if host_budget_bytes is not None and is_host(device):
        raise ConfigError(
            f"host_budget_bytes={host_budget_bytes} has no meaning on a CPU, where the device is "
            "the host: device_budget_bytes is the budget of all."
        )
    if device_budget_bytes is None:
        free = available_host_bytes() if is_host(device) else None
        return memory_room_bytes(device) if free is None else min(free, memory_room_bytes(device))
    given = {"device_budget_bytes": (device_budget_bytes, device_size_bytes(device))}
    if host_budget_bytes is not None:
        given["host_budget_bytes"] = host_budget_bytes, host_memory_bytes()
    for name, (size, limit) in given.items():
        if size < 1:
            raise ConfigError(f"{name}={size} must be above 0, or None for what is free.")
        if size > limit:
            raise ConfigError(
                f"{name}={size} ({format_bytes(size)}) is more than the machine has "
                f"({format_bytes(limit)}). Give less, or None for what is free."
            )
    return device_budget_bytes


def _find_stacks(model: nn.Module, blocks: Mapping[str, nn.Module]) -> list[list[tuple[str, int]]]:
    """Return name and moving bytes of every block, by stack; the last stack, which writes, first.

    Of an encoder-decoder the decoder's blocks run for every token, so they leave last.
    """
    shared, stays = shared_tensors(model), find_staying(model)
    stacks: dict[str, list[tuple[str, int]]] = {}
    for name, module in blocks.items():
        size = sum(
            packed_bytes(tensor)
            for own, tensor in persistent_tensors(module).items()
            if id(tensor) not in shared and not stays(f"{name}.{own}", tensor)
        )
        stacks.setdefault(name.rpartition(".")[0], []).append((name, size))
    return list(reversed(stacks.values()))


def _fill_host(
    moved: Sequence[tuple[str, int]], device: torch.device, budget: int | None
) -> Collection[str]:
    """Return the blocks that wait in host memory: the first that fit, none on a CPU."""
    if is_host(device):
        return ()
    room = budget if budget is not None else (available_host_bytes() or 0) // 2
    found = []
    for name, size in moved:
        if size <= room:
            room -= size
            found.append(name)
    return found
