"""Provenance of the model of a run: its initial model and training texts, with their licenses."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bmforge.data import Condition, open_store, parse_conditions
from bmforge.data.prepare.record import RECORD_NAME, PrepareReport, read_record
from bmforge.data.store.columns import read_columns
from bmforge.data.store.conditions import select_documents
from bmforge.licenses import UNKNOWN, check_license
from bmforge.models.hub import find_model
from bmforge.provenance import Provenance, ProvenanceSource, read_provenance
from bmforge.recipes.inputs.selection import split_path

__all__ = ["find_provenance", "parts_of_corpus"]


def find_provenance(config: Any) -> Provenance:
    """Return the license and the provenance of an exported model.

    Args:
        config: the run's config; only directories of `prepare` record the licenses of data.

    Raises:
        ConfigError: the value of `license` is unknown.
        DataError: a license record is damaged.
    """
    license = check_license(config.license, "license") if config.license else ""
    parts: list[ProvenanceSource] = []
    if config.init_from is not None:
        base = read_provenance(find_model(config.init_from))
        parts += base.as_parts("base", _short(str(config.init_from)))
    where = parse_conditions(getattr(config.data, "where", ()))
    for path in getattr(config.data, "paths", ()):
        bare_path, own = split_path(path)
        parts += parts_of_corpus(bare_path, (*where, *own))
    return Provenance(license).joined(parts)


def parts_of_corpus(path: str, where: Sequence[Condition] = ()) -> Iterator[ProvenanceSource]:
    """Yield the license entries of a corpus, with document counts for a prepared one.

    Args:
        path: a prepared directory, or a bare store.
        where: conditions on the documents; only matching documents are counted.
    """
    folder = Path(path)
    if not (folder / RECORD_NAME).is_file():
        yield ProvenanceSource("data", _short(path))
        return
    report, _ = read_record(folder)
    summary = report.summary
    if summary is None or not summary.licenses:
        yield ProvenanceSource("data", folder.name, UNKNOWN, *_counts(report))
        return
    if where:
        yield from _chosen_parts(folder, where)
        for terms in summary.terms:
            if terms != UNKNOWN:  # their number of documents is not recorded
                yield ProvenanceSource("terms", folder.name, terms)
        return
    for license, (documents, text_bytes, tokens) in summary.licenses.items():
        by_count = sorted(
            summary.origins.get(license, {}).items(), key=lambda item: (-item[1][0], item[0])
        )
        sources = tuple(name for name, _ in by_count)
        yield ProvenanceSource("data", folder.name, license, documents, text_bytes, tokens, sources)
    for terms, counts in summary.terms.items():
        if terms != UNKNOWN:
            documents, text_bytes, tokens = counts
            yield ProvenanceSource("terms", folder.name, terms, documents, text_bytes, tokens)


def _chosen_parts(folder: Path, where: Sequence[Condition]) -> Iterator[ProvenanceSource]:
    """Yield one entry for each license among the documents that match the conditions.

    A document that is split at the train/validation boundary is counted twice.
    """
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)  # license -> source -> count
    tokens: Counter[str] = Counter()
    for split in ("train", "validation"):
        store = open_store(folder / split / "tokens")
        columns = read_columns(store)
        mask = select_documents(columns, where)
        rows = columns.rows[mask]
        sizes = np.fromiter((end - start for start, end in store.documents()), np.int64)[mask]
        for number in np.unique(rows["license"]):
            license, of = columns.names["license"][number] or UNKNOWN, rows["license"] == number
            tokens[license] += int(sizes[of].sum())
            for source, count in zip(
                *np.unique(rows["source"][of], return_counts=True), strict=True
            ):
                counts[license][columns.names["source"][source]] += int(count)
    for license, of_sources in counts.items():
        names = tuple(name for name, _ in of_sources.most_common() if name)
        documents = of_sources.total()
        yield ProvenanceSource("data", folder.name, license, documents, 0, tokens[license], names)


def _counts(report: PrepareReport) -> tuple[int, int, int]:
    text_bytes = report.train.text_bytes + report.validation.text_bytes
    return report.documents, text_bytes, report.train.tokens + report.validation.tokens


def _short(name: str) -> str:
    """Return a hub id unchanged; for a path, return the last part, since the rest is private."""
    path = Path(name)
    return name if name.count("/") == 1 and not path.exists() else path.name
