"""Stages that process all documents together: exact deduplication and the validation split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bmforge.data.dedup.sort import SortedRows, make_rows
from bmforge.data.prepare.corpus_index import CorpusIndex
from bmforge.data.prepare.documents import read_digests
from bmforge.data.prepare.masks import new_mask
from bmforge.data.prepare.spans import Repeats
from bmforge.data.prepare.split import choose_held_out, split_keys

__all__ = ["SORT_BYTES", "choose_split", "find_copies"]

SORT_BYTES = 1 << 25  # maximum bytes of rows in memory, 32 per document
_KEYS = 1 << 16


def find_copies(
    documents: Path,
    counts: Sequence[int],
    folder: Path,
    bound_bytes: int,
    earlier: Sequence[CorpusIndex] = (),
) -> dict[str, Any]:
    """Write the mask ``kept``, which is False for texts that occurred before.

    Args:
        documents: folder of the first stage.
        counts: documents per shard, at least one in total.
        folder: output folder of the mask.
        bound_bytes: largest size of the digests in memory, in bytes.
        earlier: indexes of earlier corpora.

    Returns:
        dict with ``files`` (file names and hashes), ``documents`` and ``read_bytes`` (number and
        raw bytes of the dropped documents), and ``text_bytes`` (of the remaining documents).
    """
    total = sum(counts)
    rows = SortedRows(folder / "rows", bound_bytes)
    text_bytes = 0
    files: dict[str, str] = {}
    with new_mask(folder, "kept", total, files) as mask:
        for first, digests in _each_shard(documents, counts):
            positions = np.arange(first, first + len(digests))
            rows.add(make_rows(digests["digest"].tobytes(), positions, digests["read_bytes"]))
            text_bytes += int(digests["text_bytes"].sum())
        mask[:] = True
        last = None
        read_bytes, copies = 0, 0
        for part in rows:
            same = np.zeros(len(part), dtype=np.bool_)
            same[1:] = (part["high"][1:] == part["high"][:-1]) & (
                part["low"][1:] == part["low"][:-1]
            )
            same[0] = last == (part["high"][0], part["low"][0])
            last = part["high"][-1], part["low"][-1]
            for index in earlier:
                same |= index.holds(part)
            mask[part["position"][same]] = False
            copies += int(same.sum())
            read_bytes += int(part["size_bytes"][same].sum())
        for first, digests in _each_shard(documents, counts):
            text_bytes -= int(digests["text_bytes"][~mask[first : first + len(digests)]].sum())
    rows.close()
    result = {"documents": copies, "read_bytes": read_bytes, "text_bytes": text_bytes}
    return {"files": files, **result}


def choose_split(
    documents: Path,
    counts: Sequence[int],
    mask: NDArray[np.bool_],
    folder: Path,
    *,
    fraction: float,
    seed: int,
    bound_bytes: int,
    repeats: Repeats | None = None,
) -> dict[str, Any]:
    """Write the mask ``held_out`` of the documents that `split_documents` assigns to validation.

    The sizes of the documents exclude the repeated spans that will be cut (`repeats`).

    Returns:
        dict with ``files`` (file names and hashes), ``cut`` and ``cut_bytes`` (see `Split`), and
        ``has_any`` (True if any text is held out).
    """
    rows = SortedRows(folder / "rows", bound_bytes)
    total_bytes = 0
    files: dict[str, str] = {}
    for first, digests in _each_shard(documents, counts):
        if repeats is not None:
            repeats.update_sizes(first, digests["text_bytes"])
        places = np.flatnonzero(mask[first : first + len(digests)])
        total_bytes += int(digests["text_bytes"][places].sum())
        for at in range(0, len(places), _KEYS):
            some = places[at : at + _KEYS]
            joined = digests["digest"][some].tobytes()
            keys = split_keys((joined[i : i + 16] for i in range(0, len(joined), 16)), seed)
            rows.add(make_rows(keys, first + some, digests["text_bytes"][some]))
    with new_mask(folder, "held_out", sum(counts), files) as held_out:
        held_out[:] = False
        cut, cut_bytes = choose_held_out(rows, total_bytes, fraction, held_out)
        has_any = cut is not None or bool(held_out.any())
    rows.close()
    return {"files": files, "cut": cut, "cut_bytes": cut_bytes, "has_any": has_any}


def _each_shard(documents: Path, counts: Sequence[int]) -> Iterator[tuple[int, NDArray[np.void]]]:
    """Yield the position of the first document, and the text digests, of each shard."""
    first = 0
    for number, count in enumerate(counts):
        yield first, read_digests(documents, number)
        first += count
