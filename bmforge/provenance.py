"""Provenance of a model: the models and data it was made from, and their licenses.

The record is stored as ``LICENSE.json`` next to a model card. A model that is made from another
model or from texts inherits their records. Nothing is guessed: the license of a model or data set
that states none is unknown. `licenses` has the terms of each license.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bmforge.errors import DataError
from bmforge.files import read_json, replace_file
from bmforge.gguf_header import is_gguf, read_gguf_header
from bmforge.licenses import (
    TERMS,
    UNKNOWN,
    Conflict,
    License,
    find_license,
    license_name,
    merge_licenses,
)
from bmforge.logging import get_logger

__all__ = [
    "LICENSE_FILE",
    "ProvenanceSource",
    "Provenance",
    "describe_provenance",
    "model_card",
    "read_provenance",
    "to_metadata",
    "warn_of_licenses",
    "write_provenance",
]

LICENSE_FILE, _CARD = "LICENSE.json", "README.md"
_FORMAT = 1
_MARK = "<!-- written by bmforge from LICENSE.json -->"
# Earlier versions spelled the file name, the key in the file and the GGUF key in British English.
_OLD_FILE, _OLD_KEY, _OLD_MARK = "LICENCE.json", "licence", _MARK.replace("LICENSE", "LICENCE")
_OLD_METADATA_KEY = "bmforge.licence"
_MOST_SOURCES, _FEW = 20, 5
_KINDS = {"base": "base model", "delta": "adapter"}  # other kinds have their own name
_HUB_KEY, _OWN_KEY = "general.license", "bmforge.license"  # keys in a GGUF file
_FRONT = re.compile(r"\A---\s*\n(.*?)\n---\s*\n", re.DOTALL)
_SAID = re.compile(r"^license(_name)?\s*:\s*[\"']?([^\"'#\n]+)", re.MULTILINE)
_NOTHING = ("", "other", UNKNOWN)  # values in model cards that name no license


@dataclass(frozen=True)
class ProvenanceSource:
    """A model or data set that a model was made from.

    Attributes:
        kind: ``base`` (a model), ``delta`` (an adapter), ``data``, or ``terms`` (further terms
            of a data source; `license` then says where to find them).
        name: name of the model or corpus.
        license: id of the license, the stated text if it is not recognized, or ``unknown``.
        documents, text_bytes, tokens: number of documents, bytes and tokens of the data.
        sources: hosts and files of the data for attribution; those with most documents come first.
    """

    kind: str
    name: str
    license: str = UNKNOWN
    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Provenance:
    """The license of a model, and the models and data it was made from.

    Attributes:
        license: license under which the model is distributed; empty if none is stated.
        parts: models and data it was made from.
    """

    license: str = ""
    parts: tuple[ProvenanceSource, ...] = ()

    def __bool__(self) -> bool:
        """Return True if a license, a model or a data set is recorded."""
        return bool(self.license or self.parts)

    def as_parts(self, kind: str, name: str) -> tuple[ProvenanceSource, ...]:
        """Return the provenance entries of a model that is derived from this model.

        The first entry is this model itself, with the given kind and name; the entries in this
        model's `parts` follow.
        """
        return (ProvenanceSource(kind, name, self.license or UNKNOWN), *self.parts)

    def joined(self, parts: Iterable[ProvenanceSource]) -> Provenance:
        """Return a copy with the given models and data added to `parts`, without duplicates."""
        return replace(self, parts=tuple(dict.fromkeys((*self.parts, *parts))))

    def conflicts(self) -> list[Conflict]:
        """Return the conflicts among the licenses of the model and of its `parts`."""
        named = [part.license for part in self.parts if part.kind != "terms"]
        return merge_licenses(named, self.license)

    def licenses(self) -> list[License]:
        """Return the recognized licenses of the model and of its `parts`, sorted by id."""
        names = [self.license, *(part.license for part in self.parts if part.kind != "terms")]
        by_id = {license.id: license for license in map(find_license, names) if license is not None}
        return [by_id[id] for id in sorted(by_id)]

    def unknown(self) -> list[ProvenanceSource]:
        """Return the models and data whose license is not recognized."""
        return [p for p in self.parts if p.kind != "terms" and find_license(p.license) is None]


def read_provenance(path: str | Path) -> Provenance:
    """Read a model's provenance from ``LICENSE.json``, its model card, or GGUF metadata.

    Args:
        path: directory of a model, or a GGUF file.

    Raises:
        DataError: the record is damaged.
    """
    path = Path(path)
    if is_gguf(path):
        metadata = read_gguf_header(path).metadata
        for key in (_OWN_KEY, _OLD_METADATA_KEY):
            if key in metadata:
                return _from_record(_parse(str(metadata[key]), path), path)
        return Provenance(_named(str(metadata.get(_HUB_KEY, ""))))
    for file in (path / LICENSE_FILE, path / _OLD_FILE):
        if file.is_file():
            return _from_record(read_json(file), file)
    return Provenance(_license_of_card(path / _CARD))


def _parse(text: str, where: Path) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(
            f"{str(where)!r} has a field {_OWN_KEY} that is not valid JSON ({error}). Download "
            "the file again."
        ) from error


def _from_record(record: Any, where: Path) -> Provenance:
    try:
        if record["format"] != _FORMAT:
            raise ValueError(f"format {record['format']}, but the supported format is {_FORMAT}")
        parts = tuple(
            ProvenanceSource(**{**_rename_old_key(p), "sources": tuple(p["sources"])})
            for p in record["made_of"]
        )
        return Provenance(str(_rename_old_key(record)["license"] or ""), parts)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{str(where)!r} is not a license record ({type(error).__name__}: {error}). Download "
            "the file again."
        ) from error


def _rename_old_key(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a provenance record in which the license key of earlier versions is renamed."""
    return {"license" if key == _OLD_KEY else key: value for key, value in record.items()}


