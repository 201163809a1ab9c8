"""Reads text files and notebooks as one document each, and JSON line by line."""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO

from bmforge.data.clean.drop import Drop
from bmforge.data.sources.document import Document
from bmforge.data.sources.encoding import decode
from bmforge.data.sources.metadata import read_metadata
from bmforge.data.sources.record import ReadOptions, Record, Where, failed_record
from bmforge.errors import DataError

__all__ = [
    "find_text",
    "is_cut_by_bytes",
    "is_json_lines",
    "read_json",
    "read_jsonl",
    "read_notebook",
    "read_subtitles",
    "read_text_file",
]

_LONGEST_LINE_BYTES = 1 << 28
_LARGEST_JSON_BYTES = 1 << 28
_SAMPLE_BYTES = 1 << 16
# Numbers, times, settings and markup of .srt and .vtt.
_CUE = re.compile(r"\d+|WEBVTT.*|(?:NOTE|STYLE|REGION|Kind:|Language:).*|.*-->.*")
_CUE_MARKUP = re.compile(r"</?[a-zA-Z][^>]{0,60}>|\{\\[^}]{0,60}\}|<\d[\d:.]{4,12}>")


def read_text_file(stream: BinaryIO, where: Where, options: ReadOptions) -> Iterator[Record]:
    """Yield the whole text file as one record."""
    raw = stream.read()
    yield Record(where.whole(), len(raw), partial(_parse_text, raw, where, options))


def _parse_text(raw: bytes, where: Where, options: ReadOptions) -> Document:
    decoded = decode(raw, f"file {str(where)!r}", errors=options.errors, encoding=options.encoding)
    if not decoded.text.strip():
        raise DataError(f"file {str(where)!r} is empty. Remove it from the input.")
    return Document(decoded.text, where.source, where.whole(), scores=decoded.scores())


def read_subtitles(stream: BinaryIO, where: Where, options: ReadOptions) -> Iterator[Record]:
    """Yield a subtitle file as one record: the spoken lines, without numbers and times."""
    raw = stream.read()
    yield Record(where.whole(), len(raw), partial(_parse_subtitles, raw, where, options))


def _parse_subtitles(raw: bytes, where: Where, options: ReadOptions) -> Document:
    document = _parse_text(raw, where, options)
    lines = (_CUE_MARKUP.sub("", line).strip() for line in document.text.splitlines())
    text = "\n".join(line for line in lines if line and not _CUE.fullmatch(line))
    return replace(document, text=text, id="")


def read_notebook(stream: BinaryIO, where: Where, options: ReadOptions) -> Iterator[Record]:
    """Yield a notebook as one record: the sources of its cells, without outputs."""
    raw = stream.read(_LARGEST_JSON_BYTES + 1)
    yield Record(where.whole(), len(raw), partial(_parse_notebook, raw, where, options))


def _parse_notebook(raw: bytes, where: Where, options: ReadOptions) -> Document:
    document = _parse_text(raw, where, options)
    try:
        cells = json.loads(document.text)["cells"]
        sources = (cell["source"] for cell in cells if cell["cell_type"] != "raw")
        texts = [source if isinstance(source, str) else "".join(source) for source in sources]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"file {str(where)!r} is not a Jupyter notebook ({error}). Remove it from the input."
        ) from error
    text = "\n\n".join(text for text in texts if text.strip())
    return Document(text, where.source, where.whole(), scores=document.scores)


