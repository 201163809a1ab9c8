"""Reads the metadata of a record: its URL, license, terms of use, date and language."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime
from typing import Any

from bmforge.licenses import UNKNOWN, find_license, join_licenses

__all__ = ["METADATA_COLUMNS", "read_metadata"]

# Field names that data sets use for the metadata of a text.
_FIELDS = {
    "url": ("url",),
    "license": ("license", "licence"),
    "terms": ("terms", "terms_of_use"),
    "date": ("date", "timestamp"),
    "language": ("language", "lang"),
}
_NESTED = "metadata"  # the writers of datatrove and Dolma put all fields except the text into it
METADATA_COLUMNS = frozenset(name for names in _FIELDS.values() for name in names) | {_NESTED}
# Keys of a license object, as in the APIs of GitHub and npm and in COCO's files.
_LICENSE_KEYS = ("spdx_id", "id", "key", "name", "license", "licence", "type", "title", "url")
_VALUE_KEYS = ("code", "id", "name", "url", "value")
_YEARS = range(1000, 10_000)
_FIRST_MILLISECONDS = 10**11  # as seconds, this is the year 5138


def read_metadata(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata that a record or its object `metadata` states.

    A value may be a string, a list, or an object with a key such as `name` or `url`. All
    entries of a list of licenses or terms apply; of any other list, only the first entry is used. A
    license in another form is `UNKNOWN`, so that it is not mistaken for a missing license.
    """
    nested = record.get(_NESTED)
    sources = [record, nested] if isinstance(nested, Mapping) else [record]
    metadata: dict[str, str] = {}
    for name, fields in _FIELDS.items():
        values = (source[field] for source in sources for field in fields if field in source)
        text = next(filter(None, (_read_value(name, value) for value in values)), "")
        if text:
            metadata[name] = text
    return metadata


def _read_value(name: str, value: Any) -> str:
    if name == "license":
        return _read_license(value)
    if name == "date" and isinstance(value, int | float | date):
        return _read_date(value)
    strings = list(dict.fromkeys(_strings(value)))
    return ", ".join(strings) if name == "terms" else next(iter(strings), "")


def _read_license(value: Any) -> str:
    """Return a license or license expression; "" if none is stated."""
    if value is None or value != value:  # pandas writes NaN for a missing value
        return ""
    if isinstance(value, str):
        return value.strip() if _is_unicode(value) else UNKNOWN
    if isinstance(value, list | tuple):
        return join_licenses(filter(None, map(_read_license, value)))
    if not isinstance(value, Mapping):
        return UNKNOWN
    names = [name for key in _LICENSE_KEYS if (name := _read_license(value.get(key)))]
    names = [name for name in names if name != UNKNOWN]
    recognized = (name for name in names if find_license(name))
    stated = next(recognized, names[0] if names else "")
    return stated or (UNKNOWN if any(value.values()) else "")


def _read_date(value: float | date) -> str:
    """Return the ISO 8601 form of a date, a year, or a Unix time in seconds or milliseconds."""
    if isinstance(value, date):
        return value.isoformat()
    if value in _YEARS:
        return str(int(value))
    seconds = value / 1000 if value >= _FIRST_MILLISECONDS else value
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat() if seconds >= _YEARS.stop else ""
    except (OverflowError, ValueError, OSError):
        return ""


def _strings(value: Any) -> Iterator[str]:
    """Yield the nonempty strings of a value or list.

    An object yields its `name` or a similar key.
    """
    if isinstance(value, str):
        if value and _is_unicode(value):
            yield value
    elif isinstance(value, Mapping):
        texts = (text for key in _VALUE_KEYS for text in _strings(value.get(key)))
        yield from list(texts)[:1]
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _is_unicode(text: str) -> bool:
    """Return False if a string has lone surrogates, which cannot be stored as UTF-8."""
    return not any("\ud800" <= c <= "\udfff" for c in text)
