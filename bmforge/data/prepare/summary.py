"""Composition of a corpus: counts by source, language, script, license, year and length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import PurePath
from typing import Any
from urllib.parse import urlsplit

from bmforge.data.prepare.shards import TOPICS, InputFile
from bmforge.data.sources.document import Document
from bmforge.licenses import license_name

__all__ = ["KEPT", "OTHERS", "UNKNOWN", "Summary", "choose_grouping", "group_of", "origin_of"]

KEPT = "kept"  # outcome of kept documents, besides the rule names
UNKNOWN = "unknown"
OTHERS = "others"
_MOST_GROUPS = 40
_MOST_VALUES = 50  # maximum distinct values of a metadata field in a record
_LONGEST_VALUE = 100  # characters
_MOST_LOST = 20  # web pages in `lost_text`
_YEAR = 4
_NESTED = ("sources", "origins")
_SHORTENED = ("languages", "scripts", "licenses", "terms", "years")
Counts = dict[str, list[int]]


def choose_grouping(inputs: Iterable[InputFile]) -> str:
    """Return how sources are grouped for counting: by ``"file"``, by ``"folder"``, or ``"all"``.

    The result is the finest grouping that gives at most 40 groups, and depends on the inputs alone.
    """
    paths = [file.path for file in inputs]
    if paths == [TOPICS]:
        return "folder"
    for by in ("file", "folder"):
        if len({group_of(path, by) for path in paths}) <= _MOST_GROUPS:
            return by
    return "all"


def group_of(source: str, by: str) -> str:
    """Return the name of the group to which a document's source belongs."""
    if by == "all":
        return "all inputs"
    return source if by == "file" else str(PurePath(source).parent)


@dataclass
class Summary:
    """Document, byte and token counts of a corpus or of one group of shards.

    Attributes:
        sources: number of documents and their raw bytes, for each source group and outcome (name of
            the rule that dropped the documents, or ``kept``).
        languages, scripts, licenses, terms, years: dict from a metadata value to the number, bytes
            of text, and tokens of the kept documents with this value.
        origins: number and bytes of the kept documents from each host (or file) under each license.
        lengths: number, bytes and tokens of the kept documents by length; key k counts documents of
            2^(k-1) to 2^k - 1 tokens.
        clusters: number of near-duplicate clusters per size.
        lost_text: dict from the location of a kept web page to the visible text that is not in the
            document, in ten-thousandths; only the pages with the largest fractions.
    """

    sources: dict[str, Counts] = field(default_factory=dict)
    languages: Counts = field(default_factory=dict)
    scripts: Counts = field(default_factory=dict)
    licenses: Counts = field(default_factory=dict)
    terms: Counts = field(default_factory=dict)
    years: Counts = field(default_factory=dict)
    origins: dict[str, Counts] = field(default_factory=dict)
    lengths: Counts = field(default_factory=dict)
    clusters: Counts = field(default_factory=dict)
    lost_text: Counts = field(default_factory=dict)

    def add_source(self, group: str, outcome: str, read_bytes: int) -> None:
        """Count one document under its source group and outcome."""
        _add(self.sources.setdefault(group, {}), outcome, (1, read_bytes))

    def add_kept(self, document: Document, text_bytes: int, tokens: int) -> None:
        """Count one kept document under each value of its metadata."""
        counts, license = (1, text_bytes, tokens), _cut(license_name(document.license))
        for table, value in (
            (self.languages, document.language),
            (self.scripts, document.script),
            (self.licenses, license),
            (self.terms, document.terms),
            (self.years, document.date[:_YEAR]),
        ):
            _add(table, _cut(value), counts)
        _add(self.origins.setdefault(license, {}), _cut(origin_of(document)), counts[:2])
        _add(self.lengths, str(tokens.bit_length()), counts)
        if lost := round(10_000 * document.scores.get("lost_ratio", 0)):
            page = document.url or f"{document.source}:{document.place}"
            self._add_lost_(page, lost)
            self._limit_lost_()

    def _add_lost_(self, page: str, lost: int) -> None:
        page = page[:_LONGEST_VALUE]
        self.lost_text[page] = [max(lost, *self.lost_text.get(page, [0]))]

    def _limit_lost_(self) -> None:
        """Keep the pages that lost most; the result does not depend on the order of pages."""
        by_loss = sorted(self.lost_text, key=lambda page: (-self.lost_text[page][0], page))
        for page in by_loss[_MOST_LOST:]:
            del self.lost_text[page]

    def merge(self, other: Summary) -> None:
        """Add the counts in `other`, the summary of another part of the corpus."""
        for name in _NESTED:
            own_counts: dict[str, Counts] = getattr(self, name)
            for group, outcomes in getattr(other, name).items():
                for outcome, counts in outcomes.items():
                    _add(own_counts.setdefault(group, {}), outcome, counts)
        for page, (lost,) in other.lost_text.items():
            self._add_lost_(page, lost)
        self._limit_lost_()
        for item in fields(self):
            if item.name not in (*_NESTED, "lost_text"):
                for value, counts in getattr(other, item.name).items():
                    _add(getattr(self, item.name), value, counts)

    def to_record(self) -> dict[str, Any]:
        """Return the counts as a dict for JSON and TOML, sorted by name."""
        record = asdict(self)
        for name in _NESTED:
            for group, outcomes in record[name].items():
                record[name][group] = dict(sorted(outcomes.items()))
        for item in fields(self):
            record[item.name] = dict(sorted(record[item.name].items()))
        return record

    def shortened(self) -> Summary:
        """Return a copy of the summary in which rare metadata values are merged into ``others``."""
        short = Summary.from_record(self.to_record())
        for name in _SHORTENED:
            _shorten_(getattr(short, name))
        for license in [value for value in short.origins if value not in short.licenses]:
            for origin, counts in short.origins.pop(license).items():
                _add(short.origins.setdefault(OTHERS, {}), origin, counts)
        for table in short.origins.values():
            _shorten_(table)
        return short

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> Summary:
        """Build a summary from a dict that `to_record` returned."""
        return Summary(**record)


def _shorten_(table: Counts) -> None:
    by_count = sorted(table, key=lambda value: (-table[value][0], value))
    for value in by_count[_MOST_VALUES:]:
        _add(table, OTHERS, table.pop(value))


def _cut(value: str) -> str:
    return value[:_LONGEST_VALUE] or UNKNOWN


def origin_of(document: Document) -> str:
    """Return a document's origin, for attribution: the host of its URL, or else its file name."""
    try:
        host = urlsplit(document.url).hostname
    except ValueError:
        host = None
    return host or PurePath(document.source).name


def _add(table: Counts, name: str, counts: Iterable[int]) -> None:
    new = list(counts)
    old = table.get(name, [0] * len(new))
    table[name] = [a + b for a, b in zip(old, new, strict=True)]