def to_metadata(provenance: Provenance) -> dict[str, str]:
    """Return the provenance as metadata entries of a GGUF file; empty if nothing is known."""
    if not provenance:
        return {}
    own = {_OWN_KEY: json.dumps(_to_record(provenance), ensure_ascii=False)}
    return {_HUB_KEY: _tag(provenance.license), **own} if provenance.license else own


def _license_of_card(card: Path) -> str:
    """Return the license in the front matter of a Hugging Face model card; "" if none is stated."""
    try:
        text = card.read_text("utf-8") if card.is_file() else ""
    except (OSError, UnicodeDecodeError):
        return ""
    head = _FRONT.match(text)
    fields = {m[1] or "": m[2].strip() for m in _SAID.finditer(head[1])} if head else {}
    return _named(fields.get("", "")) or _named(fields.get("_name", ""))


def _named(text: str) -> str:
    return "" if text.strip().lower() in _NOTHING else license_name(text)


def _to_record(provenance: Provenance) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "license": provenance.license or None,
        "made_of": [asdict(part) for part in provenance.parts],
        "terms": {license.id: dict(license.terms) for license in provenance.licenses()},
        "do_not_go_together": [asdict(conflict) for conflict in provenance.conflicts()],
    }


def write_provenance(directory: str | Path, provenance: Provenance, name: str = "") -> None:
    """Write ``LICENSE.json`` and a model card; a card that bmforge did not write is kept.

    Args:
        directory: directory of the model.
        provenance: record to write; an empty one removes an earlier record.
        name: name of the model in the card; if "", the directory's name.
    """
    folder = Path(directory)
    file, card = folder / LICENSE_FILE, folder / _CARD
    text = card.read_text("utf-8", errors="replace") if card.exists() else _MARK
    is_ours = _MARK in text or _OLD_MARK in text
    (folder / _OLD_FILE).unlink(missing_ok=True)  # replaced by, or removed with, the new file
    if not provenance:  # remove the record of an earlier model in this directory
        file.unlink(missing_ok=True)
        if is_ours:
            card.unlink(missing_ok=True)
        return
    replace_file(file, json.dumps(_to_record(provenance), indent=2, ensure_ascii=False) + "\n")
    if is_ours:
        replace_file(card, model_card(provenance, name or folder.resolve().name))


def warn_of_licenses(where: object, provenance: Provenance, *sources: Provenance) -> None:
    """Log conflicting clauses (as warnings) and unknown licenses of models or data.

    Args:
        where: model or run that the provenance belongs to.
        provenance: record whose licenses are checked.
        sources: records of the models that this model was made from. Their conflicts and unknown
            licenses are not logged again; `bmforge info` shows them.
    """
    old = [conflict for source in sources for conflict in source.conflicts()]
    for conflict in provenance.conflicts():
        if conflict not in old:
            get_logger().warning("the licenses in %s conflict: %s", where, conflict)
    recorded = [part for source in sources for part in source.parts]
    if unknown := [part for part in provenance.unknown() if part not in recorded]:
        names = dict.fromkeys(f"{_KINDS.get(p.kind, p.kind)} {p.name!r}" for p in unknown)
        shown = ", ".join(list(names)[:_FEW])
        more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
        get_logger().info("%s has sources whose license is unknown: %s%s", where, shown, more)


