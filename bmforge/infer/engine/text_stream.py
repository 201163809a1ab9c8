"""Tokens to text while they are written: nothing is shown that a later token could change.

Held back are characters whose last bytes are still to come, and what may be the beginning of a stop
string; so the pieces joined are the whole text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

__all__ = ["TextStream", "token_data"]

# So many tokens in front of new ones are decoded with them: what a token looks like may depend on
# what is before it (a blank, the other bytes of its character).
_BEFORE = 6
_BROKEN = "\ufffd"
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class TextStream:
    """The text of one answer.

    Args:
        tokenizer: the model's.
        stops: the text ends in front of the first of them that comes.
        hidden: ids that stand for no text.
        before: ids of the prompt. The text is what the new ids add to the text of all of them: a
            SentencePiece decoder drops the space in front of the first token alone.

    Attributes:
        text: all that was shown.
        is_stopped: a stop string came; nothing is shown any more.
    """

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str] = (),
        hidden: Sequence[int | None] = (),
        before: Sequence[int] = (),
    ) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._hidden = frozenset(id for id in hidden if id is not None)
        self._ids, self._known = self._context(before)  # `_known` of the ids have their text
        # Where characters ended: what `_known` was. Decoding begins at the first of them, as some
        # decoders take all bytes in a row for broken where those of one character are not whole.
        self._ends = [0, self._known] if self._known else [0]
        self._before = self._tokenizer.decode_written(self._ids[: self._known])
        self._written = ""  # behind what was shown
        self.text, self.is_stopped = "", False

    def _context(self, prompt: Sequence[int]) -> tuple[list[int], int]:
        """Return the last ids of a prompt, and how many of them end with a whole character.

        The ids begin where a character begins, if one of the last tokens does.
        """
        ids = [id for id in prompt if id not in self._hidden]
        known = len(ids)
        while known and len(ids) - known < _BEFORE and self._is_broken(ids[:known][-_BEFORE:], -1):
            known -= 1
        if self._is_broken(ids[:known][-_BEFORE:], -1):
            known = len(ids)
        starts = range(max(0, known - _BEFORE), max(-1, known - 2 * _BEFORE), -1)
        begin = next((at for at in starts if not self._is_broken(ids[at:known], 0)), starts[0])
        return ids[begin:], known - begin

    def _is_broken(self, ids: Sequence[int], place: int) -> bool:
        """Return True if the text of ids begins (0) or ends (-1) with part of a character."""
        text: str = self._tokenizer.decode_written(ids)
        return bool(text) and text[place] == _BROKEN

    def add(self, ids: Sequence[int]) -> str:
        """Take tokens; return what can be shown now."""
        if self.is_stopped:
            return ""
        self._ids += [id for id in ids if id not in self._hidden]
        new = self._decode()
        if not new or new.endswith(_BROKEN):
            return ""
        self._take(new)
        return self._show(is_last=False)

    def finish(self) -> str:
        """Return what is left: no token comes any more."""
        if self.is_stopped:
            return ""
        self._take(self._decode())
        return self._show(is_last=True)

    def _decode(self) -> str:
        """Return the text of ids whose text is not known yet."""
        if self._known == len(self._ids):
            return ""
        both: str = self._tokenizer.decode_written(self._ids[self._ends[0] :])
        # Where a decoder changes what was before, as it takes a blank away, that stays as it was.
        return both[len(self._before) :]

    def _take(self, new: str) -> None:
        self._written += new
        self._known = len(self._ids)
        self._ends.append(self._known)
        while len(self._ends) > 1 and self._ends[1] <= self._known - _BEFORE:
            del self._ends[0]
        self._before = self._tokenizer.decode_written(self._ids[self._ends[0] :])

    def _show(self, is_last: bool) -> str:
        """Return what may be shown of what is written: up to a stop, or what may begin one."""
        found = [place for stop in self._stops if (place := self._written.find(stop)) >= 0]
        held = 0
        if found:
            self.is_stopped = True
            end = min(found)
        else:
            held = 0 if is_last else max(map(self._overlap, self._stops), default=0)
            end = len(self._written) - held
        shown, self._written = self._written[:end], self._written[end:]
        self.text += shown
        return shown

    def _overlap(self, stop: str) -> int:
        """Return how many characters at the end may be the beginning of a stop string."""
        most = min(len(stop) - 1, len(self._written))
        return next((n for n in range(most, 0, -1) if self._written.endswith(stop[:n])), 0)


def token_data(tokenizer: Any, token: str, id: int) -> bytes:
    """Return the bytes that a token adds to a text, as far as it decides that alone.

    Args:
        tokenizer: whose.
        token: how the vocabulary has it.
        id: its number.
    """
    byte = _BYTE.fullmatch(token)
    if byte:
        return bytes([int(byte[1], 16)])
    text: str = tokenizer.decode_written([id])
    table = _byte_characters()
    if _BROKEN in text and all(character in table for character in token):
        return bytes(table[character] for character in token)
    if token.startswith("\u2581") and token[1:] == text:  # a blank that is left out at the front
        return f" {text}".encode("utf-8", "surrogatepass")
    return text.encode("utf-8", "surrogatepass")


@cache
def _byte_characters() -> dict[str, int]:
    """Return the characters by which byte-level vocabularies write bytes.

    Source: Radford et al., "Language models are unsupervised multitask learners" (2019): a byte
    that shows is itself, the others are those from 256 on.
    """
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    table = {chr(byte): byte for byte in shown}
    return table | {chr(256 + number): byte for number, byte in enumerate(others)}
