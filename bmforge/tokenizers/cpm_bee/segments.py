"""Segment tree of a CPM-Bee document, in which every key and text is a segment.

Segment 0 is ``<root>``; the others follow depth first, in the order of the keys. The relation
between two segments encodes the number of steps from one up to their nearest common ancestor, and
from there down to the other.
Source: ``convert_data_to_id`` of OpenBMB/CPM-Bee, ``cpm_live/training_tasks/bee/pretrain.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bmforge.errors import DataError

__all__ = [
    "ANSWER_KEY",
    "MAX_DEPTH",
    "MAX_NESTING",
    "Segment",
    "flatten_document",
    "segment_relations",
]

ANSWER_KEY = "<ans>"
MAX_DEPTH = 8
MAX_NESTING = 16
_ROOT = "<root>"


class Segment(NamedTuple):
    """Segment of a document: a key or a text.

    Attributes:
        text: the key or text.
        parent: index of the parent segment; -1 for the root.
        depth: depth in the tree; 0 for the root.
        path: keys on the path to the segment, including the segment itself if it is a key.
        answer: True for a text under ``<ans>``, which the model generates.
        within_answer: True for keys and texts under ``<ans>``.
    """

    text: str
    parent: int
    depth: int
    path: tuple[str, ...]
    answer: bool = False
    within_answer: bool = False


def flatten_document(
    document: Any,
    *,
    blank_answers: bool = False,
    order_key: bytes | None = None,
    max_nesting: int = MAX_NESTING,
) -> list[Segment]:
    """Flatten a nested dict of texts into a list of segments.

    Args:
        document: nested dicts of texts; the top-level key ``<ans>`` contains the answers.
        blank_answers: True to treat texts under ``<ans>`` as empty, as for a prompt.
        order_key: seed for shuffling the keys under ``<ans>``; if None, their order is kept.
        max_nesting: maximum depth of a text below the root.

    Raises:
        DataError: the document is not a nested dict of texts, is too deep, or has no text under
            ``<ans>``.
    """
    if not isinstance(document, dict):
        raise DataError(
            "a document must be a dict of strings, such as {'input': '...', '<ans>': ''}, not "
            f"a {type(document).__name__}."
        )
    if ANSWER_KEY not in document:
        raise DataError(
            f"the document with the keys {list(document)} has no {ANSWER_KEY!r}. Add "
            f"{ANSWER_KEY!r}: '' for one answer, or a dict of answers such as "
            f"{ANSWER_KEY!r}: {{'<mask_0>': ''}}."
        )
    segments = [Segment(_ROOT, -1, 0, ())]
    walk = _Walk(segments, blank_answers, order_key, max_nesting)
    walk.add(document, 0, (), False)
    if not any(segment.answer for segment in segments):
        raise DataError(
            f"{ANSWER_KEY!r} of the document is {document[ANSWER_KEY]!r}, which has no slot for "
            "an answer. Use '' for one answer, or a dict with '' for each answer."
        )
    return segments


class _Walk(NamedTuple):
    segments: list[Segment]
    blank_answers: bool
    order_key: bytes | None
    max_nesting: int

    def add(self, data: Any, parent: int, path: tuple[str, ...], within: bool) -> None:
        """Append the segments of nested data, depth first."""
        depth = self.segments[parent].depth + 1
        if depth > self.max_nesting:
            raise DataError(
                f"the document is nested deeper than max_nesting={self.max_nesting} at "
                f"{_shorten(path)}. Flatten the document."
            )
        if isinstance(data, dict):
            for key in self._ordered(data, path, within):
                if not isinstance(key, str):
                    raise DataError(f"the key {key!r} at {_shorten(path)} must be a string.")
                key_path = (*path, key)
                self.segments.append(Segment(key, parent, depth, key_path, within_answer=within))
                below = within or (depth == 1 and key == ANSWER_KEY)
                self.add(data[key], len(self.segments) - 1, key_path, below)
            return
        if within and self.blank_answers and (data is None or isinstance(data, str)):
            data = ""
        if not isinstance(data, str):
            raise DataError(
                f"the value at {_shorten(path)} is {data!r} of type {type(data).__name__} "
                "(needed: a string or a dict of strings). Write numbers as strings, and lists as "
                "dicts."
            )
        self.segments.append(Segment(data, parent, depth, path, within, within))

    def _ordered(self, data: dict[Any, Any], path: tuple[str, ...], within: bool) -> list[Any]:
        keys = list(data)
        if not within or self.order_key is None:
            return keys
        secret = self.order_key
        digests = [blake2b(repr((path, key)).encode(), key=secret).digest() for key in keys]
        return [keys[i] for i in sorted(range(len(keys)), key=digests.__getitem__)]


def segment_relations(
    parents: Sequence[int], depths: Sequence[int], max_depth: int = MAX_DEPTH
) -> NDArray[np.int32]:
    """Return the relations between all pairs of segments.

    Args:
        parents: index of each segment's parent; parents precede children; -1 for the root.
        depths: depth of each segment in the tree; 0 for the root.
        max_depth: steps in one direction are clamped to ``max_depth - 1``.

    Shape:
        returns (n * n,): at ``q * n + k`` the relation of segment q to segment k, which is 0 if
        q = k, else ``up * max_depth + down + 1``; 1 is reserved for segments of other samples.

    Peak memory: a few (n, n) arrays.
    """
    count, deepest = len(parents), max(depths, default=0)
    ancestors = np.full((count, deepest + 1), -1, dtype=np.int32)
    for i, (parent, depth) in enumerate(zip(parents, depths, strict=True)):
        if parent >= 0:
            ancestors[i] = ancestors[parent]
        ancestors[i, depth] = i
    common = np.full((count, count), -1, dtype=np.int32)
    for column in ancestors.T:
        common += (column[:, None] == column[None, :]) & (column[:, None] >= 0)
    levels = np.asarray(depths, dtype=np.int32)
    up = np.minimum(levels[:, None] - common, max_depth - 1)
    down = np.minimum(levels[None, :] - common, max_depth - 1)
    related = up * max_depth + down
    return np.where(related == 0, 0, related + 1).astype(np.int32).ravel()


def _shorten(path: tuple[str, ...]) -> str:
    names = path if len(path) <= 6 else (*path[:3], "...", *path[-2:])
    return ".".join(map(str, names)) or "the top"