def describe_provenance(provenance: Provenance) -> list[str]:
    """Return lines of text about a model's license, its parts and their conflicts."""
    lines = [f"license: {provenance.license or UNKNOWN}"]
    for part in provenance.parts:
        counts = f", {part.documents:,} documents, {part.tokens:,} tokens" if part.documents else ""
        kind = _KINDS.get(part.kind, part.kind)
        lines.append(f"{kind} {part.name}: license {part.license}{counts}")
    lines += [f"conflict: {conflict}" for conflict in provenance.conflicts()]
    return lines


def model_card(provenance: Provenance, name: str) -> str:
    """Return a model card in Markdown: data by license, and the obligations of these licenses."""
    bases = list(dict.fromkeys(part.name for part in provenance.parts if part.kind == "base"))
    lines = ["---", f"license: {_tag(provenance.license)}"]
    lines += ["base_model:", *(f"- {base}" for base in bases)] if bases else []
    lines += ["library_name: bmforge", "---", "", _MARK, "", f"# {name}", ""]
    lines += [f"License: {provenance.license or UNKNOWN}.", "", "## Made of", ""]
    lines += _parts(provenance.parts)
    lines += ["", "## Data by license", "", *_by_license(provenance.parts)]
    requirements = [
        (license.id, f"{term}: {TERMS[term]}", clause)
        for license in provenance.licenses()
        for term, clause in license.terms.items()
    ]
    if requirements:
        heads = ("license", "what it asks for", "where")
        lines += ["", "## What the licenses require", "", *_table(heads, requirements)]
    if conflicts := provenance.conflicts():
        lines += ["", "## Conflicts", "", *(f"- {conflict}" for conflict in conflicts)]
    return "\n".join([*lines, "", "## Use", "", *_use(provenance), ""])


def _tag(license: str) -> str:
    known_license = find_license(license) if license else None
    return known_license.id.lower() if known_license else "other" if license else UNKNOWN


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]


def _parts(parts: Iterable[ProvenanceSource]) -> list[str]:
    rows = []
    for part in parts:
        counts = [f"{n:,}" if n else "" for n in (part.documents, part.text_bytes, part.tokens)]
        sources = ", ".join(part.sources[:_MOST_SOURCES])
        if len(part.sources) > _MOST_SOURCES:
            sources += f" and {len(part.sources) - _MOST_SOURCES} more"
        rows.append((part.kind, part.name, part.license, *counts, sources))
    heads = ("", "name", "license", "documents", "bytes", "tokens", "sources")
    return _table(heads, rows) if rows else ["Nothing is stated."]


def _by_license(parts: Iterable[ProvenanceSource]) -> list[str]:
    sums: dict[str, list[int]] = {}
    for part in parts:
        if part.kind == "data":
            counts = sums.setdefault(part.license, [0, 0, 0])
            for column, count in enumerate((part.documents, part.text_bytes, part.tokens)):
                counts[column] += count
    total = max(sum(counts[2] for counts in sums.values()), 1)
    rows = [
        (license, *(f"{count:,}" for count in counts), f"{100 * counts[2] / total:.1f}")
        for license, counts in sorted(sums.items(), key=lambda item: (-item[1][2], item[0]))
    ]
    heads = ("license", "documents", "bytes", "tokens", "% of the tokens")
    return _table(heads, rows) if rows else ["No data is recorded."]


def _use(provenance: Provenance) -> list[str]:
    """Return card lines with the obligations of people who use or distribute the model."""
    by_term: dict[str, list[str]] = {}
    for license in provenance.licenses():
        for term in license.terms:
            by_term.setdefault(term, []).append(license.id)
    lines = [f"- {TERMS[term]} ({', '.join(by_term[term])})" for term in TERMS if term in by_term]
    lines += [f"- text of {license.id}: {license.url}" for license in provenance.licenses()]
    own_terms = [part.license for part in provenance.parts if part.kind == "terms"]
    lines += [f"- a source's own terms: {license}" for license in dict.fromkeys(own_terms)]
    if provenance.unknown():
        lines.append(
            "- the license of some parts is unknown: ask their authors before you distribute the "
            "model"
        )
    return [
        *(lines or ["The license terms of the parts are unknown."]),
        "",
        "This table summarizes license texts and is not legal advice.",
    ]
