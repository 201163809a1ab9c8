"""Entries of a source: read first, and parsed on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from bmforge.data.clean.drop import Drop
from bmforge.data.sources.document import Document
from bmforge.errors import DataError

__all__ = ["Reader", "ReadOptions", "Record", "Where", "fail", "show_name"]


@dataclass(frozen=True)
class ReadOptions:
    """How to read.

    Attributes:
        text_field: the field of a table or of .jsonl that holds the text.
        html_reader: what finds the main text of a page, ``resiliparse`` or ``trafilatura``.
        errors: "replace" puts U+FFFD for single bytes that do not decode, "strict" refuses them.
    """

    text_field: str = "text"
    html_reader: str = "resiliparse"
    errors: str = "replace"


@dataclass(frozen=True)
class Where:
    """Where an entry comes from.

    Attributes:
        source: the file on disk.
        inside: the members of archives from there on; empty for the file itself.
        end: one past the last byte to read, the last row of Parquet, -1 for all.
        line: the number of the first line or row.
        encoding: what the whole of it looks like, where that is not UTF-8; "" is not known.
        budget_bytes: how much of it may be in memory at once when unpacked.
    """

    source: str
    inside: str = ""
    end: int = -1
    line: int = 1
    encoding: str = ""
    budget_bytes: int = 1 << 28

    def place(self, number: int | str) -> str:
        """Return the place of an entry, as a document keeps it."""
        return f"{self.inside}:{number}" if self.inside else str(number)

    def whole(self) -> str:
        """Return the place of a document that is the whole file or member."""
        return self.inside or "1"

    def __str__(self) -> str:
        return f"{self.source}:{self.inside}" if self.inside else self.source


@dataclass(frozen=True)
class Record:
    """One entry of a source.

    Attributes:
        place: where it is, as a document keeps it.
        size_bytes: of the entry as it lies there.
        parse: makes the document of it, or says why it is none; `DataError` where it is damaged.
    """

    place: str
    size_bytes: int
    parse: Callable[[], Document | Drop]


Reader = Callable[[BinaryIO, Where, ReadOptions], Iterator[Record]]


def show_name(name: str) -> str:
    r"""Return a file name with bytes that are not UTF-8 as ``\xe9``, so that it can be written."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def fail(place: str, size_bytes: int, error: DataError) -> Record:
    """Return the record of an entry that is damaged."""

    def parse() -> Document:
        raise error

    return Record(place, size_bytes, parse)
