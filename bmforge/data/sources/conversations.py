"""Reads conversations from JSON files and tables, in all published formats.

`read_conversations` is the entry point; `conversation_forms.py` converts one record to messages.
Text files may be in any encoding that `bmforge prepare` detects, and compressed (.gz, .zst, ...).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bmforge.data.sources.conversation_forms import find_messages, read_tools
from bmforge.data.sources.conversation_images import IMAGE_FIELDS, find_images
from bmforge.data.sources.encoding import decode
from bmforge.data.sources.packed import PACKED, open_unpacked
from bmforge.data.sources.record_tables import (
    ARROW_SUFFIXES,
    CSV_SUFFIXES,
    find_saved_dataset,
    read_arrow_rows,
    read_csv_rows,
)
from bmforge.errors import DataError
from bmforge.files import refuse_pipe
from bmforge.tokenizers.chat_messages import Message

__all__ = ["ChatExample", "find_conversation_files", "read_conversations", "read_records"]

_TEXT_SUFFIXES = (".jsonl", ".json", ".ndjson", *CSV_SUFFIXES)
_NEEDED = ".jsonl, .json, .csv, .tsv, .parquet or .arrow"


@dataclass(frozen=True)
class ChatExample:
    """One conversation from a file.

    Args:
        place: file and line, entry or row, for error messages.
        messages: messages in OpenAI's format; the arguments of tool calls are parsed.
        tools: JSON schemas of the functions that the assistant may call; None without tools.
        fields: the record's other top-level fields, such as ``documents`` or ``id``.
    """

    place: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    fields: dict[str, Any] = field(default_factory=dict)


def read_conversations(path: str | os.PathLike[str], images: bool = False) -> list[ChatExample]:
    """Read every conversation from a file, or from all files of a folder.

    Args:
        path: a file with one JSON object per line, with a JSON list of objects, or a table
            (.csv, .tsv, .parquet, .arrow); or a folder of such files, or one that `datasets` saved.
        images: whether messages may have images: data URIs, or files relative to the data file.

    Raises:
        DataError: the path does not exist, a file cannot be decoded, or an entry is not a
            conversation with an answer of the assistant, or has an image without a file.
        MissingDependencyError: a .parquet or .arrow file is read, and pyarrow is not installed.
    """
    return [
        _read_record(location, record, file.parent if images else None)
        for file in find_conversation_files(path)
        for location, record in read_records(file)
    ]


def find_conversation_files(path: str | os.PathLike[str]) -> list[Path]:
    """List the conversation files at a path: the file itself, or all such files of a folder.

    Raises:
        DataError: the path does not exist or is a pipe, or the folder contains no such file, or
            several splits.
    """
    folder = Path(path)
    refuse_pipe(folder)
    if folder.is_file():
        return [folder]
    if not folder.exists():
        raise DataError(f"the file {str(path)!r} does not exist. Check the path.")
    files = find_saved_dataset(folder)
    if files is None:
        files = [
            file
            for file in sorted(folder.rglob("*"))
            if file.is_file() and _suffix_of(file) in (*_TEXT_SUFFIXES, *ARROW_SUFFIXES)
        ]
    if not files:
        raise DataError(
            f"the folder {str(path)!r} contains no conversation file (needed: {_NEEDED} files)."
        )
    return files


def _suffix_of(file: Path) -> str:
    """Return a file's suffix, after removing a compression suffix such as ``.gz``."""
    return (file.with_suffix("") if file.suffix in PACKED else file).suffix.lower()


def _read_record(location: str, record: Any, folder: Path | None) -> ChatExample:
    """Convert a record to a conversation.

    Image paths are relative to `folder`; if it is None, images are not supported.
    """
    messages, form_fields = find_messages(record, location, folder is not None)
    if folder is not None:
        messages = find_images(record, messages, location, folder)
        form_fields |= IMAGE_FIELDS
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(
            f"{location} has no assistant message to train on. Add an assistant message, or remove "
            "the entry."
        )
    fields = {
        name: value
        for name, value in record.items()
        if name not in form_fields and value not in (None, "", [], {})
    }
    return ChatExample(location, messages, read_tools(record, location), fields)


def read_records(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the location and the parsed value of every entry in a file."""
    suffix = _suffix_of(file)
    if suffix in ARROW_SUFFIXES:
        yield from read_arrow_rows(file)
        return
    try:
        with open_unpacked(file) as stream:
            raw = stream.read()
    except OSError as error:
        raise DataError(
            f"cannot read {str(file)!r} ({error}). Check its permissions, and whether it was "
            "copied completely."
        ) from error
    try:
        text = decode(raw, f"file {str(file)!r}", errors="strict").text
    except DataError as error:
        if suffix in _TEXT_SUFFIXES:
            raise
        raise DataError(f"{str(file)!r} is not a file of records ({_NEEDED}): {error}") from error
    if suffix in CSV_SUFFIXES:
        yield from read_csv_rows(text, file, suffix)
        return
    if text.lstrip().startswith("["):
        for number, record in enumerate(_parse(text, repr(str(file))), 1):
            yield f"{str(file)!r}, entry {number}", record
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            location = f"{str(file)!r}, line {number}"
            yield location, _parse(line, location)


def _parse(text: str, location: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{location} is not JSON ({error}). The file must contain one object per "
            "line, or one list of objects."
        ) from error
