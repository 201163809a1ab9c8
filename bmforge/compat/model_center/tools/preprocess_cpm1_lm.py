"""Converts a text file with one document per line to the pretraining corpus of CPM-1.

    python -m bmforge.compat.model_center.tools.preprocess_cpm1_lm --input data/cpm1_ --uid 0 \
        --tokenizer_path vocab --output_path corpus --output_prefix cpm1_lm

The text file is `INPUT` + `UID` + ".txt"; the token store is `PREFIX_document_context_UID`. Each
document is encoded as `<s>`, its token ids without unknown tokens, and `<eod>`, and split into
segments of 512 tokens; segments shorter than 32 are dropped.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bmforge.compat.model_center.dataset.indexed import get_available_dataset_impl, make_builder
from bmforge.errors import DataError
from bmforge.logging import get_logger, track
from bmforge.tokenizers import CPM1Tokenizer

__all__ = ["cut_document", "get_args", "main"]

_START, _LONGEST, _SHORTEST, _LONGEST_LINE = 1, 512, 32, 5_000_000
_tokenizers: dict[str, Any] = {}  # directory -> tokenizer, loaded once per worker process


def get_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments; if None, those of the process's command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--input", required=True, help="text file, without uid and .txt")
    parser.add_argument("--tokenizer_path", required=True, help="directory of CPM-1's tokenizer")
    parser.add_argument("--output_path", default=".", help="directory of the token store")
    parser.add_argument("--output_prefix", default="cpm1_lm", help="prefix of the store's name")
    parser.add_argument("--dataset_impl", default="mmap", choices=get_available_dataset_impl())
    parser.add_argument("--uid", type=int, default=0, help="number of the text file")
    parser.add_argument("--workers", type=int, default=1, help="number of tokenizing processes")
    parser.add_argument("--log_interval", type=int, default=10000, help="not used")
    return parser.parse_args(arguments)


def cut_document(line: str, tokenizer: Any) -> list[list[int]]:
    """Encode one document and split it into token sequences of limited length.

    Args:
        line: text of the document; "<n>" marks a line break.
        tokenizer: tokenizer with `encode` and `token_to_id`.
    """
    if len(line) > _LONGEST_LINE:
        return []
    ids = tokenizer.encode(line.strip().replace("<n>", "\n"))
    if len(ids) < _SHORTEST:
        return []
    unknown, end = tokenizer.token_to_id("<unk>"), tokenizer.token_to_id("<eod>")
    ids = [_START, *(i for i in ids if i != unknown), end]
    segments = (ids[at : at + _LONGEST] for at in range(0, len(ids), _LONGEST))
    return [segment for segment in segments if len(segment) >= _SHORTEST]


def _cut(directory: str, line: str) -> list[list[int]]:
    if directory not in _tokenizers:
        _tokenizers[directory] = CPM1Tokenizer.from_pretrained(directory)
    return cut_document(line, _tokenizers[directory])


def _cut_all(lines: Iterable[str], directory: str, workers: int) -> Iterator[list[list[int]]]:
    """Yield the token sequences of every line, in order, tokenized in worker processes."""
    work = partial(_cut, directory)
    if workers <= 1:
        yield from map(work, lines)
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap(work, lines, 32)


def main(arguments: Sequence[str] | None = None) -> Path:
    """Write the store and return its path without `.bin`.

    Raises:
        DataError: the text file does not exist.
        ConfigError: the store exists already.
    """
    args = get_args(arguments)
    source = Path(f"{args.input}{args.uid}.txt")
    if not source.is_file():
        raise DataError(
            f"the text {str(source)!r} does not exist. Pass --input without --uid and .txt."
        )
    prefix = Path(args.output_path) / f"{args.output_prefix}_document_context_{args.uid}"
    builder = make_builder(f"{prefix}.bin", args.dataset_impl)
    count = 0
    with source.open(encoding="utf-8") as lines:
        documents = _cut_all(lines, str(args.tokenizer_path), args.workers)
        for segments in track(documents, "cut documents"):
            for segment in segments:
                builder.add_item(segment)
                count += 1
    builder.finalize(f"{prefix}.idx")
    get_logger().info("%s: %d segments", prefix, count)
    return prefix


if __name__ == "__main__":
    main()
