"""Records of input files, which are read first and parsed into documents on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from bmforge.data.clean.drop import Drop
from bmforge.data.sources.document import Document
from bmforge.errors import DataError

__all__ = ["Reader", "ReadOptions", "Record", "Where", "failed_record", "show_name"]


@dataclass(frozen=True)
class ReadOptions:
    """Options of the file readers.

    Attributes:
        text_field: field of a table or of .jsonl that contains the text.
        html_reader: extractor of a page's main text, ``resiliparse`` or ``trafilatura``.
        errors: "replace" to decode single invalid bytes as U+FFFD, "strict" to raise an error.
        encoding: encoding of text that is not UTF-8; "" to use the declared or detected one.
    """

    text_field: str = "text"
    html_reader: str = "resiliparse"
    errors: str = "replace"
    encoding: str = ""


@dataclass(frozen=True)
class Where:
    """Location of a stream or record: the file, the archive member, and the range to read.

    Attributes:
        source: file on disk.
        inside: path of archive members inside the file; empty for the file itself.
        end: end of the range: one past the last byte, or for Parquet the last row; -1 for all.
        line: number of the first line or row.
        encoding: detected encoding of the whole file if it is not UTF-8; "" if unknown.
        budget_bytes: limit on the decompressed bytes held in memory.
    """

    source: str
    inside: str = ""
    end: int = -1
    line: int = 1
    encoding: str = ""
    budget_bytes: int = 1 << 28

    def place(self, number: int | str) -> str:
        """Return the location string of record `number`, for `Document.place`."""
        return f"{self.inside}:{number}" if self.inside else str(number)

    def whole(self) -> str:
        """Return the location string of a document that is the whole file or member."""
        return self.inside or "1"

    def __str__(self) -> str:
        return f"{self.source}:{self.inside}" if self.inside else self.source


@dataclass(frozen=True)
class Record:
    """One unparsed record of an input file.

    Attributes:
        place: location of the record in its file, for `Document.place`.
        size_bytes: raw size of the record.
        parse: function that returns the document or a `Drop`, or raises `DataError` for damage.
    """

    place: str
    size_bytes: int
    parse: Callable[[], Document | Drop]


Reader = Callable[[BinaryIO, Where, ReadOptions], Iterator[Record]]


def show_name(name: str) -> str:
    r"""Return a file name in printable form, with invalid UTF-8 bytes escaped as ``\xe9``."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def failed_record(position: str, size_bytes: int, error: DataError) -> Record:
    """Return a record for damaged input; parsing the record raises `error`."""

    def parse() -> Document:
        raise error

    return Record(position, size_bytes, parse)
