"""Reads tables: .csv and .tsv with a header row, .parquet, and .arrow files of `datasets`."""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any, BinaryIO

from bmforge.data.sources.document import Document
from bmforge.data.sources.encoding import (
    SAMPLE_BYTES,
    Decoded,
    decode,
    detect_encoding,
    may_replace,
)
from bmforge.data.sources.lines import find_text
from bmforge.data.sources.metadata import METADATA_COLUMNS, read_metadata
from bmforge.data.sources.record import ReadOptions, Record, Where, failed_record
from bmforge.errors import DataError, MissingDependencyError

__all__ = ["read_arrow", "read_csv", "read_parquet", "read_tsv"]

_LONGEST_FIELD = 1 << 28
_BATCH_ROWS = 256
_HIGHEST_RATIO = 100  # maximum ratio of the rows' size to the file's size, for large tables
_LARGE_BYTES = 1 << 25
_UNDECODED = re.compile("[\udc80-\udcff]")
_RAW = "latin-1"  # maps every byte to one character
_MARKS = ',;\t"\r\n'
_SHIFTING = ("hz", "iso2022", "utf-7")  # 7-bit encodings; ASCII bytes are parts of characters


def read_csv(stream: BinaryIO, where: Where, options: ReadOptions) -> Iterator[Record]:
    """Yield one record per row; the first row has the column names, separated by , ; or tabs."""
    yield from _read_rows(stream, where, options, "excel")


def read_tsv(stream: BinaryIO, where: Where, options: ReadOptions) -> Iterator[Record]:
    """Yield one record per tab-separated row; the first row contains the column names."""
    yield from _read_rows(stream, where, options, "excel-tab")


def _read_rows(
    stream: BinaryIO, where: Where, options: ReadOptions, dialect: str
) -> Iterator[Record]:
    encoding, is_raw = _choose_encoding(stream.peek(SAMPLE_BYTES), where, options)  # type: ignore[attr-defined]
    # An invalid byte becomes a lone surrogate, so that only its row fails.
    lines = io.TextIOWrapper(stream, encoding, errors="surrogateescape", newline="")
    csv.field_size_limit(_LONGEST_FIELD)
    clean = (line.replace("\0", "\x1a" if is_raw else "\ufffd") for line in lines)
    head = next(clean, "")
    if is_raw:
        head = head.removeprefix(codecs.BOM_UTF8.decode(_RAW))
    shown = _decode_field(head, f"{where}:1", options).text if is_raw else head
    delimiter = _find_delimiter(shown, options.text_field, dialect)
    rows = _split_rows(chain([head] if head else [], clean), where, dialect, delimiter)
    _, names = next(rows, (0, []))
    if isinstance(names, Record) or not names:
        raise DataError(
            f"file {str(where)!r} has no header row with the names of the columns. Remove it "
            "from the input."
        )
    if is_raw:
        names = [_decode_field(name, f"{where}:1", options).text for name in names]
    find_text(dict.fromkeys(names, ""), options.text_field, f"{where}:1")
    if names.count(options.text_field) > 1:
        raise DataError(
            f"{where}:1: several columns have the name {options.text_field!r}. Rename all but one."
        )
    for line, row in rows:
        if isinstance(row, Record):
            yield row
        elif row:
            parse = partial(_parse_row, names, row, where, line, options, is_raw)
            size = len("".join(row).encode(_RAW if is_raw else "utf-8", "replace"))
            yield Record(where.place(line), size, parse)


