"""Verifies a prepared corpus against its record: file and shard digests, sums of counts."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from bmforge.data.prepare.funnel import Amount, Funnel
from bmforge.data.prepare.outputs import OutputFile, digest_part
from bmforge.data.prepare.record import RECORD_NAME, PrepareReport, read_record
from bmforge.data.prepare.summary import KEPT
from bmforge.data.prepare.tokenize import EncodeCount
from bmforge.data.store.columns import read_columns
from bmforge.data.store.sharded import open_store
from bmforge.errors import DataError

__all__ = ["verify_store"]

_DROPPED = "dropped.jsonl"


def verify_store(out_dir: str | os.PathLike[str]) -> list[str]:
    """Check a prepared corpus; return a list with one sentence per fault.

    Every file is read and compared with its digest in ``prepared.toml``; for a token file, the
    shards with changed bytes are named. For corpora without digests the counts are compared.

    Raises:
        DataError: the record is missing or cannot be read.
    """
    out = Path(out_dir)
    if not (out / RECORD_NAME).is_file():
        raise DataError(
            f"{str(out)!r} has no {RECORD_NAME}. Pass an output directory of bmforge prepare."
        )
    report, _ = read_record(out)
    faults = [fault for output in report.outputs for fault in _check_file(out, output)]
    if not faults:  # a damaged file has wrong counts too, which need no second message
        faults += _check_stores(report)
        faults += _check_sums(report)
    return faults


def _check_file(out: Path, output: OutputFile) -> Iterator[str]:
    path = out / output.path
    if not path.is_file():
        yield f"{output.path} does not exist"
        return
    if digest_part(path, 0, path.stat().st_size) == output.digest:
        return
    size = path.stat().st_size
    if size != output.size_bytes:
        yield f"{output.path} has {size} bytes, but {RECORD_NAME} lists {output.size_bytes}"
    else:
        yield f"the content of {output.path} does not match its checksum"
    begin = 0
    for part in output.parts:
        if digest_part(path, begin, part.end) != part.digest:
            yield (
                f"{output.path}: shard {part.shard} is damaged, bytes {begin} to "
                f"{part.end}; its inputs are {part.inputs}"
            )
        begin = part.end


def _check_stores(report: PrepareReport) -> Iterator[str]:
    for prefix, count in (
        (report.train_prefix, report.train),
        (report.validation_prefix, report.validation),
    ):
        if prefix is not None:
            yield from _check_store(prefix, count, report)


def _check_store(prefix: Path, count: EncodeCount, report: PrepareReport) -> Iterator[str]:
    try:
        store = open_store(prefix)
    except DataError as error:
        yield str(error)
        return
    name = f"{prefix.parent.name}/{prefix.name}"
    for what, actual, recorded in (
        ("tokens", store.num_tokens, count.tokens),
        ("documents", store.num_documents, count.documents),
    ):
        if actual != recorded:
            yield f"{name} has {actual} {what}, but {RECORD_NAME} lists {recorded}"
    ends = store.pointers[:] // store.dtype.itemsize + store.sizes[:] - 1
    open_ended = int((store.tokens[ends] != report.eos_id).sum()) if len(ends) else 0
    if open_ended:
        yield f"{name}: {open_ended} documents do not end with the token {report.eos_id}"
    if any(output.path.endswith(".doc") for output in report.outputs):
        try:
            read_columns(store)
        except DataError as error:
            yield str(error)


def _check_sums(report: PrepareReport) -> Iterator[str]:
    funnel = report.funnel
    if funnel is None:
        return
    if funnel.missing() != Amount():
        yield f"the counts in {RECORD_NAME} are inconsistent: {funnel.missing()} are missing"
    if funnel.kept.documents != report.documents:
        yield (
            f"{RECORD_NAME}: the stages keep {funnel.kept.documents} documents, but the corpus "
            f"has {report.documents}"
        )
    if report.summary is not None:
        sums: dict[str, Amount] = {}
        for outcomes in report.summary.sources.values():
            for outcome, counts in outcomes.items():
                sums.setdefault(outcome, Amount()).add(*counts)
        if sums != {KEPT: funnel.kept, **funnel.dropped}:
            yield f"{RECORD_NAME}: the counts of the sources do not add up to those of the stages"
    yield from _check_dropped(report.out_dir / _DROPPED, funnel)


def _check_dropped(path: Path, funnel: Funnel) -> Iterator[str]:
    """Yield a sentence for each rule whose sampled documents contradict its number of drops."""
    shown: Counter[str] = Counter()
    if path.is_file():
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            try:
                shown[json.loads(line)["rule"]] += 1
            except (ValueError, KeyError, TypeError) as error:
                yield f"{path.name}, line {number} is not a dropped document ({error})"
                return
    for rule in {*shown, *funnel.dropped}:
        dropped = funnel.dropped.get(rule, Amount()).documents
        if shown[rule] > dropped or (dropped and not shown[rule]):
            yield (
                f"{path.name} lists {shown[rule]} documents of {rule!r}, but {dropped} were dropped"
            )
