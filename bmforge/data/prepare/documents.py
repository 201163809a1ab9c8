"""First stage of `prepare`: applies all single-document steps to one shard of the input."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bmforge.data.clean.drop import Drop, cut_excerpt
from bmforge.data.clean.normalize import normalize_text, text_digest
from bmforge.data.prepare.engine import Beat, SkippedEntry, StagePart
from bmforge.data.prepare.funnel import REPLACED, Dropped, Funnel
from bmforge.data.prepare.journal import write_hashed
from bmforge.data.prepare.shards import TOPICS, FileRange, Shard
from bmforge.data.prepare.summary import Summary, group_of
from bmforge.data.sources.document import Document, from_record, to_record
from bmforge.data.sources.files import (
    advise_skipping,
    parse_record,
    python_topics,
    read_records,
)
from bmforge.data.sources.packed import open_unpacked
from bmforge.data.sources.record import ReadOptions, Record, failed_record, show_name
from bmforge.errors import DataError

__all__ = [
    "DIGESTS",
    "NORMALISE",
    "UNREADABLE",
    "DocumentsTask",
    "DocumentStage",
    "make_documents",
    "read_digests",
    "read_shard",
    "shard_file",
]

UNREADABLE = "unreadable"  # rule name of damaged entries
DIGESTS = np.dtype([("digest", "S16"), ("text_bytes", "<i8"), ("read_bytes", "<i8")])


@dataclass(frozen=True)
class DocumentStage:
    """A named processing step on single documents.

    Attributes:
        name: name in the report and the journal.
        run: module-level function (so that it can be pickled) that returns the document, changed or
            not, or a `Drop`.
        version: string that changes whenever the function or its settings change.
        hides: True for a step that masks private text; it is also applied to the samples of
            documents that other steps drop.
    """

    name: str
    run: Callable[[Document], Document | Drop]
    version: str = "1"
    hides: bool = False


def _normalise(document: Document) -> Document | Drop:
    text = normalize_text(document.text)
    return replace(document, text=text) if text else Drop("empty", 0, 1, "")


NORMALISE = DocumentStage("normalise", _normalise)


@dataclass(frozen=True)
class DocumentsTask:
    """Input of a worker of the first stage: a shard, the steps, and the reader options.

    Attributes:
        folder: output folder of the stage's files.
        seen: size and modification time of each file when the shards were planned.
        by: grouping of sources, from `choose_grouping`.
    """

    shard: Shard
    folder: Path
    steps: tuple[DocumentStage, ...]
    options: ReadOptions
    skip_bad: bool
    keep_dropped: bool
    seen: dict[str, tuple[int, int]]
    by: str = "file"


def make_documents(part: StagePart, beat: Beat) -> dict[str, Any]:
    """Read one shard, apply the steps to its documents, and write the remaining documents.

    Returns:
        dict with ``files`` (file names and hashes), ``documents`` and ``text_bytes`` (number and
        bytes of the remaining documents), ``funnel`` (documents read, kept and dropped by each
        rule), and ``sources`` (counts of dropped documents per group).

    Raises:
        DataError: an entry is damaged and `skip_bad` is False, or a file changed while it was read.
    """
    task: DocumentsTask = part.task
    funnel, dropped, summary = Funnel(), Dropped(task.keep_dropped), Summary()
    files: dict[str, str] = {}
    rows: list[tuple[bytes, int, int]] = []
    number = task.shard.number
    with ExitStack() as stack:
        out = stack.enter_context(write_hashed(shard_file(task.folder, number), files))
        lines = _pack(stack, out)
        for document, read_bytes, drop in _process(part, beat, funnel):
            funnel.read.add(1, read_bytes)
            if drop is not None:
                funnel.drop(drop.rule, 1, read_bytes)
                summary.add_source(group_of(document.source, task.by), drop.rule, read_bytes)
                dropped.add(*_hide(task.steps, document, drop))
                continue
            funnel.kept.add(1, read_bytes)
            lines(json.dumps(to_record(document), ensure_ascii=False).encode() + b"\n")
            size = len(document.text.encode())
            rows.append((text_digest(document.text), size, read_bytes))
    for name, content in (
        (f"{number:06d}.digests", np.array(rows, dtype=DIGESTS).tobytes()),
        (f"{number:06d}.dropped.jsonl", dropped.lines().encode()),
    ):
        with write_hashed(task.folder / name, files) as file:
            file.write(content)
    _check_unchanged(task)
    text_bytes = sum(row[1] for row in rows)
    result = {"documents": len(rows), "text_bytes": text_bytes, "funnel": funnel.to_record()}
    return {"files": files, "sources": summary.sources, **result}


def _process(
    part: StagePart, beat: Beat, funnel: Funnel
) -> Iterator[tuple[Document, int, Drop | None]]:
    """Yield the document of each input entry, its raw size in bytes, and its `Drop` or None."""
    task: DocumentsTask = part.task
    skipped = {skip.entry: skip for skip in part.skipped}
    for entry, source, record in _entries(part, skipped, beat):
        unread = Document("", source, record.place)
        if entry in skipped:
            skip = skipped[entry]
            drop = Drop(skip.rule, skip.value, skip.bound, skip.name)
            yield unread, record.size_bytes, drop
            continue
        beat(entry, False, f"{source}:{record.place}")
        try:
            parsed: Document | Drop = parse_record(record)
        except DataError as error:
            if not task.skip_bad:
                raise advise_skipping(error) from error
            parsed = Drop(UNREADABLE, None, None, str(error))
        if isinstance(parsed, Drop):
            yield unread, record.size_bytes, parsed
        else:
            if replaced := int(parsed.scores.get("replaced_characters", 0)):
                funnel.change(REPLACED, 1, replaced)
            if damaged := int(parsed.scores.get("damaged_parts", 0)):
                funnel.change("leaving out damaged parts", 1, damaged)
            document, reason = _take_steps(parsed, task.steps, funnel)
            yield document, len(parsed.text.encode()), reason


def _take_steps(
    document: Document, steps: tuple[DocumentStage, ...], funnel: Funnel
) -> tuple[Document, Drop | None]:
    for step in steps:
        try:
            result = step.run(document)
        except Exception as error:
            error.add_note(f"in the step {step.name!r} of {document.source}:{document.place}")
            raise
        if isinstance(result, Drop):
            return document, result
        if result.text != document.text:
            funnel.change(step.name, 1, abs(len(result.text) - len(document.text)))
        document = result
    return document, None


def _hide(
    steps: tuple[DocumentStage, ...], document: Document, drop: Drop
) -> tuple[Document, Drop]:
    """Mask private text in a dropped document and its `Drop`, with the steps that hide text."""
    for step in steps:
        if step.hides:
            text, excerpt = _changed(step, document.text), _changed(step, drop.excerpt)
            if document.text.startswith(drop.excerpt):  # the excerpt may end inside private text
                excerpt = cut_excerpt(text)
            document, drop = replace(document, text=text), replace(drop, excerpt=excerpt)
    return document, drop


def _changed(step: DocumentStage, text: str) -> str:
    result = step.run(Document(text, "")) if text else ""
    return result.text if isinstance(result, Document) else ""


def _entries(
    part: StagePart, skipped: dict[int, SkippedEntry], beat: Beat
) -> Iterator[tuple[int, str, Record]]:
    """Yield (index in the shard, file, record) of each entry; read errors become error records."""
    task: DocumentsTask = part.task
    entry = 0
    for span in task.shard.ranges:
        records, source = _read_range(span, task.options), show_name(span.path)
        first = entry
        while True:
            if entry in skipped and skipped[entry].in_reading:
                yield entry, source, Record("1", 0, _never)
                entry += 1
                break
            beat(entry, True, f"{source}, at entry {entry} of its shard")
            try:
                record = next(records, None)
            except DataError as error:
                if not task.skip_bad:
                    raise advise_skipping(error) from error
                # The size of the lost end of a file is unknown.
                is_whole = entry == first and span.begin == 0 and span.end < 0
                yield entry, source, failed_record("1", _file_bytes(span) if is_whole else 0, error)
                entry += 1
                break
            if record is None:
                break
            yield entry, source, record
            entry += 1


def _file_bytes(span: FileRange) -> int:
    try:
        return os.stat(span.path).st_size
    except OSError:
        return 0


def _never() -> Document:
    raise AssertionError("an entry that must be left unparsed was parsed")


def _read_range(span: FileRange, options: ReadOptions) -> Iterator[Record]:
    if span.path == TOPICS:
        for document in python_topics():
            size = len(document.text.encode())
            yield Record(document.place, size, partial(_same, document))
        return
    yield from read_records(
        Path(span.path), options, begin=span.begin, end=span.end, line=span.line
    )


def _same(document: Document) -> Document:
    return document


def _check_unchanged(task: DocumentsTask) -> None:
    for path, (size_bytes, modified_ns) in task.seen.items():
        try:
            status = os.stat(path)
        except OSError as error:
            raise DataError(
                f"file {path!r} was removed while it was being read ({error}). Restore the file, "
                "and run the command again."
            ) from error
        if (status.st_size, status.st_mtime_ns) != (size_bytes, modified_ns):
            raise DataError(
                f"file {path!r} changed while it was being read. Run the command again."
            )


def _pack(stack: ExitStack, out: Any) -> Callable[[bytes], Any]:
    """Return a function that writes to `out`, with compression if zstandard is installed."""
    try:
        import zstandard
    except ImportError:
        return out.write
    packer = zstandard.ZstdCompressor(level=3).stream_writer(out, closefd=False)
    return stack.enter_context(packer).write


def shard_file(folder: Path, number: int) -> Path:
    """Return the path of the file with a shard's documents."""
    try:
        import zstandard  # noqa: F401
    except ImportError:
        return folder / f"{number:06d}.jsonl"
    return folder / f"{number:06d}.jsonl.zst"


def read_shard(folder: Path, number: int) -> Iterator[Document]:
    """Yield the documents of a shard, as written by `make_documents`."""
    with open_unpacked(shard_file(folder, number)) as file:
        for line in io.BufferedReader(file):  # type: ignore[type-var]
            yield from_record(json.loads(line))


def read_digests(folder: Path, number: int) -> np.ndarray:
    """Return digest, size, and size before cleaning (in bytes) of each document of a shard."""
    return np.fromfile(folder / f"{number:06d}.digests", dtype=DIGESTS)
