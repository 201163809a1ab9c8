"""What a run makes its model of: the model that it starts from, and the texts that it reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bmforge.data.prepare.record import RECORD_NAME, PrepareReport, read_record
from bmforge.licences import UNKNOWN, check_licence
from bmforge.models.hub import find_model
from bmforge.provenance import Part, Provenance, read_provenance
from bmforge.recipes.inputs.selection import place_of

__all__ = ["find_provenance", "parts_of_corpus"]


def find_provenance(config: Any) -> Provenance:
    """Return under which licence a run's export is handed on, and what it is made of.

    Args:
        config: of a run; what its data's paths name is known where `prepare` made it.

    Raises:
        ConfigError: `licence` is not known.
        DataError: a record of licences is damaged.
    """
    licence = check_licence(config.licence, "licence") if config.licence else ""
    parts: list[Part] = []
    if config.init_from is not None:
        base = read_provenance(find_model(config.init_from))
        parts += base.as_parts("base", _short(str(config.init_from)))
    for place in dict.fromkeys(map(place_of, getattr(config.data, "paths", ()))):
        parts += parts_of_corpus(place)
    return Provenance(licence).joined(parts)


def parts_of_corpus(path: str) -> Iterator[Part]:
    """Yield what is known of a corpus's licences: of a prepared one, each with its documents."""
    folder = Path(path)
    if not (folder / RECORD_NAME).is_file():
        yield Part("data", _short(path))
        return
    report, _ = read_record(folder)
    summary = report.summary
    if summary is None or not summary.licences:
        yield Part("data", folder.name, UNKNOWN, *_counts(report))
        return
    for licence, (documents, text_bytes, tokens) in summary.licences.items():
        by_count = sorted(
            summary.origins.get(licence, {}).items(), key=lambda item: (-item[1][0], item[0])
        )
        sources = tuple(name for name, _ in by_count)
        yield Part("data", folder.name, licence, documents, text_bytes, tokens, sources)
    for terms, counts in summary.terms.items():
        if terms != UNKNOWN:
            documents, text_bytes, tokens = counts
            yield Part("terms", folder.name, terms, documents, text_bytes, tokens)


def _counts(report: PrepareReport) -> tuple[int, int, int]:
    text_bytes = report.train.text_bytes + report.validation.text_bytes
    return report.documents, text_bytes, report.train.tokens + report.validation.tokens


def _short(name: str) -> str:
    """Return a hub's id as it is, and of a path the last part: where it lay is nobody else's."""
    path = Path(name)
    return name if name.count("/") == 1 and not path.exists() else path.name
