"""Splits an answer into the reasoning at its start and the text after the reasoning."""

from __future__ import annotations

from collections.abc import Iterator

from bmforge.serve.parts import Thought
from bmforge.tokenizers.chat_messages import THOUGHT_MARKS

__all__ = ["ThoughtReader", "find_thought_marks", "opens_thought"]


def find_thought_marks(source: str) -> tuple[str, str] | None:
    """Return the delimiters of reasoning in a chat template; None if it has none."""
    return next((pair for pair in THOUGHT_MARKS if pair[0] in source or pair[1] in source), None)


def opens_thought(prompt: str, marks: tuple[str, str] | None) -> bool:
    """Return True if a prompt ends inside reasoning, so that the answer continues it."""
    if marks is None:
        return False
    start, end = (prompt.rfind(mark) for mark in marks)
    return start > end and not prompt[start + len(marks[0]) :].strip()


class ThoughtReader:
    """Streaming parser that separates reasoning at the start of an answer from the text.

    Args:
        marks: delimiters before and after the reasoning.
        is_open: True if the answer begins inside the reasoning.
    """

    def __init__(self, marks: tuple[str, str], is_open: bool) -> None:
        self._open, self._close = marks
        self._pending, self._state = "", "thought" if is_open else "start"
        self._is_first = True

    def feed(self, text: str) -> Iterator[str | Thought]:
        """Process the next text of an answer; yield reasoning and text that cannot change later."""
        self._pending += text
        if self._state == "start":
            self._begin()
        if self._state == "thought":
            yield from self._think()
        if self._state == "behind":  # blank lines between reasoning and text are dropped
            self._pending = self._pending.lstrip("\n")
            self._state = "text" if self._pending else "behind"
        if self._state == "text" and self._pending:
            ready, self._pending = self._pending, ""
            yield ready

    def end(self) -> Iterator[str | Thought]:
        """Yield the text that is still buffered at the end of the answer."""
        remaining, self._pending = self._pending, ""
        if remaining:
            yield Thought(remaining) if self._state == "thought" else remaining

    def _begin(self) -> None:
        """Decide whether the answer begins with reasoning."""
        stripped = self._pending.lstrip()
        if stripped.startswith(self._open):
            self._state, self._pending = "thought", stripped[len(self._open) :]
        elif not self._open.startswith(stripped):
            self._state = "text"

    def _think(self) -> Iterator[Thought]:
        if self._is_first:
            self._pending = self._pending.lstrip("\n")
            self._is_first = not self._pending
        thought, closed, remaining = self._pending.partition(self._close)
        if closed:
            self._state, self._pending = "behind", remaining
            thought = thought.rstrip("\n")
        else:
            # Newlines before the closing mark are dropped.
            certain = thought.rstrip("\n")
            sizes = [n for n in range(1, len(self._close)) if thought.endswith(self._close[:n])]
            size = max([*sizes, 0])
            if size:
                certain = thought[: len(thought) - size].rstrip("\n")
            thought, self._pending = certain, thought[len(certain) :]
        if thought:
            yield Thought(thought)
