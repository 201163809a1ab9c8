"""Predicts which blocks run next from the order in which they ran before."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["RunOrder", "BlockExecution"]


class BlockExecution(NamedTuple):
    """One execution of a block.

    Attributes:
        phase: "plain" (forward without gradients), "forward" (with gradients) or "backward".
        block: index of the block.
    """

    phase: str
    block: int


class RunOrder:
    """Predicts the order in which blocks run.

    Initially it predicts that blocks run from first to last, and with gradients then in reverse.
    Later it predicts that each execution is followed by the same execution as last time; a
    different successor is adopted once it has been observed twice. While an encoder-decoder
    generates, it thus predicts decoder blocks only, also for the next text.

    Args:
        num_blocks: number of blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        self._last_block = num_blocks - 1
        self._followers: dict[BlockExecution, BlockExecution] = {}
        self._doubted: set[BlockExecution] = set()
        self._now: BlockExecution | None = None

    def enter(self, step: BlockExecution) -> None:
        """Record that the execution of a block starts."""
        before, self._now = self._now, step
        if before is None:
            return
        # One different successor is an exception, such as the end of a text, and must not change
        # the prediction; the second one is the new order.
        if before in self._doubted or self._followers.setdefault(before, step) == step:
            self._followers[before] = step
            self._doubted.discard(before)
        else:
            self._doubted.add(before)

    def coming(self, count: int, *, with_this: bool) -> list[int]:
        """Return the indices of the next `count` distinct blocks, in order.

        Args:
            count: maximum number of blocks.
            with_this: whether to list the current block first.
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
        # A block that runs again next, as a single decoder block does, keeps its slot.
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
