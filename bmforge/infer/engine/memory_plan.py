"""Placement and memory use of a model, printed as a line or as a table with bars."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.table import Table

from bmforge.memory.spill import format_bytes

__all__ = ["MemoryPlan"]


@dataclass(frozen=True)
class MemoryPlan:
    """Placement of a model's blocks. All sizes are in bytes.

    Args:
        device: device of the plan; with several devices, the first, which has the tensors
            outside of blocks.
        budget_bytes: budget of the device.
        smallest_bytes: smallest sufficient budget; with several devices, a sufficient budget that
            may not be the smallest.
        weights_bytes: resident weights: tensors outside of blocks, and resident blocks.
        slots_bytes: streaming slots for the blocks that are not resident.
        cache_bytes: KV cache of `max_rows` sequences of maximum length.
        step_bytes: activations of the largest step.
        runtime_bytes: memory of the process other than tensors.
        resident: names of resident blocks.
        moving: names of streamed blocks, in execution order.
        on_host: names of streamed blocks that are cached in host memory.
        moved_bytes: total size of the streamed blocks.
        experts_bytes: cache of streamed experts.
        adapter_bytes: reserve for adapters that are attached later.
        others: plans of further devices.
    """

    device: torch.device
    budget_bytes: int
    smallest_bytes: int
    weights_bytes: int
    slots_bytes: int
    cache_bytes: int
    step_bytes: int
    runtime_bytes: int
    resident: tuple[str, ...]
    moving: tuple[str, ...]
    on_host: tuple[str, ...]
    moved_bytes: int
    experts_bytes: int = 0
    adapter_bytes: int = 0
    others: tuple[MemoryPlan, ...] = ()

    def each(self) -> tuple[MemoryPlan, ...]:
        """Return the plan of every device."""
        return self, *self.others

    @property
    def on_disk(self) -> tuple[str, ...]:
        """Names of the blocks that are read from disk in every pass."""
        return tuple(name for name in self.moving if name not in self.on_host)

    @property
    def elsewhere(self) -> dict[str, torch.device]:
        """Dict from block name to device, for the blocks that are not on the first device."""
        return {
            name: plan.device for plan in self.others for name in (*plan.resident, *plan.moving)
        }

    @property
    def used_bytes(self) -> int:
        """Memory that the plan uses, in bytes."""
        return sum(size for _, size in self.parts())

    def parts(self) -> list[tuple[str, int]]:
        """Return the categories of the budget with their sizes in bytes."""
        return [
            ("resident weights", self.weights_bytes),
            ("slots for streamed blocks", self.slots_bytes),
            *([("cached experts", self.experts_bytes)] if self.experts_bytes else []),
            ("KV cache", self.cache_bytes),
            ("largest step", self.step_bytes),
            ("runtime", self.runtime_bytes),
            *([("later adapters", self.adapter_bytes)] if self.adapter_bytes else []),
        ]

    def line(self) -> str:
        """Return the plan as one line of text."""
        if self.others:
            alone = (replace(device_plan, others=()) for device_plan in self.each())
            return "; ".join(f"{device_plan.device}: {device_plan.line()}" for device_plan in alone)
        blocks = len(self.resident) + len(self.moving)
        moved = format_bytes(self.moved_bytes)
        return (
            f"{len(self.resident)} of {blocks} blocks stay on the device, "
            f"{len(self.on_host)} are streamed from the host, {len(self.on_disk)} from disk "
            f"({moved} per pass); the plan uses {format_bytes(self.used_bytes)} of "
            f"{format_bytes(self.budget_bytes)}"
        )

    def table(self) -> RenderableType:
        """Return the plan as a table for a terminal, one line and bar per category and device."""
        return Group(*(device_plan._own_table(bool(self.others)) for device_plan in self.each()))

    def _own_table(self, is_named: bool) -> Table:
        location = f" of {self.device}" if is_named else ""
        title = f"memory{location}: {format_bytes(self.budget_bytes)}"
        table = Table(title=title, title_justify="left")
        table.add_column("part")
        table.add_column("size", justify="right")
        table.add_column("fraction of the budget", min_width=24)
        begin = 0
        for name, size in [*self.parts(), ("free", self.budget_bytes - self.used_bytes)]:
            bar = Bar(self.budget_bytes, begin, begin + size, width=24)
            table.add_row(name, format_bytes(size), bar)
            begin += size
        table.caption = replace(self, others=()).line()
        return table

    def __str__(self) -> str:
        """Return the table as text."""
        console = Console(width=80, no_color=True, highlight=False)
        with console.capture() as captured:
            console.print(self.table())
        return captured.get().rstrip()
