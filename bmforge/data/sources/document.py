"""`Document`: a text with its source and metadata, which the cleaning steps process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from typing import Any

__all__ = ["Document", "from_record", "primary_subtag", "to_record"]

_ALWAYS = ("text", "source", "place")


@dataclass(frozen=True)
class Document:
    """A text with its source and metadata; an empty string means unknown.

    Attributes:
        source: path of the input file.
        place: location in the file: a line, the name of a member, a page; ``"1"`` for a whole file.
        id: hash of source, place and original text; no step changes it.
        url, license: URL and license of the page or the data set, as stated by the source.
        terms: other conditions of use that the source states, or their URL.
        date: ISO 8601, as far as known: ``"2024"``, ``"2024-05-01"``.
        language, script: ISO 639-1 (or -3) and ISO 15924, such as ``"zh"`` and ``"Hans"``; a source
            may give a longer tag, such as ``"zh-CN"``, whose language `primary_subtag` returns.
        scores: dict from the name of a score to its value, set by sources and steps.
    """

    text: str
    source: str
    place: str = "1"
    id: str = ""
    url: str = ""
    license: str = ""
    date: str = ""
    language: str = ""
    script: str = ""
    scores: Mapping[str, float] = field(default_factory=dict, hash=False)
    terms: str = ""

    def __post_init__(self) -> None:
        """Compute the id if none is given."""
        if not self.id:
            parts = (self.source, self.place, self.text)
            hashed = "\0".join(parts).encode("utf-8", "surrogatepass")
            object.__setattr__(self, "id", blake2b(hashed, digest_size=16).hexdigest())


def primary_subtag(tag: str) -> str:
    """Return the language of a language tag: ``"zh"`` for ``"zh-Hant-TW"``.

    Source: BCP 47, RFC 5646, section 2.2.1; underscores are also accepted, as in locale names.
    """
    return tag.strip().replace("_", "-").partition("-")[0].lower()


def to_record(document: Document) -> dict[str, Any]:
    """Convert a document to a dict for JSON, without unknown fields."""
    record = {item.name: getattr(document, item.name) for item in fields(Document)}
    record["scores"] = dict(record["scores"])
    return {name: value for name, value in record.items() if value or name in _ALWAYS}


def from_record(record: Mapping[str, Any]) -> Document:
    """Build a document from a dict that `to_record` returned."""
    return Document(**record)
