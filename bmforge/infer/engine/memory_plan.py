"""Where everything of a model goes, as a line, a table and bars."""

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
    """Where everything goes. All figures in bytes.

    Args:
        device: of several the one where everything outside of blocks is.
        budget_bytes: of the device.
        smallest_bytes: the least budget that works; of several devices one that does.
        weights_bytes: of what stays: all that is in no block, and resident blocks.
        slots_bytes: through which the other blocks come and go.
        cache_bytes: keys and values of the longest rows.
        step_bytes: what the largest step needs besides.
        runtime_bytes: what the process needs besides tensors.
        resident: names of blocks that stay.
        moving: names of blocks that come and go, in the order in which they run.
        on_host: of these, the ones that wait in host memory.
        moved_bytes: of all blocks that come and go.
        experts_bytes: for experts that are here, where they are read when they are chosen.
        beside_bytes: for what is put beside the model once it is open.
        others: what further devices have: blocks, and what these need.
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
    beside_bytes: int = 0
    others: tuple[MemoryPlan, ...] = ()

    def each(self) -> tuple[MemoryPlan, ...]:
        """Return the plan of every device."""
        return self, *self.others

    @property
    def on_disk(self) -> tuple[str, ...]:
        """Blocks that are read from disk whenever they run."""
        return tuple(name for name in self.moving if name not in self.on_host)

    @property
    def elsewhere(self) -> dict[str, torch.device]:
        """Blocks that are on further devices, by name."""
        return {
            name: plan.device for plan in self.others for name in (*plan.resident, *plan.moving)
        }

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
        if self.others:
            alone = (replace(one, others=()) for one in self.each())
            return "; ".join(f"{one.device}: {one.line()}" for one in alone)
        blocks = len(self.resident) + len(self.moving)
        moved = format_bytes(self.moved_bytes)
        return (
            f"{len(self.resident)} of {blocks} blocks stay, {len(self.on_host)} wait on the host, "
            f"{len(self.on_disk)} on disk ({moved} a pass); {format_bytes(self.used_bytes)} of "
            f"{format_bytes(self.budget_bytes)} are planned for"
        )

    def table(self) -> RenderableType:
        """Return the plan for a terminal: a line and a bar for every part, of every device."""
        return Group(*(one._own_table(bool(self.others)) for one in self.each()))

    def _own_table(self, is_named: bool) -> Table:
        place = f" of {self.device}" if is_named else ""
        title = f"memory{place}: {format_bytes(self.budget_bytes)}"
        table = Table(title=title, title_justify="left")
        table.add_column("part")
        table.add_column("size", justify="right")
        table.add_column("share of the budget", min_width=24)
        begin = 0
        for name, size in [*self.parts(), ("free", self.budget_bytes - self.used_bytes)]:
            bar = Bar(self.budget_bytes, begin, begin + size, width=24)
            table.add_row(name, format_bytes(size), bar)
            begin += size
        table.caption = replace(self, others=()).line()
        return table

    def __str__(self) -> str:
        """The table as text."""
        console = Console(width=80, no_color=True, highlight=False)
        with console.capture() as captured:
            console.print(self.table())
        return captured.get().rstrip()
