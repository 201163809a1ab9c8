"""Memory planning: which blocks are resident or streamed, and how much memory a step needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from bmforge.device import device_size_bytes, is_host, memory_room_bytes
from bmforge.errors import ConfigError
from bmforge.host_memory import available_host_bytes, host_memory_bytes
from bmforge.infer.engine.divide import BlockAssignment, DeviceMemory, divide_blocks
from bmforge.infer.engine.memory_plan import MemoryPlan
from bmforge.infer.engine.packed_step import can_pack
from bmforge.infer.engine.request import RequestsConfig
from bmforge.infer.engine.runtime import runtime_bytes
from bmforge.infer.engine.workspace import Workspace, find_workspace, largest_call
from bmforge.memory.packed import packed_bytes
from bmforge.memory.spill import format_bytes
from bmforge.memory.streamed_experts import LEAST_EXPERTS, expert_bytes, find_experts
from bmforge.models.base import Model
from bmforge.records import units_of

__all__ = [
    "EngineConfig",
    "MemoryPlan",
    "check_budgets",
    "plan_memory",
    "plan_weights",
]

# The allocator does not return all freed memory.
_SLACK = 1.15
_LONGEST = 1024


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits for which an engine plans its memory.

    Args:
        max_rows: maximum batch size in sequences: prompts times beams or returned sequences.
        max_tokens: maximum sequence length in tokens, including new tokens; for an encoder-decoder
            the limit applies to source and target separately (default: 1,024, or the model's
            maximum if it is less).
        spill_directory: directory for the streamed weights of a module in memory (default: the
            system's temporary directory).
        stream_experts: read experts from the directory when the router chooses them, and cache
            the most recently used; everything else is resident. Gradients are not supported.
        adapter_bytes: part of the budget reserved for adapters that are attached later.
        only_requests: plan memory for batched requests only, as in a server. Their prompts are
            computed in chunks of `requests.max_num_batched_tokens`, so the largest step needs much
            less memory than `max_rows` whole prompts; `generate` and other calls then accept one
            sequence at a time. Models whose requests are not batched ignore it.
        requests: limits of batched requests.
    """

    max_rows: int = 1
    max_tokens: int | None = None
    spill_directory: Path | None = None
    stream_experts: bool = False
    adapter_bytes: int = 0
    only_requests: bool = False
    requests: RequestsConfig = field(default_factory=RequestsConfig)

    def __post_init__(self) -> None:
        """Raise `ConfigError` for values out of range."""
        if self.max_rows < 1 or (self.max_tokens is not None and self.max_tokens < 2):
            raise ConfigError(
                f"EngineConfig is out of range: max_rows={self.max_rows} (allowed: at least 1), "
                f"max_tokens={self.max_tokens} (allowed: at least 2, or None for the default)."
            )
        if self.adapter_bytes < 0:
            raise ConfigError(
                f"EngineConfig: adapter_bytes={self.adapter_bytes} must be at least 0."
            )

    def tokens_of(self, model: nn.Module) -> int:
        """Return the maximum sequence length for a model, in tokens."""
        limit = getattr(model, "position_limit", None)
        # An encoder-decoder with relative positions (T5) has no limit; config.json still names one.
        is_decoder = getattr(getattr(model, "traits", None), "attention", "causal") == "causal"
        published = getattr(getattr(model, "config", None), "max_seq_len", None)
        published = published if is_decoder else None
        tokens = self.max_tokens or min(_LONGEST, limit or _LONGEST, published or _LONGEST)
        if limit is not None and tokens > limit:
            raise ConfigError(
                f"EngineConfig: max_tokens={tokens} is more than the model's {limit} positions. "
                f"Use at most {limit}."
            )
        return tokens

    def call_rows_of(self, model: nn.Module) -> int:
        """Return the maximum batch size of a call for a model, in sequences."""
        return largest_call(self.max_rows, self.tokens_of(model), self._chunk_tokens_of(model))

    def workspace_of(self, model: nn.Module) -> Workspace:
        """Return the memory that a model needs in addition to its weights, in bytes."""
        chunk = self._chunk_tokens_of(model)
        return find_workspace(model, self.max_rows, self.tokens_of(model), chunk)

    def _chunk_tokens_of(self, model: nn.Module) -> int | None:
        """Return the maximum number of tokens in a step; None if prompts are not split."""
        is_chunked = self.only_requests and isinstance(model, Model) and can_pack(model)
        return self.requests.max_num_batched_tokens if is_chunked else None


