"""Assigns a model's blocks to devices, either resident or streamed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import nn

from bmforge.device import is_host
from bmforge.host_memory import available_host_bytes
from bmforge.infer.engine.memory_plan import MemoryPlan
from bmforge.infer.engine.workspace import Workspace
from bmforge.memory.copies import staging_bytes
from bmforge.memory.packed import packed_bytes
from bmforge.memory.resident import NUM_SLOTS, choose_resident, min_resident_bytes
from bmforge.memory.streaming import Stays
from bmforge.surgery import persistent_tensors, shared_tensors
from bmforge.tune.delta.attached import delta_tensors

__all__ = ["BlockAssignment", "DeviceMemory", "divide_blocks", "find_staying"]


@dataclass(frozen=True)
class DeviceMemory:
    """Memory budget of one device.

    Args:
        device: device that the budget applies to.
        room_bytes: memory budget in bytes.
        runtime_bytes: part of the budget for memory of the process other than tensors.
    """

    device: torch.device
    room_bytes: int
    runtime_bytes: int = 0


@dataclass(frozen=True)
class BlockAssignment:
    """Result of `divide_blocks`.

    Args:
        plan: placement; None if a device is too small.
        smallest_bytes: smallest sufficient budget per device.
        outside_bytes: bytes of all weights that are never streamed, including those outside of
            blocks.
    """

    plan: MemoryPlan | None
    smallest_bytes: int
    outside_bytes: int


@dataclass(frozen=True)
class _Block:
    """Name of a block, and the sizes in bytes of its streamed and of its resident tensors."""

    name: str
    moving: int
    staying: int
    is_bound: bool

    @property
    def size(self) -> int:
        return self.moving + self.staying


_Stack = Sequence[_Block]


def find_staying(model: nn.Module) -> Stays:
    """Return a predicate (name, tensor): True if the tensor of a streamed block stays resident.

    Norms, biases and adapters stay resident, because they are small and trained in place.
    """
    own = delta_tensors(model)
    return lambda name, tensor: tensor.dim() < 2 or name in own


def divide_blocks(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    rooms: Sequence[DeviceMemory],
    host_budget_bytes: int | None,
    work: Workspace,
) -> BlockAssignment:
    """Assign a model's blocks to one or several devices.

    Tensors outside of blocks are on the first device. Every device reserves memory for the largest
    step and for the KV cache of its blocks. A device that is not needed or too small for the
    streaming slots gets no blocks.

    Args:
        model: model, possibly on the meta device.
        blocks: dict from name to module that may be streamed, in execution order.
        rooms: memory of the devices.
        host_budget_bytes: host memory for streamed blocks; None means half of the free memory,
            limited by the remaining budget if a CPU is among the devices.
        work: memory for the KV cache and a step.
    """
    stacks = _find_stacks(model, blocks)
    everything = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
    outside = sum(map(packed_bytes, everything)) - sum(b.size for stack in stacks for b in stack)
    staying = sum(block.staying for stack in stacks for block in stack)
    needs = [work.step_bytes + room.runtime_bytes for room in rooms]
    needs[0] += outside
    free = [room.room_bytes - need for room, need in zip(rooms, needs, strict=True)]
    while True:
        shares = _share_out(stacks, work.cache_bytes, free)
        results = {
            number: _plan_device(_only(stacks, names), stacks, room, 0 if number else outside, work)
            for number, (room, names) in enumerate(zip(rooms, shares, strict=True))
            if names or not number
        }
        plans = [plan for plan, _ in results.values() if plan is not None]
        tight = [
            number for number, (plan, _) in results.items() if plan is None and free[number] > 0
        ]
        if len(rooms) == 1 or not tight:
            break
        free[min(tight, key=free.__getitem__)] = 0  # the other devices get its blocks
    smallest = results[0][1]
    if len(rooms) > 1:  # the division depends on the budgets; this bound suffices for any division
        sizes = [[block.moving for block in stack] for stack in stacks]
        smallest = max(needs) + staying + work.cache_bytes + min_resident_bytes(sizes)
    if len(plans) < len(results):
        return BlockAssignment(None, smallest, outside + staying)
    smallest = min(smallest, max(room.room_bytes for room in rooms))
    first, *others = _fill_host(plans, stacks, _host_room(rooms, plans, host_budget_bytes))
    first = replace(first, smallest_bytes=smallest, others=tuple(others))
    return BlockAssignment(first, smallest, outside + staying)


def _plan_device(
    own: Sequence[_Stack],
    stacks: Sequence[_Stack],
    room: DeviceMemory,
    outside: int,
    work: Workspace,
) -> tuple[MemoryPlan | None, int]:
    """Return the plan of one device, and the smallest sufficient budget for its blocks.

    The plan is None if the device is too small. Blocks cached in host memory are added later.
    """
    sizes = [[block.moving for block in stack] for stack in own]
    fixed = outside + sum(block.staying for stack in own for block in stack)
    cache_bytes = _share_of(work.cache_bytes, own, stacks)
    other_bytes = fixed + cache_bytes + work.step_bytes + room.runtime_bytes
    smallest = other_bytes + min_resident_bytes(sizes)
    resident_ids = choose_resident(sizes, room.room_bytes - other_bytes)
    if resident_ids is None:
        return None, smallest
    resident = {stack[i].name for stack, ids in zip(own, resident_ids, strict=True) for i in ids}
    moved = [block for stack in own for block in stack if block.name not in resident]
    order = [block.name for stack in reversed(own) for block in stack]
    moved_bytes = sum(block.moving for block in moved)
    plan = MemoryPlan(
        room.device,
        room.room_bytes,
        smallest,
        fixed + sum(map(sum, sizes)) - moved_bytes,
        min(NUM_SLOTS, len(moved)) * max((block.moving for block in moved), default=0),
        cache_bytes,
        work.step_bytes,
        room.runtime_bytes,
        tuple(name for name in order if name in resident),
        tuple(name for name in order if name not in resident),
        (),
        moved_bytes,
    )
    return plan, smallest


def _share_out(
    stacks: Sequence[_Stack], cache_bytes: int, free: Sequence[int]
) -> list[Collection[str]]:
    """Return the names of the blocks of each device.

    Blocks fill one device after the other. If not all blocks fit, each device gets consecutive
    blocks in proportion to its memory, which balances the transfers. Blocks that share tensors are
    placed together on the first device.
    """
    order = [block for stack in reversed(stacks) for block in stack]
    if len(free) == 1:
        return [{block.name for block in order}]
    caches = {b.name: _share_of(cache_bytes, _only(stacks, {b.name}), stacks) for b in order}
    sizes = {block.name: block.size + caches[block.name] for block in order}
    bound = {block.name for block in order if block.is_bound}
    loose = [block.name for block in order if not block.is_bound]
    free = [free[0] - sum(sizes[name] for name in bound), *free[1:]]
    amounts = [sizes[name] for name in loose]
    numbers = _fill_devices(amounts, free) or _divide_by_memory(amounts, free)
    shares: list[set[str]] = [set() for _ in free]
    shares[0] |= bound
    for name, number in zip(loose, numbers, strict=True):
        shares[number].add(name)
    return list(shares)


def _fill_devices(sizes: Sequence[int], free: Sequence[int]) -> list[int] | None:
    """Return the device index of each block, filling devices in order; None if not all fit."""
    numbers: list[int] = []
    device, left = 0, free[0]
    for size in sizes:
        while size > left:
            device += 1
            if device == len(free):
                return None
            left = free[device]
        left -= size
        numbers.append(device)
    return numbers


def _divide_by_memory(sizes: Sequence[int], free: Sequence[int]) -> list[int]:
    """Return the device index of each block, in proportion to the devices' memory."""
    ends = list(accumulate(max(0, room) for room in free))
    behind = list(accumulate(sizes))
    scale = ends[-1] / max(1, sum(sizes))
    middles = ((end - size / 2) * scale for end, size in zip(behind, sizes, strict=True))
    return [min(bisect_right(ends, middle), len(free) - 1) for middle in middles]


