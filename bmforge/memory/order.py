"""What runs next: learned from what came after what the last time."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["RunOrder", "Step"]


class Step(NamedTuple):
    """A block that runs.

    Attributes:
        phase: "plain" without gradients, "forward" or "backward" with them.
        block: its number.
    """

    phase: str
    block: int


class RunOrder:
    """Foresees which blocks run, in the order of the last pass.

    As long as nothing is known, blocks run from the first to the last, with gradients then back,
    and then again. What came after a step the last time is what is foreseen the next time;
    something else is believed when it came twice. So while an encoder-decoder writes token by
    token only the decoder's blocks are foreseen, also of the next text.

    Args:
        num_blocks: how many there are.
    """

    def __init__(self, num_blocks: int) -> None:
        self._last_block = num_blocks - 1
        self._followers: dict[Step, Step] = {}
        self._doubted: set[Step] = set()
        self._now: Step | None = None

    def enter(self, step: Step) -> None:
        """Note that a block begins."""
        before, self._now = self._now, step
        if before is None:
            return
        if before in self._doubted or self._followers.setdefault(before, step) == step:
            self._followers[before] = step
            self._doubted.discard(before)
        else:
            self._doubted.add(before)

    def coming(self, count: int, *, with_this: bool) -> list[int]:
        """Return the next `count` different blocks, the nearest first.

        Args:
            count: how many at most.
            with_this: the one that runs now is the first of them.
        """
        if self._now is None:
            return list(range(min(count, self._last_block + 1)))
        found = [self._now.block] if with_this else []
        step, seen = self._now, {self._now}
        while len(found) < count:
            step = self._after(step)
            if step in seen:  # once around
                break
            seen.add(step)
            if step.block not in found:
                found.append(step.block)
        if not with_this and len(found) < count and self._now.block not in found:
            found.append(self._now.block)
        return found

    def _after(self, step: Step) -> Step:
        known = self._followers.get(step)
        if known is not None:
            return known
        phase, block = step
        if phase == "backward":
            return Step(phase, block - 1) if block else Step("forward", 0)
        if block < self._last_block:
            return Step(phase, block + 1)
        return Step("backward", block) if phase == "forward" else Step(phase, 0)
