"""Reads the rows of tables as records: Parquet, Arrow and CSV files, and saved `datasets` folders.

A row becomes a dict from column to value, as a line of a .jsonl file does.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bmforge.errors import DataError, MissingDependencyError
from bmforge.files import read_json

__all__ = [
    "ARROW_SUFFIXES",
    "CSV_SUFFIXES",
    "find_saved_dataset",
    "read_arrow_rows",
    "read_csv_rows",
]

ARROW_SUFFIXES = (".parquet", ".arrow")
# Suffix -> possible delimiters. Spreadsheets write .csv with semicolons where the comma is the
# decimal sign.
CSV_SUFFIXES = {".csv": ",;\t", ".tsv": "\t"}
_LONGEST_FIELD = 1 << 30  # csv's default of 128 KiB is too short for conversations


def read_arrow_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the location and the values of every row of a .parquet or .arrow file.

    Raises:
        DataError: the file is damaged.
        MissingDependencyError: pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingDependencyError("pyarrow", "data", f"reading {str(file)!r}") from error
    is_parquet = file.suffix.lower() == ".parquet"
    try:
        table = pyarrow.parquet.read_table(file) if is_parquet else _read_ipc(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"file {str(file)!r} cannot be read as {file.suffix} ({error}). Check whether it was "
            "copied completely."
        ) from error
    for number, row in enumerate(table.to_pylist(), 1):
        yield f"{str(file)!r}, row {number}", _without_nulls(row)


def _read_ipc(file: Path) -> Any:
    """Read an Arrow file: a stream, as `datasets` writes it, or the random-access format."""
    from pyarrow import ipc

    with file.open("rb") as stream:
        is_random_access = stream.read(6) == b"ARROW1"
        stream.seek(0)
        opened = ipc.open_file if is_random_access else ipc.open_stream
        return opened(stream).read_all()


def _without_nulls(value: Any) -> Any:
    """Remove null fields, which Arrow adds to structs so that all rows have the same fields."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def read_csv_rows(text: str, file: Path, suffix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the location and the values of every row of a table with a header row.

    A value that is a JSON list, such as `messages`, is parsed. Empty values are left out.

    Raises:
        DataError: the header is missing or has duplicate names, a row has a different number of
            values, or a quotation mark has no counterpart.
    """
    csv.field_size_limit(_LONGEST_FIELD)
    head = text.partition("\n")[0]
    delimiter = max(CSV_SUFFIXES[suffix], key=head.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        rows = [row for row in reader if row]
    except csv.Error as error:
        raise DataError(
            f"{str(file)!r}, line {reader.line_num} is not a valid table row ({error}). Write a "
            'quotation mark within a quoted value twice ("").'
        ) from error
    header = rows[0] if rows else []
    if not rows or len(set(header)) < len(header):
        raise DataError(
            f"{str(file)!r} needs a header row with distinct column names, such as "
            f"prompt{delimiter}completion; its first row is {header!r}."
        )
    for number, row in enumerate(rows[1:], 2):
        location = f"{str(file)!r}, row {number}"
        if len(row) != len(header):
            raise DataError(
                f"{location} has {len(row)} values, but the header has {len(header)}. Put values "
                "with delimiters or line breaks in double quotes."
            )
        named = zip(header, row, strict=True)
        yield location, {name: _parse(value) for name, value in named if value}


def _parse(value: str) -> Any:
    """Return a CSV value, parsed if it is a JSON list of objects."""
    if not value.lstrip().startswith("["):
        return value
    try:
        parsed = json.loads(value)
    except ValueError:
        return value
    return parsed if parsed and all(isinstance(item, dict) for item in parsed) else value


def find_saved_dataset(folder: Path) -> list[Path] | None:
    """List the Arrow files of a folder written by `datasets`' `save_to_disk`; None for others.

    Raises:
        DataError: the folder has several splits, or a dataset with an index of rows.
    """
    splits, state = folder / "dataset_dict.json", folder / "state.json"
    if splits.is_file():
        names = read_json(splits).get("splits", [])
        if len(names) != 1:
            raise DataError(
                f"{str(folder)!r} has the splits {', '.join(names)}. Pass one of them, such as "
                f"{str(folder / (names or ['train'])[0])!r}."
            )
        return find_saved_dataset(folder / names[0])
    if not state.is_file() or not (folder / "dataset_info.json").is_file():
        return None
    saved = read_json(state)
    if saved.get("_indices_data_files"):
        raise DataError(
            f"{str(folder)!r} is a dataset with an indices mapping, which is not supported. "
            "Call dataset.flatten_indices(), and save the dataset again."
        )
    return [folder / entry["filename"] for entry in saved.get("_data_files", [])]