def _only(stacks: Sequence[_Stack], names: Collection[str]) -> list[_Stack]:
    """Return the stacks (decoder, encoder), each with only the blocks that `names` contains."""
    return [[block for block in stack if block.name in names] for stack in stacks]


def _share_of(cache_bytes: int, own: Sequence[_Stack], stacks: Sequence[_Stack]) -> int:
    """Return the part of the KV cache, in bytes, that the decoder blocks in `own` use."""
    if not stacks:
        return cache_bytes
    return -(-cache_bytes * len(own[0]) // len(stacks[0]))


def _find_stacks(model: nn.Module, blocks: Mapping[str, nn.Module]) -> list[list[_Block]]:
    """Return the blocks of every stack, the decoder stack first.

    The plan streams blocks from the end of this list first. The decoder blocks of an
    encoder-decoder run for every token, so they are streamed only if necessary.
    """
    shared, stays = shared_tensors(model), find_staying(model)
    stacks: dict[str, list[_Block]] = {}
    for name, module in blocks.items():
        tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
        own = sum(packed_bytes(t) for key, t in tensors.items() if key not in shared)
        moving = sum(
            packed_bytes(tensor)
            for key, tensor in persistent_tensors(module).items()
            if id(tensor) not in shared and not stays(f"{name}.{key}", tensor)
        )
        block = _Block(name, moving, own - moving, not shared.isdisjoint(tensors))
        stacks.setdefault(name.rpartition(".")[0], []).append(block)
    return list(reversed(stacks.values()))


def _host_room(
    rooms: Sequence[DeviceMemory], plans: Sequence[MemoryPlan], budget_bytes: int | None
) -> int:
    """Return the number of bytes of host memory available for caching streamed blocks."""
    if budget_bytes is not None:
        return budget_bytes
    half = (available_host_bytes() or 0) // 2
    if not any(is_host(room.device) for room in rooms):
        return half
    room_bytes = sum(room.room_bytes for room in rooms if is_host(room.device))
    return min(half, room_bytes - sum(p.used_bytes for p in plans if is_host(p.device)))


def _fill_host(
    plans: Sequence[MemoryPlan], stacks: Sequence[_Stack], room_bytes: int
) -> list[MemoryPlan]:
    """Add to each plan the streamed blocks that are cached in host memory (none on a CPU)."""
    filled = []
    for plan in plans:
        waiting = []
        for block in (block for stack in stacks for block in stack if block.name in plan.moving):
            size_bytes = staging_bytes(block.moving, plan.device)
            if not is_host(plan.device) and size_bytes <= room_bytes:
                room_bytes -= size_bytes
                waiting.append(block.name)
        filled.append(replace(plan, on_host=tuple(waiting)))
    return filled