def _split_rows(
    lines: Iterator[str], where: Where, dialect: str, delimiter: str
) -> Iterator[tuple[int, list[str] | Record]]:
    """Yield the number of each row's last line, and its fields or an error record.

    An unpaired quotation mark joins several lines into one row. It is common in tab-separated
    tables, as many programs write these without quoting. So each line of such a row becomes a
    separate row if the mark does not begin or end a field, or if each line has all columns. In
    tables with another delimiter, the row is an error, because its lines cannot be separated.
    """
    taken: list[str] = []  # lines of the current row

    def take() -> Iterator[str]:
        for line in lines:
            taken.append(line)
            yield line

    reader = csv.reader(take(), dialect, delimiter=delimiter, strict=True)
    num_tabs: int | None = None
    while True:
        taken.clear()
        first = reader.line_num + 1
        row: list[str] | None = None
        try:
            row = next(reader, None)
            if row is None:
                return
        except csv.Error as error:
            if len("".join(taken)) > _LONGEST_FIELD:
                raise DataError(
                    f"{where}:{first} is not a valid table row ({error}). Correct or remove the "
                    "row."
                ) from error
        if num_tabs is None:
            num_tabs = len(row or ()) - 1
        is_split = row is None or (
            len(taken) > 1 and num_tabs > 0 and all(line.count("\t") == num_tabs for line in taken)
        )
        if delimiter == "\t" and is_split:
            for number, line in enumerate(taken, first):
                yield number, line.rstrip("\r\n").split("\t")
        elif row is None and len(taken) == 1 and taken[0].count('"') % 2 == 0:  # as in: "a" b
            yield first, next(csv.reader(taken, dialect, delimiter=delimiter))
        elif row is None:
            failure = DataError(
                f"{where}:{first}: a quotation mark is not closed, so that lines {first} to "
                f"{reader.line_num} cannot be separated into rows. Add or remove a quotation "
                "mark."
            )
            size = len("".join(taken).encode("utf-8", "surrogateescape"))
            yield reader.line_num, failed_record(where.place(first), size, failure)
        else:
            yield reader.line_num, row


def _choose_encoding(sample: bytes, where: Where, options: ReadOptions) -> tuple[str, bool]:
    """Return the encoding of a table, and True if it is `_RAW` and every field is decoded later.

    With an encoding that the user names, every field is either UTF-8 or in this encoding, so that a
    table may contain both. This needs an encoding in which delimiters and quotes are ASCII bytes.
    """
    encoding, named = where.encoding or detect_encoding(sample), options.encoding
    if named and not encoding.startswith(("utf-16", "utf-32")):
        has_shifts = codecs.lookup(named).name.startswith(_SHIFTING)
        if not has_shifts and _MARKS.encode(named) == _MARKS.encode():
            return _RAW, True
        if not encoding.startswith("utf-") or (has_shifts and sample.isascii()):
            encoding = named
    return "utf-8-sig" if encoding in ("", "utf-8") else encoding, False


def _decode_field(field: str, location: str, options: ReadOptions) -> Decoded:
    raw = field.encode(_RAW)
    return decode(raw, location, errors=options.errors, encoding=options.encoding)


def _find_delimiter(head: str, text_field: str, dialect: str) -> str:
    """Return the delimiter of a table: a semicolon or tab if only that gives the text column.

    Spreadsheet programs write .csv with semicolons where the comma is the decimal sign.
    """
    usual = csv.get_dialect(dialect).delimiter
    for delimiter in (usual, ";", "\t"):
        if text_field in next(csv.reader([head], dialect, delimiter=delimiter), []):
            return delimiter
    return usual


def _parse_row(
    names: list[str],
    row: list[str],
    where: Where,
    line: int,
    options: ReadOptions,
    is_raw: bool = False,
) -> Document:
    location = f"{where}:{line}"
    if len(row) != len(names):
        raise DataError(
            f"{location}: the row has {len(row)} columns, but the header has {len(names)}. "
            "Correct or remove the row."
        )
    record = dict(zip(names, row, strict=True))
    decoded = {n: _decode_field(v, location, options) for n, v in record.items()} if is_raw else {}
    record |= {name: field.text for name, field in decoded.items()}
    text = record.get(options.text_field, "")
    replaced = len(_UNDECODED.findall(text))
    if options.errors == "replace" and may_replace(replaced, len(text)):
        record[options.text_field] = _UNDECODED.sub("\ufffd", text)
    text = find_text(record, options.text_field, location)
    replaced += decoded[options.text_field].replaced if is_raw else 0
    scores = {"replaced_characters": replaced} if replaced else {}
    return Document(text, where.source, where.place(line), scores=scores, **read_metadata(record))


def read_parquet(stream: BinaryIO, where: Where, options: ReadOptions) -> Iterator[Record]:
    """Yield one record per row from `where.line` to `where.end`; only needed columns are read."""
    arrow = _import_arrow(where)
    import pyarrow.parquet

    most_bytes = _most_bytes(stream)
    try:
        file = pyarrow.parquet.ParquetFile(stream)
        columns = _wanted(file.schema_arrow.names, where, options)
        groups = _groups_of(file.metadata, where)
        batches = file.iter_batches(batch_size=_BATCH_ROWS, columns=columns, row_groups=groups)
        yield from _read_batches(batches, most_bytes, where, options)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(
            f"file {str(where)!r} is damaged, or is not a Parquet file ({error}). Download it "
            "again."
        ) from error


def _groups_of(metadata: Any, where: Where) -> list[int]:
    """Return the indices of the row groups in the range of `where`."""
    groups, row = [], 0
    for number in range(metadata.num_row_groups):
        if row >= where.line - 1 and (where.end < 0 or row < where.end):
            groups.append(number)
        row += metadata.row_group(number).num_rows
    return groups


def read_arrow(stream: BinaryIO, where: Where, options: ReadOptions) -> Iterator[Record]:
    """Yield one record per row of an Arrow file or stream."""
    arrow = _import_arrow(where)
    import pyarrow.ipc

    is_file = stream.peek(6)[:6] == b"ARROW1"  # type: ignore[attr-defined]
    most_bytes = _most_bytes(stream)
    try:
        if is_file:
            file = pyarrow.ipc.open_file(stream)
            batches: Any = (file.get_batch(n) for n in range(file.num_record_batches))
        else:
            file = batches = pyarrow.ipc.open_stream(stream)
        columns = _wanted(file.schema.names, where, options)
        selected = (batch.select(columns) for batch in batches)
        yield from _read_batches(selected, most_bytes, where, options)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(
            f"file {str(where)!r} is damaged, or is not an Arrow file ({error}). Download it again."
        ) from error


def _wanted(names: list[str], where: Where, options: ReadOptions) -> list[str]:
    """Return the names of the columns to read: the text column and the metadata columns."""
    top = options.text_field if options.text_field in names else options.text_field.split(".")[0]
    if top not in names:
        raise DataError(
            f"file {str(where)!r} has no column {options.text_field!r} (columns: "
            f"{names}). Choose a column with text_field=... (--text-field)."
        )
    metadata_columns = [name for name in names if name in METADATA_COLUMNS]
    return [top, *(name for name in metadata_columns if name != top)]


def _most_bytes(stream: BinaryIO) -> int:
    """Return the largest total size of the rows of a table; the stream is at its start."""
    size = stream.seek(0, io.SEEK_END)
    stream.seek(0)
    return max(_LARGE_BYTES, _HIGHEST_RATIO * size)


def _read_batches(
    batches: Any, most_bytes: int, where: Where, options: ReadOptions
) -> Iterator[Record]:
    number = where.line - 1
    for batch in batches:
        # Arrow trusts the lengths in a file; a wrong one crashes the process.
        batch.validate(full=True)
        for at in range(batch.num_rows):  # row by row, as all rows may be the same long text
            (row,) = batch.slice(at, 1).to_pylist()
            number += 1
            size = len(str(row).encode("utf-8", "replace"))
            most_bytes -= size
            if most_bytes < 0:
                raise DataError(
                    f"{where}:{number}: the rows are more than {_HIGHEST_RATIO} times larger than "
                    "the file (a decompression bomb). Remove the file from the input."
                )
            yield Record(
                where.place(number), size, partial(_parse_entry, row, where, number, options)
            )


def _parse_entry(row: dict[str, Any], where: Where, number: int, options: ReadOptions) -> Document:
    text = find_text(row, options.text_field, f"{where}:{number}")
    return Document(text, where.source, where.place(number), **read_metadata(row))


def _import_arrow(where: Where) -> Any:
    try:
        import pyarrow.lib
    except ImportError as error:
        raise MissingDependencyError("pyarrow", "data", f"reading {where}") from error
    return pyarrow.lib
