"""Finds repeated spans and paragraphs in the kept documents, and cuts the later occurrences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bmforge.data.clean.drop import Drop, cut_excerpt
from bmforge.data.clean.normalize import normalize_text
from bmforge.data.dedup.exact import find_repeated_numbers, locate_paragraphs
from bmforge.data.dedup.spans import Spans, cut_spans, find_repeated_runs, locate_runs
from bmforge.data.prepare.documents import read_digests, read_shard
from bmforge.data.prepare.journal import write_hashed
from bmforge.data.prepare.masks import new_mask, open_mask, read_rows
from bmforge.data.sources.document import Document
from bmforge.errors import ConfigError
from bmforge.prepare_settings import DuplicatesConfig

__all__ = [
    "REPEATED",
    "SPANS",
    "LeastRepeats",
    "Repeats",
    "check_spans",
    "choose_spans",
    "remove_spans",
]

REPEATED = "repeated_spans"  # rule name of documents whose text is all repeated
SPANS = "spans"  # file name
_SIZES = "sizes"  # file name
_LEAST = 50  # tokens; shorter sequences often repeat by chance
_ROW = np.dtype([("position", "<i8"), ("start", "<i8"), ("end", "<i8")])
_SIZE = np.dtype([("position", "<i8"), ("text_bytes", "<i8")])


class LeastRepeats(NamedTuple):
    """Minimum length of a repeat that is removed; None to keep repeats of this kind.

    Attributes:
        tokens: minimum length of a span.
        characters: minimum length of a paragraph.
    """

    tokens: int | None
    characters: int | None


def check_spans(config: DuplicatesConfig) -> None:
    """Raise `ConfigError` if the minimum length of spans or paragraphs is too small."""
    if config.repeated_paragraphs is not None and config.repeated_paragraphs < 1:
        raise ConfigError(
            f"repeated_paragraphs={config.repeated_paragraphs} must be at least 1 character."
        )
    if config.repeated_spans is not None and config.repeated_spans < _LEAST:
        raise ConfigError(
            f"repeated_spans={config.repeated_spans} must be at least {_LEAST} words or Chinese "
            "characters, because shorter spans are repeated in good texts too."
        )


@dataclass(frozen=True)
class Repeats:
    """File with the repeated spans and paragraphs to remove, written by `choose_spans`.

    Attributes:
        path: path of the file.
        least: minimum lengths of the repeats that are removed.
    """

    path: Path
    least: LeastRepeats

    def read(self, first: int, count: int) -> dict[int, Spans]:
        """Return a dict from position to the spans to cut, for the documents in a range.

        Args:
            first: first position of the range.
            count: number of documents in the range.
        """
        spans: dict[int, Spans] = {}
        for position, start, stop in read_rows(self.path, _ROW, first, count).tolist():
            spans.setdefault(position, []).append((start, stop))
        return spans

    def update_sizes(self, first: int, sizes_bytes: NDArray[np.int64]) -> None:
        """Replace the sizes of texts by their sizes without the repeated spans.

        Args:
            first: position of the first document.
            sizes_bytes: UTF-8 bytes per document; changed in place.
        """
        rows = read_rows(self.path.with_name(_SIZES), _SIZE, first, len(sizes_bytes))
        sizes_bytes[rows["position"] - first] = rows["text_bytes"]

    def describe(self, document: Document) -> Drop:
        """Return a `Drop` that reports a document that consists only of repeated text."""
        bound = self.least.tokens or self.least.characters
        return Drop(REPEATED, None, bound, cut_excerpt(document.text))


def remove_spans(document: Document, spans: Spans) -> Document:
    """Return the document with the given spans cut from its text."""
    return replace(document, text=normalize_text(cut_spans(document.text, spans)))


def choose_spans(
    documents: Path, counts: Sequence[int], before: Path, folder: Path, least: LeastRepeats
) -> dict[str, Any]:
    """Find repeated spans and paragraphs, and write three files to `folder`.

    ``spans`` lists the repeats, ``sizes`` has the documents' sizes without the repeats, and
    ``kept`` is a mask that is False for dropped documents, which consist only of repeats.

    Args:
        documents: folder of the first stage.
        counts: documents per shard.
        before: path of the mask of the documents kept so far.
        folder: output folder.
        least: minimum lengths of repeats.

    Returns:
        dict with ``files`` (file names and hashes), ``documents`` and ``read_bytes`` (number and
        raw bytes of the dropped documents), ``text_bytes`` (of the remaining documents), and
        ``changed`` (number of cut documents, and of characters removed).
    """
    mask, firsts = open_mask(before), list(accumulate(counts, initial=0))

    def kept() -> Iterator[tuple[int, Document]]:
        for number, first in enumerate(firsts[:-1]):
            for position, document in enumerate(read_shard(documents, number), first):
                if mask[position]:
                    yield position, document

    folder.mkdir(parents=True, exist_ok=True)
    changed, text_bytes = [0, 0], 0
    files: dict[str, str] = {}
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory(dir=folder)))
        find_spans = _find_repeats(lambda: (document for _, document in kept()), least, scratch)
        cuts = stack.enter_context(write_hashed(folder / SPANS, files))
        sizes = stack.enter_context(write_hashed(folder / _SIZES, files))
        after = stack.enter_context(new_mask(folder, "kept", len(mask), files))
        after[:] = mask
        for position, document in kept():
            spans = find_spans(document)
            left = remove_spans(document, spans) if spans else document
            size = len(left.text.encode())
            text_bytes += size
            if not spans:
                continue
            cuts.write(np.array([(position, *span) for span in spans], _ROW).tobytes())
            if size:
                sizes.write(np.array([(position, size)], _SIZE).tobytes())
                changed = [changed[0] + 1, changed[1] + len(document.text) - len(left.text)]
            else:
                after[position] = False
        gone, read_bytes = 0, 0
        for number, (first, end) in enumerate(pairwise(firsts)):
            dropped = mask[first:end] & ~after[first:end]
            gone += int(dropped.sum())
            read_bytes += int(read_digests(documents, number)["read_bytes"][dropped].sum())
    result = {"documents": gone, "read_bytes": read_bytes, "text_bytes": text_bytes}
    return {"files": files, "changed": changed, **result}


def _find_repeats(
    documents: Callable[[], Iterator[Document]], least: LeastRepeats, folder: Path
) -> Callable[[Document], Spans]:
    """Find the repeats in all documents.

    Return a function that returns the spans to cut from a document. It must be called once for each
    document, in order, while the temporary files in `folder` exist.
    """
    runs: Iterator[NDArray[np.int64]] = repeat(np.empty(0, np.int64))
    paragraphs = runs
    if least.tokens:
        runs = iter(find_repeated_runs(documents(), least.tokens, folder / "runs"))
    if least.characters:
        paragraphs = iter(
            find_repeated_numbers(documents(), least.characters, folder / "paragraphs")
        )

    def find(document: Document) -> Spans:
        spans = locate_runs(document.text, next(runs), least.tokens or 0)
        numbers = next(paragraphs).tolist()
        return _merge(spans + locate_paragraphs(document.text, numbers) if numbers else spans)

    return find


def _merge(spans: Spans) -> Spans:
    """Sort spans, and merge those that overlap."""
    merged: Spans = []
    for begin, end in sorted(spans):
        if merged and begin < merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged
