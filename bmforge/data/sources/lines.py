"""Text files, one document each, and .jsonl files, one document a line."""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Iterator
from functools import partial
from typing import Any, BinaryIO

from bmforge.data.sources.document import Document
from bmforge.data.sources.encoding import decode
from bmforge.data.sources.record import ReadOptions, Record, Where, fail
from bmforge.errors import DataError

__all__ = ["find_known", "find_text", "is_cut_by_bytes", "read_jsonl", "read_text_file"]

_WAY_OUT = "mend the line, or leave such lines out with skip_bad=True (--skip-bad)"
_LONGEST_LINE_BYTES = 1 << 28
# Fields by which data sets say what else is known of a text.
_KNOWN = {
    "url": ("url",),
    "licence": ("licence", "license"),
    "terms": ("terms", "terms_of_use"),
    "date": ("date", "timestamp"),
    "language": ("language", "lang"),
}


def read_text_file(stream: BinaryIO, where: Where, options: ReadOptions) -> Iterator[Record]:
    """Yield the whole file as one entry."""
    raw = stream.read()
    yield Record(where.whole(), len(raw), partial(_parse_text, raw, where, options))


def _parse_text(raw: bytes, where: Where, options: ReadOptions) -> Document:
    decoded = decode(raw, f"file {str(where)!r}", errors=options.errors)
    if not decoded.text.strip():
        raise DataError(f"file {str(where)!r} is empty: remove it from the input")
    return Document(decoded.text, where.source, where.whole(), scores=decoded.scores())


def read_jsonl(stream: BinaryIO, where: Where, options: ReadOptions) -> Iterator[Record]:
    """Yield one entry a line; blank lines are passed over."""
    position, lines = stream.tell() if where.end >= 0 else 0, 0
    for number, raw in enumerate(_each_line(stream, where.encoding), start=where.line):
        if len(raw) > _LONGEST_LINE_BYTES:
            lines += 1
            place = f"{where}:{number}"
            error = DataError(f"{place}: the line is longer than {_LONGEST_LINE_BYTES} bytes")
            yield fail(where.place(number), len(raw), error)
        elif raw.strip():
            lines += 1
            parse = partial(_parse_line, raw, where, number, options)
            yield Record(where.place(number), len(raw), parse)
        position += len(raw)
        if 0 <= where.end <= position:
            return
    if lines == 0:
        raise DataError(f"file {str(where)!r} is empty: remove it from the input")


def _each_line(stream: BinaryIO, encoding: str) -> Iterator[bytes]:
    """Yield the lines of a stream; of one that is too long only as much as shows it."""
    if encoding.startswith(("utf-16", "utf-32")):  # whose line ends are no single bytes
        reader = io.TextIOWrapper(stream, encoding, errors="replace", newline="\n")
        yield from (line.encode() for line in reader)
        return
    while raw := stream.readline(_LONGEST_LINE_BYTES + 1):
        yield raw
        rest = raw
        while len(rest) > _LONGEST_LINE_BYTES and not rest.endswith(b"\n"):
            rest = stream.readline(_LONGEST_LINE_BYTES + 1)


def _parse_line(raw: bytes, where: Where, number: int, options: ReadOptions) -> Document:
    place = f"{where}:{number}"
    decoded = decode(raw, place, expected=where.encoding, errors=options.errors)
    try:
        record: Any = json.loads(decoded.text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{place}: the line is not JSON ({error}); {_WAY_OUT}") from error
    text = find_text(record, options.text_field, place)
    known = find_known(record)
    return Document(text, where.source, where.place(number), scores=decoded.scores(), **known)


def find_text(record: Any, field: str, place: str) -> str:
    """Return the text in a record's field; `a.b.0` is field b of a, and there the first one.

    Raises:
        DataError: there is none, it is no string, or holds half a surrogate pair.
    """
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(record, dict) or field not in record:
        text = record
        for name in field.split("."):
            if isinstance(text, dict) and name in text:
                text = text[name]
            elif isinstance(text, list) and name.isdecimal() and int(name) < len(text):
                text = text[int(name)]
            else:
                seen = "no JSON object"
                if isinstance(record, dict):
                    seen = f"the fields {sorted(map(str, record))}"
                raise DataError(
                    f"{place}: no field {field!r}, the line holds {seen}; "
                    f"name the field with text_field=... (--text-field), {_WAY_OUT}"
                )
    if not isinstance(text, str):
        raise DataError(
            f"{place}: field {field!r} is of type {type(text).__name__}, needed is a string; "
            f"{_WAY_OUT}"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: the text is not valid Unicode ({error}); {_WAY_OUT}") from error
    return text


def find_known(record: dict[str, Any]) -> dict[str, Any]:
    """Return what a record says of its text's url, licence, terms, date and language."""
    found: dict[str, Any] = {}
    for name, fields in _KNOWN.items():
        values = (record.get(field) for field in fields)
        value = next((one for one in values if isinstance(one, str) and one), "")
        if value and not any("\ud800" <= c <= "\udfff" for c in value):
            found[name] = value
    return found


def is_cut_by_bytes(head: bytes) -> bool:
    """Tell from a file's beginning whether a newline is one byte of it, wherever it stands."""
    return b"\0" not in head and not head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
