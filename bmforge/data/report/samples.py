"""Reads samples of a prepared corpus: dropped documents by rule, and kept documents."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bmforge.data.prepare.record import PrepareReport, read_record
from bmforge.data.prepare.tokenize import load_tokenizer
from bmforge.data.store.sharded import open_store
from bmforge.data.store.token_store import TokenStore
from bmforge.errors import ConfigError, DataError, suggest

__all__ = ["read_dropped", "read_kept"]

_DROPPED = "dropped.jsonl"
_MOST_TOKENS = 400  # tokens shown of each kept document
_ALL = "all"


def read_dropped(
    out_dir: str | os.PathLike[str], rule: str = _ALL, most: int | None = None
) -> list[dict[str, Any]]:
    """Return samples of dropped documents from ``dropped.jsonl``.

    Args:
        out_dir: directory of a prepared corpus.
        rule: name of a rule or of a rule set (``gopher_quality``), or ``all``.
        most: maximum number of documents per rule (default: all).

    Raises:
        ConfigError: no document was dropped by that rule.
        DataError: the directory has no record, or the samples cannot be read.
    """
    report, _ = read_record(Path(out_dir))
    rules = sorted(report.funnel.dropped if report.funnel else ())
    selected = {name for name in rules if rule in (_ALL, name, name.partition(".")[0])}
    if not selected and rule != _ALL:
        raise ConfigError(
            f"no document of {str(out_dir)!r} was dropped by the rule dropped={rule!r} (rules that "
            f"dropped documents: {', '.join(rules) or 'none'}).{suggest(rule, rules)}"
        )
    counts: dict[str, int] = {}
    entries = []
    for entry in _read_lines(Path(out_dir) / _DROPPED):
        counts[entry["rule"]] = counts.get(entry["rule"], 0) + 1
        if entry["rule"] in selected and (most is None or counts[entry["rule"]] <= most):
            entries.append(entry)
    return entries


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        entries = [json.loads(line) for line in path.read_bytes().splitlines()]
        if not all(
            {"rule", "value", "bound", "excerpt", "source", "place"} <= {*e} for e in entries
        ):
            raise ValueError("an entry lacks rule, value, bound, excerpt, source or place")
        return entries
    except (ValueError, TypeError) as error:
        raise DataError(f"{str(path)!r} is damaged ({error}). Prepare the corpus again.") from error


def read_kept(out_dir: str | os.PathLike[str], most: int) -> list[str]:
    """Return the decoded beginnings of `most` kept documents, evenly spaced in the corpus.

    Raises:
        DataError: the directory has no record, or its store is damaged.
    """
    report, _ = read_record(Path(out_dir))
    store, tokenizer = open_store(report.train_prefix), load_tokenizer(report.tokenizer_dir)
    return [
        tokenizer.decode([token for token in ids if token != report.eos_id])
        for ids in _spread(store, report, most)
    ]


def _spread(store: TokenStore, report: PrepareReport, most: int) -> Sequence[list[int]]:
    count = min(most, len(store))
    places = [number * len(store) // count for number in range(count)]
    return [store.get(index)[:_MOST_TOKENS].tolist() for index in places]