def plan_memory(
    model: nn.Module,
    devices: Sequence[torch.device],
    config: EngineConfig,
    device_budget_bytes: int | None,
    host_budget_bytes: int | None,
) -> MemoryPlan:
    """Plan the placement of a model's tensors.

    Args:
        model: model, possibly on the meta device.
        devices: compute devices; tensors outside of blocks are on the first device.
        config: limits of the engine.
        device_budget_bytes: budget of every device; None means the free memory.
        host_budget_bytes: budget of the host if no device is a CPU; None means the free memory.

    Raises:
        ConfigError: a budget is too small (the message names the smallest sufficient one) or
            exceeds the machine's memory.
    """
    budgets = check_budgets(devices, device_budget_bytes, host_budget_bytes)
    blocks = {unit.name: unit.module for unit in units_of(model) if unit.is_block}
    tokens, beside = config.tokens_of(model), config.adapter_bytes
    work = config.workspace_of(model)
    work = Workspace(work.cache_bytes, int(_SLACK * work.step_bytes))
    both = work.cache_bytes + work.step_bytes
    rooms = [
        DeviceMemory(device, budget - beside, runtime_bytes(model, both, device))
        for device, budget in zip(devices, budgets, strict=True)
    ]
    if config.stream_experts:
        divided = _plan_experts(model, blocks, rooms, work)
    else:
        divided = divide_blocks(model, blocks, rooms, host_budget_bytes, work)
    if divided.plan is None:
        limits = _name_given(device_budget_bytes, devices, budgets)
        raise ConfigError(_too_small(limits, len(devices), divided, beside, work, tokens))
    least = divided.smallest_bytes + beside
    first, *others = (
        replace(device_plan, budget_bytes=device_plan.budget_bytes + beside, smallest_bytes=least,
                adapter_bytes=beside)
        for device_plan in divided.plan.each()
    )  # fmt: skip
    return replace(first, others=tuple(others))


def plan_weights(
    model: nn.Module,
    device: torch.device,
    limit_bytes: int,
    blocks: Mapping[str, nn.Module],
    option: str = "memory_limit",
) -> MemoryPlan:
    """Plan the placement of a model's tensors for a limit on weights and streaming slots only.

    Args:
        model: model, possibly on the meta device.
        device: compute device.
        limit_bytes: limit for all weights, buffers and streaming slots on the device.
        blocks: dict from name to module that may be streamed, in execution order.
        option: name of the caller's option, for error messages.

    Raises:
        ConfigError: the limit is too small; the message names the smallest sufficient one.
    """
    room, nothing = DeviceMemory(device, limit_bytes), Workspace(0, 0)
    divided = divide_blocks(model, blocks, [room], None, nothing)
    if divided.plan is None:
        smallest, fixed = divided.smallest_bytes, divided.outside_bytes
        raise ConfigError(
            f"{option}={limit_bytes} ({format_bytes(limit_bytes)}) is too small: {smallest} "
            f"({format_bytes(smallest)}) is the smallest that works, of which weights and "
            f"buffers outside of the blocks take {format_bytes(fixed)}. Raise {option}."
        )
    return divided.plan


