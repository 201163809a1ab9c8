"""Divide documents into training and validation by their bytes; where they are few, one is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from bmforge.errors import ConfigError

__all__ = ["Split", "cut_end", "split_documents"]

_NEAR_ENOUGH = 0.999  # of the asked bytes; then the search for fitting documents ends
_TOO_FEW = 0.9  # of the asked bytes; with fewer in whole documents, one is cut
_BREAKS = (b"\n\n", b"\n", "\u3002".encode(), b". ", b" ")


@dataclass(frozen=True)
class Split:
    """Which documents are held out.

    Attributes:
        held_out: True where a whole document is.
        cut: the document whose end is, too; None where none is cut.
        cut_bytes: how long that end is, about.
    """

    held_out: NDArray[np.bool_]
    cut: int | None = None
    cut_bytes: int = 0

    def divide(self, number: int, text: str) -> tuple[str, str]:
        """Return what of a document is for training and what is held out; either may be empty."""
        if number == self.cut:
            return cut_end(text, self.cut_bytes)
        return ("", text) if self.held_out[number] else (text, "")


def split_documents(
    digests: Sequence[bytes], sizes_bytes: Sequence[int], fraction: float, seed: int
) -> Split:
    """Choose what is held out: about `fraction` of all bytes.

    The documents are drawn in the order of a hash of (seed, digest), each taken if it still fits.
    Where a tenth of the bytes or more is then missing, as with few documents, the end of one that
    did not fit is held out too. So the choice depends on the set of documents and the seed, not on
    their order.

    Args:
        digests: one `text_digest` per document, all different.
        sizes_bytes: UTF-8 bytes per document.
        fraction: share of all bytes to hold out, 0 <= fraction < 1; 0 holds out nothing.

    Raises:
        ConfigError: `fraction` is out of range.
    """
    if not 0 <= fraction < 1:
        raise ConfigError(f"validation_fraction={fraction}: needed is 0 <= validation_fraction < 1")
    held_out = np.zeros(len(digests), dtype=np.bool_)
    key = blake2b(repr(seed).encode(), digest_size=16).digest()
    order = sorted(
        range(len(digests)), key=lambda i: blake2b(digests[i], key=key, digest_size=16).digest()
    )
    target = fraction * sum(sizes_bytes)
    taken = 0
    for i in order:
        if taken >= _NEAR_ENOUGH * target:
            break
        if taken + sizes_bytes[i] <= target:
            held_out[i] = True
            taken += sizes_bytes[i]
    missing = int(target - taken)
    if missing < 1 or taken >= _TOO_FEW * target:
        return Split(held_out)
    # None of those left fitted, so each is longer than what is missing.
    left = [i for i in order if not held_out[i] and sizes_bytes[i] > missing]
    if not left:
        return Split(held_out)
    roomy = (i for i in left if sizes_bytes[i] >= 2 * missing)
    return Split(held_out, next(roomy, left[0]), missing)


def cut_end(text: str, size_bytes: int) -> tuple[str, str]:
    """Cut the end off a text, about so many bytes of it, where a paragraph, line or word ends.

    Args:
        text: of two characters at least.
        size_bytes: UTF-8 bytes of the end, less than the text's; it may become half more or less.

    Returns:
        the text before, and the end; neither is empty.
    """
    data = text.encode()
    near = len(data) - size_bytes
    low, high = max(near - size_bytes // 2, 1), min(near + size_bytes // 2, len(data) - 1)
    for mark in _BREAKS:
        first = max(low - len(mark), 0)
        found = (data.rfind(mark, first, near + len(mark) - 1), data.find(mark, near, high))
        ends = [at + len(mark) for at in found if at >= 0]
        if ends:
            near = min(ends, key=lambda end: abs(end - near))
            break
    near = min(max(near, 1), len(data) - 1)
    while 0 < near < len(data) and data[near] & 0xC0 == 0x80:  # inside a character
        near += 1
    if near == len(data):  # the last character is all there would be
        near = len(text[:-1].encode())
    return data[:near].decode().rstrip(" \n") or data[:near].decode(), data[near:].decode()
