"""What a model was made of, and under which licences: ``LICENCE.json`` and a card beside it.

Whoever makes a model of another one, or of texts, takes this along; see `licences` for what the
licences ask for. Nothing is guessed: a part whose licence no one has said is unknown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bmforge.errors import DataError
from bmforge.files import read_json, replace_file
from bmforge.gguf_header import is_gguf, read_gguf_header
from bmforge.licences import (
    TERMS,
    UNKNOWN,
    Conflict,
    Licence,
    find_licence,
    licence_name,
    merge_licences,
)
from bmforge.logging import get_logger

__all__ = [
    "LICENCE_FILE",
    "Part",
    "Provenance",
    "describe_provenance",
    "model_card",
    "read_provenance",
    "to_metadata",
    "warn_of_licences",
    "write_provenance",
]

LICENCE_FILE, _CARD = "LICENCE.json", "README.md"
_FORMAT = 1
_MARK = "<!-- written by bmforge from LICENCE.json -->"
_MOST_SOURCES, _FEW = 20, 5
_THEIRS, _OURS = "general.license", "bmforge.licence"  # keys in a GGUF file
_FRONT = re.compile(r"\A---\s*\n(.*?)\n---\s*\n", re.DOTALL)
_SAID = re.compile(r"^license(_name)?\s*:\s*[\"']?([^\"'#\n]+)", re.MULTILINE)
_NOTHING = ("", "other", UNKNOWN)  # what cards say that name no licence


@dataclass(frozen=True)
class Part:
    """One thing that a model was made of.

    Attributes:
        kind: ``base`` (a model), ``delta``, ``data``, or ``terms`` (what else sources of data ask
            for; the licence is then where it stands).
        name: of the model or the corpus.
        licence: an id, what its source says where that is not known, or ``unknown``.
        documents, text_bytes, tokens: of data.
        sources: of data: hosts and files, most documents first, for those who must name them.
    """

    kind: str
    name: str
    licence: str = UNKNOWN
    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Provenance:
    """A model's licence, as far as it was said, and its parts.

    Attributes:
        licence: under which it is handed on; empty is not said.
        parts: what it was made of.
    """

    licence: str = ""
    parts: tuple[Part, ...] = ()

    def __bool__(self) -> bool:
        """Tell whether anything is known."""
        return bool(self.licence or self.parts)

    def as_parts(self, kind: str, name: str) -> tuple[Part, ...]:
        """Return this as parts of what is made of it."""
        return (Part(kind, name, self.licence or UNKNOWN), *self.parts)

    def joined(self, parts: Iterable[Part]) -> Provenance:
        """Return it with more parts; one that is there already is not named again."""
        return replace(self, parts=tuple(dict.fromkeys((*self.parts, *parts))))

    def conflicts(self) -> list[Conflict]:
        """Return which licences do not go together."""
        named = [part.licence for part in self.parts if part.kind != "terms"]
        return merge_licences(named, self.licence)

    def licences(self) -> list[Licence]:
        """Return those of the whole and of its parts that are in the table, by id."""
        said = [self.licence, *(part.licence for part in self.parts if part.kind != "terms")]
        found = {one.id: one for one in map(find_licence, said) if one is not None}
        return [found[id] for id in sorted(found)]

    def unknown(self) -> list[Part]:
        """Return the parts whose licence is not in the table."""
        return [p for p in self.parts if p.kind != "terms" and find_licence(p.licence) is None]


def read_provenance(place: str | Path) -> Provenance:
    """Return what a model says: ``LICENCE.json``, the head of its card, or a GGUF file's metadata.

    Args:
        place: a model's directory, or a GGUF file.

    Raises:
        DataError: the record is there and is damaged.
    """
    path = Path(place)
    if is_gguf(path):
        said = read_gguf_header(path).metadata
        if _OURS in said:
            return _from_record(_parse(str(said[_OURS]), path), path)
        return Provenance(_named(str(said.get(_THEIRS, ""))))
    file = path / LICENCE_FILE
    if file.is_file():
        return _from_record(read_json(file), file)
    return Provenance(_licence_of_card(path / _CARD))


def _parse(text: str, where: Path) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{str(where)!r}: its {_OURS} is not JSON ({error})") from error


def _from_record(record: Any, where: Path) -> Provenance:
    try:
        if record["format"] != _FORMAT:
            raise ValueError(f"format {record['format']}, known is {_FORMAT}")
        parts = tuple(Part(**{**p, "sources": tuple(p["sources"])}) for p in record["made_of"])
        return Provenance(str(record["licence"] or ""), parts)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{str(where)!r} is no record of licences ({error}): get it again"
        ) from error


def to_metadata(known: Provenance) -> dict[str, str]:
    """Return what a GGUF file says of it; nothing where nothing is known."""
    said = {_THEIRS: _tag(known.licence)} if known.licence else {}
    return {**said, _OURS: json.dumps(_to_record(known), ensure_ascii=False)} if known else {}


def _licence_of_card(card: Path) -> str:
    """Return the licence in the head of a card of Hugging Face's, "" where it names none."""
    try:
        text = card.read_text("utf-8") if card.is_file() else ""
    except (OSError, UnicodeDecodeError):
        return ""
    head = _FRONT.match(text)
    said = {found[1] or "": found[2].strip() for found in _SAID.finditer(head[1])} if head else {}
    return _named(said.get("", "")) or _named(said.get("_name", ""))


def _named(said: str) -> str:
    return "" if said.strip().lower() in _NOTHING else licence_name(said)