def _plan_experts(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    rooms: Sequence[DeviceMemory],
    work: Workspace,
) -> BlockAssignment:
    """Plan as `divide_blocks` does, but only experts are streamed; all other weights are resident.

    Raises:
        ConfigError: the model has no experts, or there are several devices.
    """
    layers = find_experts(model)
    if not layers:
        raise ConfigError(
            "EngineConfig(stream_experts=True) needs a model with MoE layers, but a "
            f"{type(model).__name__} has none. Leave stream_experts out."
        )
    if len(rooms) > 1:
        raise ConfigError(
            "EngineConfig(stream_experts=True) supports a single device, but devices lists "
            f"{len(rooms)}. Use one device, or leave stream_experts out."
        )
    (room,) = rooms
    away = {id(t) for _, module in layers for t in module.parameters()}
    everything = {id(t): t for t in (*model.parameters(), *model.buffers())}
    fixed = sum(packed_bytes(t) for key, t in everything.items() if key not in away)
    slot_bytes = max(expert_bytes(module) for _, module in layers)
    count = sum(next(module.parameters()).shape[0] for _, module in layers)
    other_bytes = fixed + work.cache_bytes + work.step_bytes + room.runtime_bytes
    num_slots = min(count, (room.room_bytes - other_bytes) // slot_bytes)
    smallest = other_bytes + LEAST_EXPERTS * slot_bytes
    if num_slots < LEAST_EXPERTS:
        return BlockAssignment(None, smallest, fixed)
    plan = MemoryPlan(
        room.device, room.room_bytes, smallest, fixed, 0, work.cache_bytes, work.step_bytes,
        room.runtime_bytes, tuple(blocks), (), (), 0, num_slots * slot_bytes,
    )  # fmt: skip
    return BlockAssignment(plan, smallest, fixed)


def _name_given(
    device_budget_bytes: int | None, devices: Sequence[torch.device], budgets: Sequence[int]
) -> str:
    if device_budget_bytes is not None:
        return f"device_budget_bytes={device_budget_bytes} ({format_bytes(device_budget_bytes)})"
    free = (f"{format_bytes(b)} on {device}" for device, b in zip(devices, budgets, strict=True))
    return f"the free memory ({', '.join(free)})"


def _too_small(
    budget: str, count: int, divided: BlockAssignment, beside: int, work: Workspace, tokens: int
) -> str:
    smallest = divided.smallest_bytes + beside
    enough = "is the smallest that works" if count == 1 else "on every device is enough"
    return (
        f"{budget} is too small: {smallest} ({format_bytes(smallest)}) {enough}, of which "
        f"weights outside of the blocks take {format_bytes(divided.outside_bytes)} and a step of "
        f"{tokens} tokens takes {format_bytes(work.cache_bytes + work.step_bytes)}. Raise the "
        "budget, or reduce the sequence length (max_model_len; in Python "
        "EngineConfig(max_tokens=))."
    )


def check_budgets(
    devices: Sequence[torch.device], device_budget_bytes: int | None, host_budget_bytes: int | None
) -> list[int]:
    """Return the budget of every device in bytes: the given budget, or the free memory.

    Args:
        devices: compute devices; if the CPU is listed several times, its memory is divided.
        device_budget_bytes: budget of each device; None means the free memory.
        host_budget_bytes: budget of the host; must be None if a device is a CPU.

    Raises:
        ConfigError: a budget is not above 0 or exceeds the machine's memory, or a host budget
            is given although a device is the host.
    """
    if host_budget_bytes is not None and any(map(is_host, devices)):
        raise ConfigError(
            f"host_budget_bytes={host_budget_bytes} has no effect on a CPU, where host and device "
            "memory are the same. Use device_budget_bytes."
        )
    if device_budget_bytes is None:
        return [_free_bytes(device) // devices.count(device) for device in devices]
    size = min(device_size_bytes(device) // devices.count(device) for device in devices)
    budgets_given = {"device_budget_bytes": (device_budget_bytes, size)}
    if host_budget_bytes is not None:
        budgets_given["host_budget_bytes"] = host_budget_bytes, host_memory_bytes()
    for name, (size, limit) in budgets_given.items():
        if size < 1:
            raise ConfigError(f"{name}={size} must be above 0, or None for all free memory.")
        if size > limit:
            raise ConfigError(
                f"{name}={size} ({format_bytes(size)}) is more than the machine's memory "
                f"({format_bytes(limit)}). Use a smaller value, or None for all free memory."
            )
    return [device_budget_bytes] * len(devices)


def _free_bytes(device: torch.device) -> int:
    free = available_host_bytes() if is_host(device) else None
    return memory_room_bytes(device) if free is None else min(free, memory_room_bytes(device))
