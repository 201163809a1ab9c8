"""Last stages: train a tokenizer on the training texts, and encode each shard."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from bmforge.data.clean.drop import Drop, cut_excerpt
from bmforge.data.clean.normalize import text_digest
from bmforge.data.prepare.documents import read_digests, read_shard
from bmforge.data.prepare.engine import Beat, StagePart
from bmforge.data.prepare.funnel import Dropped
from bmforge.data.prepare.journal import digest_file, digest_files, make_key, write_hashed
from bmforge.data.prepare.masks import open_mask
from bmforge.data.prepare.near import NearDrops
from bmforge.data.prepare.spans import Repeats, remove_spans
from bmforge.data.prepare.split import Split
from bmforge.data.prepare.summary import KEPT, Summary, group_of, origin_of
from bmforge.data.prepare.tokenize import EncodeCount, encode_quietly, load_tokenizer
from bmforge.data.sources.document import Document
from bmforge.data.store.columns import ColumnsBuilder
from bmforge.data.store.token_store import TokenStore
from bmforge.files import sync_directory
from bmforge.licenses import UNKNOWN, license_name
from bmforge.tokenizers import Tokenizer

__all__ = [
    "DUPLICATE",
    "SIDES",
    "DocumentSplit",
    "EncodeTask",
    "encode_shard",
    "training_texts",
]

DUPLICATE = "duplicate"
SIDES = ("train", "validation")


@dataclass(frozen=True)
class DocumentSplit:
    """Documents of the first stage, and which of them are kept, held out or shortened.

    Attributes:
        documents: folder of the first stage.
        counts: documents per shard.
        kept, held_out: paths of the masks of kept and held-out documents.
        cut, cut_bytes: see `Split`.
        near: list of the near duplicates that were dropped.
        repeats: repeated spans to cut from the documents.
    """

    documents: Path
    counts: tuple[int, ...]
    kept: Path
    held_out: Path
    cut: int | None
    cut_bytes: int
    near: NearDrops | None = None
    repeats: Repeats | None = None

    def read(self, number: int) -> Iterator[tuple[Document, tuple[str, str] | None]]:
        """Yield each document of a shard with a pair of its training and validation texts.

        One of the two texts may be empty. The pair is None for a dropped document.
        """
        mask = open_mask(self.kept)
        split = Split(open_mask(self.held_out), self.cut, self.cut_bytes)
        first = sum(self.counts[:number])
        spans = self.repeats.read(first, self.counts[number]) if self.repeats else {}
        for position, document in enumerate(read_shard(self.documents, number), first):
            if position in spans and mask[position]:
                document = remove_spans(document, spans[position])
            yield document, split.divide(position, document.text) if mask[position] else None


@dataclass(frozen=True)
class EncodeTask:
    """Input of a worker that encodes one shard.

    Attributes:
        tokenizer: a tokenizer, or its directory.
        by: grouping of sources, from `choose_grouping`.
    """

    number: int
    chosen: DocumentSplit
    tokenizer: Tokenizer | Path
    eos_id: int
    folder: Path
    keep_dropped: bool
    by: str = "file"


def training_texts(chosen: DocumentSplit, train_bytes: int, most_bytes: int) -> Iterator[str]:
    """Yield the training texts, or a sample if they have more than `most_bytes` in total."""
    limit = min(int(2**64 * most_bytes / max(train_bytes, 1)), 2**64)
    for number in range(len(chosen.counts)):
        for _, texts in chosen.read(number):
            if texts is None or not texts[0]:
                continue
            if limit == 2**64 or int.from_bytes(text_digest(texts[0])[:8], "big") < limit:
                yield texts[0]


def encode_shard(part: StagePart, beat: Beat) -> dict[str, Any]:
    """Encode one shard into a training and a validation store; an empty store is not written.

    Returns:
        dict with ``files`` (file names and hashes), the fields of an `EncodeCount` for each of
        `SIDES`, and the ``summary`` of the shard's documents.
    """
    task: EncodeTask = part.task
    tokenizer = task.tokenizer
    if isinstance(tokenizer, Path):
        tokenizer = _load_once(tokenizer, make_key(digest_files(tokenizer)))
    name = f"{task.number:06d}"
    files: dict[str, str] = {}
    staging = task.folder / f"{name}.{os.getpid()}.partial"
    result: dict[str, Any] = {"files": files}
    for side, of in enumerate(SIDES):
        texts = _texts(task, side, beat)
        first = next(texts, None)
        if first is None:
            result[of] = asdict(EncodeCount())
            continue
        prefix = staging / f"{name}.{of}"
        count = encode_quietly(_chain(first, texts), tokenizer, prefix, task.eos_id)
        result[of] = asdict(count)
    prefixes = [staging / f"{name}.{of}" if result[of]["documents"] else None for of in SIDES]
    dropped, summary = _sum_up(task, prefixes)
    result["summary"] = summary.to_record()
    _move_out(staging, task.folder, files)
    with write_hashed(task.folder / f"{name}.dropped.jsonl", files) as file:
        file.write(dropped.lines().encode())
    return result


@lru_cache(maxsize=1)
def _load_once(folder: Path, digest: str) -> Tokenizer:
    """Load the tokenizer on the first shard of a worker.

    tokenizers 0.23 leaks 10 MB for every tokenizer that encodes text (the caches of its threads).
    """
    return load_tokenizer(str(folder))


def _texts(task: EncodeTask, side: int, beat: Beat) -> Iterator[Document]:
    for entry, (document, texts) in enumerate(task.chosen.read(task.number)):
        beat(entry, False, f"{document.source}:{document.place}")
        if texts is not None and texts[side]:
            yield Document(texts[side], document.source, document.place, document.id)


def _chain(first: Document, others: Iterator[Document]) -> Iterator[Document]:
    yield first
    yield from others


def _sum_up(task: EncodeTask, prefixes: Sequence[Path | None]) -> tuple[Dropped, Summary]:
    """Summarize the shard's documents, and write their metadata next to the stores.

    Args:
        prefixes: prefixes of the training and validation store; None for an empty store.

    Returns:
        samples of the documents that deduplication dropped, and the summary.
    """
    dropped, near, summary = Dropped(task.keep_dropped), task.chosen.near, Summary()
    first, count = sum(task.chosen.counts[: task.number]), task.chosen.counts[task.number]
    similar = near.read(first, count) if near else {}
    repeats = task.chosen.repeats
    spans = repeats.read(first, count) if repeats else {}
    sizes = read_digests(task.chosen.documents, task.number)
    tokens = [iter(TokenStore(prefix).sizes.tolist() if prefix else ()) for prefix in prefixes]
    columns = [ColumnsBuilder() for _ in prefixes]
    for entry, (document, texts) in enumerate(task.chosen.read(task.number)):
        read_bytes, group = int(sizes["read_bytes"][entry]), group_of(document.source, task.by)
        if texts is None:
            drop = Drop(DUPLICATE, None, None, cut_excerpt(document.text))
            if near and first + entry in similar:
                drop = near.describe(document, similar[first + entry])
            elif repeats and first + entry in spans:
                drop = repeats.describe(document)
            dropped.add(document, drop)
            summary.add_source(group, drop.rule, read_bytes)
            continue
        summary.add_source(group, KEPT, read_bytes)
        num_tokens = 0
        for side, text in enumerate(texts):
            if text:
                num_tokens += next(tokens[side])
                columns[side].add(document, origin_of(document), _license(document))
        # Cutting off repeats or the end for validation changes the size that stage one recorded.
        is_cut = first + entry in spans or all(texts)
        whole_bytes = int(sizes["text_bytes"][entry])
        text_bytes = sum(len(text.encode()) for text in texts) if is_cut else whole_bytes
        summary.add_kept(document, text_bytes, num_tokens)
    for prefix, builder in zip(prefixes, columns, strict=True):
        if prefix is not None:
            builder.build().write(prefix)
    return dropped, summary


def _license(document: Document) -> str:
    name = license_name(document.license)
    return "" if name == UNKNOWN else name


def _move_out(source: Path, folder: Path, files: dict[str, str]) -> None:
    """Move the stores' files from `source` to `folder`, and record their hashes in `files`."""
    if not source.exists():
        return
    for path in sorted(source.iterdir()):
        files[path.name] = digest_file(path)
        os.replace(path, folder / path.name)
    source.rmdir()
    sync_directory(folder)
