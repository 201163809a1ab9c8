"""Filter funnel: exact counts of documents and bytes read, kept, and dropped by each rule."""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from bmforge.data.clean.drop import Drop
from bmforge.data.sources.document import Document

__all__ = ["REPLACED", "Amount", "Dropped", "Funnel"]

REPLACED = "replacing damaged characters"  # name of this step in `Funnel.changed`

_SAMPLES = 20


@dataclass
class Amount:
    """Number of documents, and of their UTF-8 bytes before cleaning."""

    documents: int = 0
    text_bytes: int = 0

    def add(self, documents: int, text_bytes: int) -> None:
        """Add a number of documents and bytes to the counts."""
        self.documents += documents
        self.text_bytes += text_bytes


@dataclass
class Funnel:
    """Counts of documents read, kept, and dropped by each rule.

    Attributes:
        read: all entries of the inputs. An unreadable entry counts with its raw bytes, and the lost
            end of a damaged file with 0.
        dropped: dict from the name of a rule to the documents and bytes that it dropped.
        changed: dict from the name of a step to the number of documents that it changed, and the
            total change of their lengths in characters.
    """

    read: Amount = field(default_factory=Amount)
    kept: Amount = field(default_factory=Amount)
    dropped: dict[str, Amount] = field(default_factory=dict)
    changed: dict[str, list[int]] = field(default_factory=dict)

    def drop(self, rule: str, documents: int, text_bytes: int) -> None:
        """Count documents dropped by `rule`."""
        self.dropped.setdefault(rule, Amount()).add(documents, text_bytes)

    def change(self, step: str, documents: int, characters: int) -> None:
        """Count documents changed by `step`."""
        entry = self.changed.setdefault(step, [0, 0])
        entry[0] += documents
        entry[1] += characters

    def merge(self, other: Funnel) -> None:
        """Add the counts in `other`, the funnel of another part of the corpus."""
        for own, added in ((self.read, other.read), (self.kept, other.kept)):
            own.add(added.documents, added.text_bytes)
        for rule, amount in other.dropped.items():
            self.drop(rule, amount.documents, amount.text_bytes)
        for step, (documents, characters) in other.changed.items():
            self.change(step, documents, characters)

    def missing(self) -> Amount:
        """Return the documents and bytes that were neither kept nor dropped; normally 0."""
        gone = [self.kept, *self.dropped.values()]
        return Amount(
            self.read.documents - sum(amount.documents for amount in gone),
            self.read.text_bytes - sum(amount.text_bytes for amount in gone),
        )

    def to_record(self) -> dict[str, Any]:
        """Return the counts as a dict for JSON and TOML, with rules sorted by name."""
        record = asdict(self)
        for name in ("dropped", "changed"):
            record[name] = dict(sorted(record[name].items()))
        return record

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> Funnel:
        """Build a funnel from a dict that `to_record` returned."""
        return Funnel(
            read=Amount(**record["read"]),
            kept=Amount(**record["kept"]),
            dropped={rule: Amount(**amount) for rule, amount in record["dropped"].items()},
            changed={step: list(counts) for step, counts in record["changed"].items()},
        )


class Dropped:
    """Samples of dropped documents: per rule the 20 with the lowest ids, or all documents.

    An id is a hash, so the sample is random and does not depend on the order of documents.
    """

    def __init__(self, keep_all: bool) -> None:
        self._keep_all = keep_all
        self._lines: dict[str, list[tuple[int, str]]] = {}

    def add(self, document: Document, drop: Drop) -> None:
        """Add a dropped document if it belongs to the sample of its rule."""
        entry = {
            "rule": drop.rule,
            "value": drop.value,
            "bound": drop.bound,
            "excerpt": drop.excerpt,
            "id": document.id,
            "source": document.source,
            "place": document.place,
        }
        if self._keep_all:
            entry["text"] = document.text
        self._put(drop.rule, document.id, json.dumps(entry, ensure_ascii=False))

    def add_lines(self, lines: str) -> None:
        """Add the samples of another part of the corpus, as returned by its `lines`."""
        for line in lines.split("\n")[:-1]:
            entry = json.loads(line)
            self._put(entry["rule"], entry["id"], line)

    def _put(self, rule: str, id: str, line: str) -> None:
        num_tokens = self._lines.setdefault(rule, [])
        heapq.heappush(num_tokens, (-int(id, 16), line))
        if not self._keep_all and len(num_tokens) > _SAMPLES:
            heapq.heappop(num_tokens)

    def lines(self) -> str:
        """Return the sampled documents as JSON lines, sorted by rule and id."""
        lines = [
            line
            for rule in sorted(self._lines)
            for _, line in sorted(self._lines[rule], key=lambda entry: (-entry[0], entry[1]))
        ]
        return "".join(f"{line}\n" for line in lines)