def _to_record(known: Provenance) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "licence": known.licence or None,
        "made_of": [asdict(part) for part in known.parts],
        "terms": {one.id: dict(one.terms) for one in known.licences()},
        "do_not_go_together": [asdict(conflict) for conflict in known.conflicts()],
    }


def write_provenance(directory: str | Path, known: Provenance, name: str = "") -> None:
    """Write ``LICENCE.json`` and, where no card of others is, a card; nothing of what is unknown.

    Args:
        name: of the model, for the card; empty takes the directory's.
    """
    folder = Path(directory)
    file, card = folder / LICENCE_FILE, folder / _CARD
    is_ours = not card.exists() or _MARK in card.read_text("utf-8", errors="replace")
    if not known:  # what a model left that was here before
        file.unlink(missing_ok=True)
        if is_ours:
            card.unlink(missing_ok=True)
        return
    replace_file(file, json.dumps(_to_record(known), indent=2, ensure_ascii=False) + "\n")
    if is_ours:
        replace_file(card, model_card(known, name or folder.resolve().name))


def warn_of_licences(where: object, known: Provenance) -> None:
    """Log which licences do not go together, with both clauses, and how much is unknown."""
    for conflict in known.conflicts():
        get_logger().warning("%s: these licences do not go together: %s", where, conflict)
    if unknown := known.unknown():
        names = dict.fromkeys(f"{part.kind} {part.name}" for part in unknown)
        shown = ", ".join(list(names)[:_FEW])
        more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
        get_logger().info("%s: the licence is unknown of %s%s", where, shown, more)


def describe_provenance(known: Provenance) -> list[str]:
    """Return lines for people: licence, parts, what does not go together."""
    lines = [f"licence: {known.licence or UNKNOWN}"]
    for part in known.parts:
        counts = f", {part.documents:,} documents, {part.tokens:,} tokens" if part.documents else ""
        lines.append(f"made of {part.kind} {part.name}: {part.licence}{counts}")
    lines += [f"do not go together: {conflict}" for conflict in known.conflicts()]
    return lines


def model_card(known: Provenance, name: str) -> str:
    """Return a card in Markdown: data by licence, what the licences ask for, and for which use."""
    bases = list(dict.fromkeys(part.name for part in known.parts if part.kind == "base"))
    lines = ["---", f"license: {_tag(known.licence)}"]
    lines += ["base_model:", *(f"- {base}" for base in bases)] if bases else []
    lines += ["library_name: bmforge", "---", "", _MARK, "", f"# {name}", ""]
    lines += [f"Licence: {known.licence or UNKNOWN}.", "", "## Made of", "", *_parts(known.parts)]
    lines += ["", "## Data by licence", "", *_by_licence(known.parts)]
    asked = [
        (one.id, f"{term}: {TERMS[term]}", clause)
        for one in known.licences()
        for term, clause in one.terms.items()
    ]
    if asked:
        heads = ("licence", "what it asks for", "where")
        lines += ["", "## What the licences ask for", "", *_table(heads, asked)]
    if conflicts := known.conflicts():
        lines += ["", "## What does not go together", "", *(f"- {one}" for one in conflicts)]
    return "\n".join([*lines, "", "## Use", "", *_use(known), ""])


def _tag(licence: str) -> str:
    found = find_licence(licence) if licence else None
    return found.id.lower() if found else "other" if licence else UNKNOWN


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]


def _parts(parts: Iterable[Part]) -> list[str]:
    rows = []
    for part in parts:
        counts = [f"{n:,}" if n else "" for n in (part.documents, part.text_bytes, part.tokens)]
        sources = ", ".join(part.sources[:_MOST_SOURCES])
        if len(part.sources) > _MOST_SOURCES:
            sources += f" and {len(part.sources) - _MOST_SOURCES} more"
        rows.append((part.kind, part.name, part.licence, *counts, sources))
    heads = ("", "name", "licence", "documents", "bytes", "tokens", "sources")
    return _table(heads, rows) if rows else ["Nothing is said."]


def _by_licence(parts: Iterable[Part]) -> list[str]:
    sums: dict[str, list[int]] = {}
    for part in parts:
        if part.kind == "data":
            counts = sums.setdefault(part.licence, [0, 0, 0])
            for place, count in enumerate((part.documents, part.text_bytes, part.tokens)):
                counts[place] += count
    total = max(sum(counts[2] for counts in sums.values()), 1)
    rows = [
        (licence, *(f"{count:,}" for count in counts), f"{100 * counts[2] / total:.1f}")
        for licence, counts in sorted(sums.items(), key=lambda item: (-item[1][2], item[0]))
    ]
    heads = ("licence", "documents", "bytes", "tokens", "% of the tokens")
    return _table(heads, rows) if rows else ["No text is known of."]


def _use(known: Provenance) -> list[str]:
    """Return what those must do who use the model or hand it on, by the table."""
    by_term: dict[str, list[str]] = {}
    for one in known.licences():
        for term in one.terms:
            by_term.setdefault(term, []).append(one.id)
    lines = [f"- {TERMS[term]} ({', '.join(by_term[term])})" for term in TERMS if term in by_term]
    lines += [f"- the text of {one.id}: {one.url}" for one in known.licences()]
    asked = [part.licence for part in known.parts if part.kind == "terms"]
    lines += [f"- a source's own terms: {one}" for one in dict.fromkeys(asked)]
    if known.unknown():
        lines.append("- the licence of some parts is unknown: ask before you hand the model on")
    return [
        *(lines or ["Nothing is known of what its parts ask for."]),
        "",
        "This is a table of what texts of licences say, and no legal advice.",
    ]
