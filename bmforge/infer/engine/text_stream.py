"""Incremental detokenization that emits only text that later tokens cannot change.

Incomplete characters and a possible beginning of a stop string are held back. The concatenated
chunks equal the complete text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

__all__ = ["TextStream", "token_data"]

# Number of context tokens decoded with new ones: a token's text may depend on the tokens before it
# (a space, the other bytes of its character).
_BEFORE = 6
_BROKEN = "\ufffd"
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class TextStream:
    """Incremental detokenizer of one answer.

    Args:
        tokenizer: the model's tokenizer.
        stops: stop strings; the text ends before the first occurrence of one.
        hidden: ids whose text is omitted.
        before: prompt ids. They are decoded together with the new ids, because a SentencePiece
            decoder drops the space before the first token.

    Attributes:
        text: text emitted so far.
        is_stopped: whether a stop string has occurred, after which no text is emitted.
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
        self._ids, self._known = self._context(before)  # the first `_known` ids are decoded
        # Earlier values of `_known` at which a character was complete. Decoding begins at the first
        # one, because some decoders treat a whole run of bytes as broken if one character in it is
        # incomplete.
        self._ends = [0, self._known] if self._known else [0]
        self._before = self._tokenizer.decode_written(self._ids[: self._known])
        self._written = ""  # decoded but not emitted
        self.text, self.is_stopped = "", False

    def _context(self, prompt: Sequence[int]) -> tuple[list[int], int]:
        """Return the last prompt ids, and the number of those that form complete characters.

        If possible, the ids start at a character boundary.
        """
        ids = [id for id in prompt if id not in self._hidden]
        boundary = len(ids)
        while (
            boundary
            and len(ids) - boundary < _BEFORE
            and self._is_broken(ids[:boundary][-_BEFORE:], -1)
        ):
            boundary -= 1
        if self._is_broken(ids[:boundary][-_BEFORE:], -1):
            boundary = len(ids)
        starts = range(max(0, boundary - _BEFORE), max(-1, boundary - 2 * _BEFORE), -1)
        begin = next((at for at in starts if not self._is_broken(ids[at:boundary], 0)), starts[0])
        return ids[begin:], boundary - begin

    def _is_broken(self, ids: Sequence[int], edge: int) -> bool:
        """Return True if the text starts (`edge` 0) or ends (-1) with an incomplete character."""
        text: str = self._tokenizer.decode_written(ids)
        return bool(text) and text[edge] == _BROKEN

    def add(self, ids: Sequence[int]) -> str:
        """Add tokens; return the text that can now be emitted."""
        if self.is_stopped:
            return ""
        self._ids += [id for id in ids if id not in self._hidden]
        new = self._decode()
        if not new or new.endswith(_BROKEN):
            return ""
        self._take(new)
        return self._show(is_last=False)

    def finish(self) -> str:
        """Return the remaining text; call it after the last token."""
        if self.is_stopped:
            return ""
        self._take(self._decode())
        return self._show(is_last=True)

    def _decode(self) -> str:
        """Return the text of the ids that have not been decoded yet."""
        if self._known == len(self._ids):
            return ""
        both: str = self._tokenizer.decode_written(self._ids[self._ends[0] :])
        # If a decoder changes earlier text (drops a space), emitted text is kept.
        return both[len(self._before) :]

    def _take(self, new: str) -> None:
        self._written += new
        self._known = len(self._ids)
        self._ends.append(self._known)
        while len(self._ends) > 1 and self._ends[1] <= self._known - _BEFORE:
            del self._ends[0]
        self._before = self._tokenizer.decode_written(self._ids[self._ends[0] :])

    def _show(self, is_last: bool) -> str:
        """Return the new text up to a stop string or a possible beginning of one."""
        stops_at = [at for stop in self._stops if (at := self._written.find(stop)) >= 0]
        withheld = 0
        if stops_at:
            self.is_stopped = True
            end = min(stops_at)
        else:
            withheld = 0 if is_last else max(map(self._overlap, self._stops), default=0)
            end = len(self._written) - withheld
        shown, self._written = self._written[:end], self._written[end:]
        self.text += shown
        return shown

    def _overlap(self, stop: str) -> int:
        """Return the number of trailing characters that may begin a stop string."""
        most = min(len(stop) - 1, len(self._written))
        return next((n for n in range(most, 0, -1) if self._written.endswith(stop[:n])), 0)


def token_data(tokenizer: Any, token: str, id: int) -> bytes:
    """Return the bytes of a token, as far as they do not depend on adjacent tokens.

    Args:
        tokenizer: tokenizer with this token.
        token: token text in the vocabulary.
        id: token id.
    """
    byte = _BYTE.fullmatch(token)
    if byte:
        return bytes([int(byte[1], 16)])
    text: str = tokenizer.decode_written([id])
    table = _byte_characters()
    if _BROKEN in text and all(character in table for character in token):
        return bytes(table[character] for character in token)
    if token.startswith("\u2581") and token[1:] == text:  # a leading space that the decoder drops
        return f" {text}".encode("utf-8", "surrogatepass")
    return text.encode("utf-8", "surrogatepass")


@cache
def _byte_characters() -> dict[str, int]:
    """Return the mapping of byte-level vocabularies from characters to bytes.

    Source: Radford et al., "Language models are unsupervised multitask learners" (2019): printable
    bytes map to themselves, others to the characters from 256 on.
    """
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    table = {chr(byte): byte for byte in shown}
    return table | {chr(256 + number): byte for number, byte in enumerate(others)}
