"""Separates tool calls from text while an answer is streamed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from bmforge.serve.parts import CallPiece, CallStart, GeneratedToolCall, Part
from bmforge.serve.tool_formats import Schemas, ToolFormat, read_json_call

__all__ = ["CallReader", "JsonCallReader"]

_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_MAX_HEAD_CHARS = 4096


class JsonCallReader:
    """Parses one tool call as a JSON object, and streams its arguments.

    Args:
        schemas: schemas of the functions that may be called.

    Attributes:
        has_started: True if the name has been read and is that of a known function.
        is_over: True if the arguments are complete.
    """

    def __init__(self, schemas: Schemas) -> None:
        self._schemas, self._text = schemas, ""
        self.has_started = False
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self.is_over = False

    def feed(self, text: str) -> Iterator[Part]:
        """Process the next text; yield the start of the tool call and chunks of its arguments.

        A chunk is yielded as soon as later text can no longer change it.
        """
        if self.is_over:
            return
        if not self.has_started:
            self._text += text
            head = _HEAD.match(self._text) if len(self._text) < _MAX_HEAD_CHARS else None
            name: str = json.loads(head[1]) if head else ""
            if head is None or name not in self._schemas:
                return
            self.has_started = True
            text, self._text = self._text[head.end() :], ""
            yield CallStart(name)
        end = self._scan(text)
        if end:
            yield CallPiece(text[:end])

    def _scan(self, text: str) -> int:
        """Return the number of characters of the text that belong to the arguments object."""
        for at, character in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self.is_over = True
                    return at + 1
        return len(text)

    @property
    def is_cut(self) -> bool:
        """True if the arguments of the call have begun but are not complete."""
        return self.has_started and not self.is_over

    def end(self) -> Iterator[Part]:
        """Yield the tool call if it was not streamed, such as one whose arguments came first."""
        if self.has_started:
            return
        try:
            call = read_json_call(json.loads(self._text), self._schemas)
        except (ValueError, RecursionError):
            call = None
        yield from (self._text,) if call is None else _whole(call)


def _whole(call: GeneratedToolCall) -> Iterator[Part]:
    yield CallStart(call.name)
    yield CallPiece(call.arguments)


class CallReader:
    """Separates tool calls, in one format, from text.

    Args:
        form: format of the calls.
        schemas: schemas of the functions; a call of any other function is returned as text.
    """

    def __init__(self, form: ToolFormat, schemas: Schemas) -> None:
        self._form, self._schemas = form, schemas
        self._pending, self._inner, self._opened = "", "", ""
        self._is_inside = False
        self._is_start = True
        self._json: JsonCallReader | None = None

    @property
    def is_cut(self) -> bool:
        """True if the arguments of the last call have begun but are not complete."""
        return self._json is not None and self._json.is_cut

    def feed(self, text: str) -> Iterator[Part]:
        """Process the next text of an answer; yield text and tool calls that are now complete."""
        self._pending += text
        has_progress = True
        while has_progress and self._pending:
            if self._is_inside:
                has_progress = self._find_close()
                yield from self._read_inner(is_closed=has_progress)
            else:
                before, has_progress = self._find_open()
                if before:
                    yield before

    def end(self) -> Iterator[Part]:
        """Yield the text that is still buffered at the end of the answer."""
        remaining, self._pending = self._pending, ""
        if not self._is_inside:
            yield from (remaining,) if remaining else ()
            return
        self._inner += remaining
        if self._json is not None and self._json.has_started:
            yield from self._json.feed(remaining)
            return
        calls = None if self._form.close else self._form.parse(self._inner, self._schemas)
        if calls is None:
            yield self._opened + self._inner
        for call in calls or ():
            yield from _whole(call)

    def _find_open(self) -> tuple[str, bool]:
        """Return the text before the next tool call, and True if a call begins after this text."""
        if self._is_start and "" in self._form.open:
            stripped = self._pending.lstrip()
            if not stripped:
                return "", False
            self._is_start = False
            if stripped[0] == "{":
                self._open("")
                return "", True
        self._is_start = False
        marks = [mark for mark in self._form.open if mark]
        positions = [(at, mark) for mark in marks if (at := self._pending.find(mark)) >= 0]
        if positions:
            at, mark = min(positions)
            before, self._pending = self._pending[:at], self._pending[at + len(mark) :]
            self._open(mark)
            return before, True
        size = max(_overlap(self._pending, mark) for mark in marks)
        end = len(self._pending) - size
        before, self._pending = self._pending[:end], self._pending[end:]
        return before, False

    def _open(self, mark: str) -> None:
        self._is_inside, self._opened, self._inner = True, mark, ""
        self._json = JsonCallReader(self._schemas) if self._form.is_json else None

    def _find_close(self) -> bool:
        """Move text up to the closing delimiter to the tool call; return True if it was found."""
        close = self._form.close
        if not close:
            self._last, self._pending = self._pending, ""
            self._inner += self._last
            return False
        inner, closed, remaining = self._pending.partition(close)
        if closed:
            self._last, self._pending = inner, remaining
        else:
            end = len(inner) - _overlap(inner, close)
            self._last, self._pending = inner[:end], inner[end:]
        self._inner += self._last
        return bool(closed)

    def _read_inner(self, is_closed: bool) -> Iterator[Part]:
        if self._json is not None:
            yield from self._json.feed(self._last)
        if not is_closed:
            return
        self._is_inside = False
        if self._json is None or not self._json.has_started:
            calls = self._form.parse(self._inner, self._schemas)
            if calls is None:
                yield self._opened + self._inner + self._form.close
                return
            for call in calls:
                yield from _whole(call)
        self._pending = self._pending.removeprefix("\n")


def _overlap(text: str, mark: str) -> int:
    """Return the number of trailing characters of a text that may begin a delimiter (`mark`)."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)
