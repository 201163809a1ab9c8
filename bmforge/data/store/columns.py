"""Document metadata of a token store: source, language, license, date, and quality.

Sources, languages and licenses are stored as indices. ``PREFIX.doc`` has one line of JSON with the
names at these indices, then a binary row per document, in order. The file is optional; without it
documents cannot be selected by metadata.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bmforge.data.sources.document import Document
from bmforge.data.store.sharded import ShardedStore
from bmforge.data.store.token_store import TokenStore
from bmforge.errors import DataError
from bmforge.files import replace_atomically

__all__ = [
    "NAMED",
    "Columns",
    "ColumnsBuilder",
    "columns_path",
    "join_columns",
    "number_of_date",
    "read_columns",
]

NAMED = ("source", "language", "license")  # columns that contain indices of names
_ROW = np.dtype(
    [
        ("source", "<u4"),
        ("language", "<u2"),
        ("license", "<u2"),
        ("date", "<i4"),
        ("quality", "<f4"),
    ]
)
_FORMAT = 1
_OLD = "licence"  # key of the license names in files of earlier versions
_MOST = {name: np.iinfo(_ROW[name]).max for name in NAMED}
_DATE = re.compile(r"(\d{4})(?:-(\d\d))?(?:-(\d\d))?")
QUALITY = "quality"  # name of the document score to store


def columns_path(prefix: str | os.PathLike[str]) -> Path:
    """Return the path ``PREFIX.doc``."""
    return Path(os.fspath(prefix) + ".doc")


@dataclass
class Columns:
    """Metadata of a store's documents, in order; 0 and NaN mean unknown.

    Attributes:
        names: dict from column to the list of names; index 0 is "" (unknown).
        rows: one row per document, in the layout of the file; the date is year x 10000 + month
            x 100 + day, with 0 for unknown parts.
    """

    names: Mapping[str, list[str]] = field(default_factory=lambda: {name: [""] for name in NAMED})
    rows: NDArray[np.void] = field(default_factory=lambda: np.empty(0, dtype=_ROW))

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.rows)

    def write(self, prefix: str | os.PathLike[str]) -> None:
        """Write ``PREFIX.doc`` to a temporary file, and rename it when it is complete."""
        head = {"format": _FORMAT, "documents": len(self), "names": dict(self.names)}
        with replace_atomically(columns_path(prefix)) as file:
            file.write(json.dumps(head, ensure_ascii=False).encode() + b"\n")
            file.write(self.rows.tobytes())


class ColumnsBuilder:
    """Builds `Columns` by adding one document after another."""

    def __init__(self) -> None:
        self._numbers: dict[str, dict[str, int]] = {name: {"": 0} for name in NAMED}
        self._rows: list[tuple[float, ...]] = []

    def add(self, document: Document, source: str, license: str) -> None:
        """Append the metadata of a document, with its source and short license name."""
        values = {"source": source, "language": document.language, "license": license}
        numbers = [_number(self._numbers[name], values[name], _MOST[name]) for name in NAMED]
        quality = document.scores.get(QUALITY, math.nan)
        self._rows.append((*numbers, number_of_date(document.date), quality))

    def build(self) -> Columns:
        """Return the metadata of all added documents."""
        names = {name: list(table) for name, table in self._numbers.items()}
        return Columns(names, np.array(self._rows, dtype=_ROW))


def _number(table: dict[str, int], name: str, most: int) -> int:
    """Return the index of a name, added if it is new; 0 (unknown) if the table is full."""
    if name not in table and len(table) > most:
        return 0
    return table.setdefault(name, len(table))


def number_of_date(date: str) -> int:
    """Convert a date such as ``"2024-05"`` to a number; 0 if it is not a date."""
    match = _DATE.match(date)
    return int("".join((match[1], match[2] or "00", match[3] or "00"))) if match else 0


def join_columns(parts: Sequence[Columns]) -> Columns:
    """Concatenate the document metadata of several stores."""
    numbers: dict[str, dict[str, int]] = {name: {"": 0} for name in NAMED}
    joined = []
    for part in parts:
        rows = np.array(part.rows)
        for name in NAMED:
            mapping = [_number(numbers[name], value, _MOST[name]) for value in part.names[name]]
            rows[name] = np.array(mapping, dtype=np.int64)[rows[name]]
        joined.append(rows)
    names = {name: list(table) for name, table in numbers.items()}
    return Columns(names, np.concatenate(joined) if joined else np.empty(0, dtype=_ROW))


def read_columns(store: TokenStore) -> Columns:
    """Return the metadata of a store's documents.

    Raises:
        DataError: the store has no metadata, or the file is damaged or belongs to another store.
    """
    if isinstance(store, ShardedStore):
        columns = join_columns([read_columns(shard) for shard in store.shards])
    else:
        columns = _read(columns_path(store.prefix))
    if len(columns) != store.num_documents:
        raise DataError(
            f"{str(columns_path(store.prefix))!r} lists {len(columns)} documents, but the store "
            f"has {store.num_documents}. Copy both files again."
        )
    return columns


def _read(path: Path) -> Columns:
    if not path.is_file():
        raise DataError(
            f"{str(path)!r} does not exist, so documents cannot be selected by language, date "
            "or source. Prepare the corpus again with this version."
        )
    try:
        with path.open("rb") as file:
            line = file.readline()
            head = json.loads(line)
        tables = {"license" if key == _OLD else key: table for key, table in head["names"].items()}
        names = {name: [str(value) for value in tables[name]] for name in NAMED}
        if head["format"] != _FORMAT:
            raise ValueError(f"format {head['format']} is not the supported format {_FORMAT}")
        if path.stat().st_size != len(line) + head["documents"] * _ROW.itemsize:
            raise ValueError("the file is truncated")
        rows = np.fromfile(path, dtype=_ROW, offset=len(line))
        for name in NAMED:
            if len(rows) and int(rows[name].max()) >= len(names[name]):
                raise ValueError(f"a document has an unknown {name}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{str(path)!r} is damaged ({error}). Copy the file again.") from error
    return Columns(names, rows)
