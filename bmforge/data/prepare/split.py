"""Splits a corpus into training and validation sets by size; one document may be split in two."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from bmforge.data.dedup.sort import SortedRows, make_rows
from bmforge.errors import ConfigError

__all__ = [
    "Split",
    "check_fraction",
    "choose_held_out",
    "cut_end",
    "split_documents",
    "split_keys",
]

_NEAR_ENOUGH = 0.999  # fraction of the requested bytes at which the search for documents ends
_TOO_FEW = 0.9  # fraction of the requested bytes below which one document is cut in two
_WALK_ROWS = 1 << 12
_BREAKS = (b"\n\n", b"\n", "\u3002".encode(), b". ", b" ")


@dataclass(frozen=True)
class Split:
    """Documents that are held out for validation.

    Attributes:
        held_out: mask of whole documents that are held out.
        cut: position of the document whose last part is also held out; None if no document is cut.
        cut_bytes: approximate size of this part in bytes.
    """

    held_out: NDArray[np.bool_]
    cut: int | None = None
    cut_bytes: int = 0

    def divide(self, number: int, text: str) -> tuple[str, str]:
        """Return the training part and the held-out part of a document; either may be empty."""
        if number == self.cut:
            return cut_end(text, self.cut_bytes)
        return ("", text) if self.held_out[number] else (text, "")


def split_documents(
    digests: Sequence[bytes], sizes_bytes: Sequence[int], fraction: float, seed: int
) -> Split:
    """Choose documents with about `fraction` of all bytes for validation.

    The documents are visited in the order of a hash of (seed, digest); each one that fits into the
    remaining size is selected. If a tenth of the bytes or more is then missing, as with few
    documents, the last part of a document that did not fit is held out too. So the choice depends
    on the set of documents and the seed, not on their order.

    Args:
        digests: one `text_digest` per document, all different.
        sizes_bytes: UTF-8 bytes per document.
        fraction: fraction of all bytes to hold out, 0 <= fraction < 1; 0 to hold out nothing.
        seed: random seed of the order.

    Raises:
        ConfigError: `fraction` is out of range.
    """
    check_fraction(fraction)
    held_out = np.zeros(len(digests), dtype=np.bool_)
    rows = SortedRows(None, sys.maxsize)
    sizes = np.array(sizes_bytes, dtype=np.int64)
    rows.add(make_rows(split_keys(digests, seed), np.arange(len(digests)), sizes))
    cut, cut_bytes = choose_held_out(rows, int(sizes.sum()), fraction, held_out)
    return Split(held_out, cut, cut_bytes)


def check_fraction(fraction: float) -> None:
    """Raise `ConfigError` if the held-out fraction is not in [0, 1)."""
    if not 0 <= fraction < 1:
        raise ConfigError(f"validation_fraction={fraction} must be at least 0 and below 1.")


def split_keys(digests: Iterable[bytes], seed: int) -> list[bytes]:
    """Return the hash of (seed, digest) that orders documents for the split."""
    key = blake2b(repr(seed).encode(), digest_size=16).digest()
    return [blake2b(digest, key=key, digest_size=16).digest() for digest in digests]


def choose_held_out(
    ordered: Iterable[NDArray[np.void]], total_bytes: int, fraction: float, held_out: NDArray
) -> tuple[int | None, int]:
    """Choose held-out documents; return the document to cut in two and the bytes to cut.

    Args:
        ordered: rows (`sort.ROW`) in the order of `split_keys`; read once or twice.
        total_bytes: UTF-8 bytes of all documents.
        fraction: fraction of all bytes to hold out.
        held_out: mask to set, in memory or on disk; False everywhere before the call.
    """
    target = fraction * total_bytes
    taken = 0
    for position, size in _walk(ordered):
        if taken >= _NEAR_ENOUGH * target:
            break
        if taken + size <= target:
            held_out[position] = True
            taken += size
    missing = int(target - taken)
    if missing < 1 or taken >= _TOO_FEW * target:
        return None, 0
    # No remaining document fits, so each of them is longer than the missing bytes.
    first = None
    for position, size in _walk(ordered):
        if held_out[position] or size <= missing:
            continue
        if size >= 2 * missing:
            return position, missing
        first = position if first is None else first
    return first, missing if first is not None else 0


def _walk(ordered: Iterable[NDArray[np.void]]) -> Iterator[tuple[int, int]]:
    for rows in ordered:
        for at in range(0, len(rows), _WALK_ROWS):
            part = rows[at : at + _WALK_ROWS]
            yield from zip(part["position"].tolist(), part["size_bytes"].tolist(), strict=True)


def cut_end(text: str, size_bytes: int) -> tuple[str, str]:
    """Cut about `size_bytes` off a text's end, after a complete paragraph, line or word.

    Args:
        text: text of at least two characters.
        size_bytes: target size of the second part in UTF-8 bytes, less than the size of the text;
            the actual size differs from it by at most 50%.

    Returns:
        the two parts of the text; neither is empty.
    """
    data = text.encode()
    near = len(data) - size_bytes
    low, high = max(near - size_bytes // 2, 1), min(near + size_bytes // 2, len(data) - 1)
    for mark in _BREAKS:
        first = max(low - len(mark), 0)
        cut_points = (data.rfind(mark, first, near + len(mark) - 1), data.find(mark, near, high))
        ends = [at + len(mark) for at in cut_points if at >= 0]
        if ends:
            near = min(ends, key=lambda end: abs(end - near))
            break
    near = min(max(near, 1), len(data) - 1)
    while 0 < near < len(data) and data[near] & 0xC0 == 0x80:  # inside a character
        near += 1
    if near == len(data):  # the end would be empty
        near = len(text[:-1].encode())
    return data[:near].decode().rstrip(" \n") or data[:near].decode(), data[near:].decode()