def is_json_lines(sample: bytes) -> bool:
    """Return True if a .json file has an object on each line (JSON lines), as many data sets do."""
    first, newline, _ = sample.lstrip(b"\xef\xbb\xbf \t\r\n").partition(b"\n")
    if not first.startswith(b"{"):
        return False
    if not newline:  # a line longer than the sample, or a single object
        return len(sample) >= _SAMPLE_BYTES
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def read_json(stream: BinaryIO, where: Where, options: ReadOptions) -> Iterator[Record]:
    """Yield one record per line, per list element, or for the single object of a .json file."""
    if is_json_lines(stream.peek(_SAMPLE_BYTES)[:_SAMPLE_BYTES]):  # type: ignore[attr-defined]
        yield from read_jsonl(stream, where, options)
        return
    raw = stream.read(_LARGEST_JSON_BYTES + 1)
    if len(raw) > _LARGEST_JSON_BYTES:
        drop = Drop("json_too_large", len(raw), _LARGEST_JSON_BYTES, str(where))
        yield Record(where.whole(), len(raw), lambda: drop)
        return
    decoded = decode(raw, f"file {str(where)!r}", errors=options.errors, encoding=options.encoding)
    try:
        loaded = json.loads(decoded.text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"file {str(where)!r} is not JSON ({error}). Correct it, or remove it from the input."
        ) from error
    records = loaded if isinstance(loaded, list) else [loaded]
    if not any(isinstance(record, dict | str) for record in records):
        raise DataError(
            f"file {str(where)!r} contains neither JSON objects nor strings. Remove it from the "
            "input."
        )
    for number, record in enumerate(records, 1):
        parse = partial(_parse_object, record, where, number, options, decoded.scores())
        yield Record(where.place(number), len(raw) // len(records), parse)


def _parse_object(
    record: Any, where: Where, number: int, options: ReadOptions, scores: Mapping[str, float]
) -> Document:
    if isinstance(record, str):
        return Document(record, where.source, where.place(number), scores=scores)
    text = find_text(record, options.text_field, f"{where}:{number}")
    metadata = read_metadata(record)
    return Document(text, where.source, where.place(number), scores=scores, **metadata)


def read_jsonl(stream: BinaryIO, where: Where, options: ReadOptions) -> Iterator[Record]:
    """Yield one record per line; blank lines are skipped."""
    position, lines = stream.tell() if where.end >= 0 else 0, 0
    for number, raw in enumerate(_each_line(stream, where.encoding), start=where.line):
        if len(raw) > _LONGEST_LINE_BYTES:
            lines += 1
            location = f"{where}:{number}"
            error = DataError(
                f"{location}: the line is longer than {_LONGEST_LINE_BYTES} bytes. Split the "
                "record, or remove the line."
            )
            yield failed_record(where.place(number), len(raw), error)
        elif raw.strip():
            lines += 1
            parse = partial(_parse_line, raw, where, number, options)
            yield Record(where.place(number), len(raw), parse)
        position += len(raw)
        if 0 <= where.end <= position:
            return
    if lines == 0:
        raise DataError(f"file {str(where)!r} is empty. Remove it from the input.")


def _each_line(stream: BinaryIO, encoding: str) -> Iterator[bytes]:
    """Yield the lines of a stream; an overlong line is truncated just above the limit."""
    if encoding.startswith(("utf-16", "utf-32")):  # line ends are several bytes
        reader = io.TextIOWrapper(stream, encoding, errors="replace", newline="\n")
        yield from (line.encode() for line in reader)
        return
    while raw := stream.readline(_LONGEST_LINE_BYTES + 1):
        yield raw
        chunk = raw
        while len(chunk) > _LONGEST_LINE_BYTES and not chunk.endswith(b"\n"):
            chunk = stream.readline(_LONGEST_LINE_BYTES + 1)


def _parse_line(raw: bytes, where: Where, number: int, options: ReadOptions) -> Document:
    location = f"{where}:{number}"
    decoded = decode(
        raw, location, expected=where.encoding, errors=options.errors, encoding=options.encoding
    )
    try:
        record: Any = json.loads(decoded.text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(
            f"{location}: the line is not JSON ({error}). Correct or remove the line."
        ) from error
    text = find_text(record, options.text_field, location)
    metadata = read_metadata(record)
    return Document(text, where.source, where.place(number), scores=decoded.scores(), **metadata)


def find_text(record: Any, field: str, location: str) -> str:
    """Return the text in a record's field; a name such as `a.b.0` addresses a nested value.

    For example, `a.b.0` is the first element of the list ``record["a"]["b"]``. A null is an empty
    text, which `prepare` drops and counts.

    Raises:
        DataError: the field is missing, not a string, or contains a lone surrogate.
    """
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(record, dict) or field not in record:
        text = record
        for name in field.split("."):
            if isinstance(text, dict) and name in text:
                text = text[name]
            elif isinstance(text, list) and name.isdecimal() and int(name) < len(text):
                text = text[int(name)]
            elif text is None and isinstance(record, dict):
                break
            else:
                seen = "no JSON object"
                if isinstance(record, dict):
                    seen = f"the fields {sorted(map(str, record))}"
                raise DataError(
                    f"{location}: there is no field {field!r} (the line has {seen}). Select a "
                    "field with text_field=... (--text-field)."
                )
    if text is None:
        return ""
    if not isinstance(text, str):
        raise DataError(
            f"{location}: the field {field!r} is of type {type(text).__name__} (needed: a string). "
            "Select another field with text_field=... (--text-field)."
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{location}: the text is not valid Unicode ({error}). Correct or remove the line."
        ) from error
    return text


def is_cut_by_bytes(head: bytes) -> bool:
    """Return True if a file with these first bytes can be split into lines at bytes 0x0A."""
    return b"\0" not in head and not head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
