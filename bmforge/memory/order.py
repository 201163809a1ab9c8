"""Prediction of the next blocks from the execution order of the last pass."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["RunOrder", "BlockExecution"]


class BlockExecution(NamedTuple):
    """Execution of a block.

    Attributes:
        phase: "plain" without gradients, "forward" or "backward" with them.
        block: block index.
    """

    phase: str
    block: int


class RunOrder:
    """Predicts the execution order of blocks.

    The initial prediction is first to last, with gradients then backward, repeated. A step's
    predicted successor is its last observed one; a change is accepted after two observations. While
    an encoder-decoder generates tokens, only decoder blocks are thus predicted, also for the next
    text.

    Args:
        num_blocks: number of blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        self._last_block = num_blocks - 1
        self._followers: dict[BlockExecution, BlockExecution] = {}
        self._doubted: set[BlockExecution] = set()
        self._now: BlockExecution | None = None

    def enter(self, step: BlockExecution) -> None:
        """Record that a block begins."""
        before, self._now = self._now, step
        if before is None:
            return
        if before in self._doubted or self._followers.setdefault(before, step) == step:
            self._followers[before] = step
            self._doubted.discard(before)
        else:
            self._doubted.add(before)

    def coming(self, count: int, *, with_this: bool) -> list[int]:
        """Return the next `count` different blocks, nearest first.

        Args:
            count: maximum number of blocks.
            with_this: whether the current block is the first of them.
        """
        if self._now is None:
            return list(range(min(count, self._last_block + 1)))
        blocks = [self._now.block] if with_this else []
        step, seen = self._now, {self._now}
        while len(blocks) < count:
            step = self._after(step)
            if step in seen:  # the predicted cycle is complete
                break
            seen.add(step)
            if step.block not in blocks:
                blocks.append(step.block)
        if not with_this and len(blocks) < count and self._now.block not in blocks:
            blocks.append(self._now.block)
        return blocks

    def _after(self, step: BlockExecution) -> BlockExecution:
        follower = self._followers.get(step)
        if follower is not None:
            return follower
        phase, block = step
        if phase == "backward":
            return BlockExecution(phase, block - 1) if block else BlockExecution("forward", 0)
        if block < self._last_block:
            return BlockExecution(phase, block + 1)
        return BlockExecution("backward", block) if phase == "forward" else BlockExecution(phase, 0)
