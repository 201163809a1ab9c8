"""Segments of prepared documents, for recipes in which every example is one text.

A segment is a whole document if `seq_len` allows, else a part of the document.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bmforge.data import TokenStore, check_vocabulary, open_store
from bmforge.data.load.example import fingerprint_of
from bmforge.errors import ConfigError
from bmforge.models.hub import find_model
from bmforge.parallel import run_on_first
from bmforge.recipes.inputs.examples import ExampleConfig, digest_stores
from bmforge.recipes.inputs.selection import (
    check_where,
    open_text,
    place_of,
    read_report,
    train_prefix,
)
from bmforge.recipes.inputs.splitting import StorePart, check_split
from bmforge.recipes.inputs.vocabulary import check_tokenizers, find_own_tokenizer
from bmforge.tokenizers import AutoTokenizer

__all__ = ["DocumentSegments", "find_tokenizer", "open_segments", "open_tokenizer"]


class DocumentSegments(Sequence[NDArray[np.int64]]):
    """Documents of token stores as a sequence; long documents are split, short ones skipped.

    Args:
        stores: opened stores, or their paths without ``.bin`` or ``.idx``.
        shortest: minimum length of a segment in tokens.
        longest: maximum length of a segment in tokens.
        end_id: end-of-document token of the store, which segments do not include.

    Memory: 16 bytes per segment.
    """

    def __init__(
        self,
        stores: Sequence[TokenStore | Path],
        shortest: int,
        longest: int,
        end_id: int | None = None,
    ) -> None:
        self._stores = [s if isinstance(s, TokenStore) else open_store(s) for s in stores]
        spans = [list(_cut(store, shortest, longest, end_id)) for store in self._stores]
        self._bounds = [0, *accumulate(map(len, spans))]
        self._spans = np.array([span for part in spans for span in part]).reshape(-1, 2)
        sizes = [store.num_tokens for store in self._stores]
        self.fingerprint = fingerprint_of(sizes, shortest, longest, end_id)
        self.content = digest_stores(self._stores)

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: Any) -> Any:
        """Return the token ids of the segment at `index`, from 0."""
        number = next(i for i, (a, b) in enumerate(pairwise(self._bounds)) if a <= index < b)
        start, stop = self._spans[index].tolist()
        return self._stores[number].tokens[start:stop].astype(np.int64)


def _cut(store: TokenStore, shortest: int, longest: int, end_id: int | None) -> Any:
    """Yield the token range of every segment: first token, and one past its last."""
    for first, end in store.documents():
        if end > first and store.tokens[end - 1] == end_id:
            end -= 1
        for start in range(first, end, longest):
            if min(start + longest, end) - start >= shortest:
                yield start, min(start + longest, end)


def open_segments(
    config: ExampleConfig, vocab_size: int, shortest: int, longest: int, end_id: int | None
) -> tuple[DocumentSegments, DocumentSegments | None]:
    """Open and check the token stores of a run's training and held-out splits.

    The held-out split of a prepared directory is used if `config.validation` is empty.

    Raises:
        ConfigError: data.seq_len leaves fewer than `shortest` tokens of text, or there are no
            paths.
        DataError: a store is missing or damaged, or has ids beyond `vocab_size`.
    """
    config.check()
    if longest < shortest:
        raise ConfigError(
            f"data.seq_len={config.seq_len} leaves {longest} tokens of text per sequence (needed: "
            f"at least {shortest}). Raise data.seq_len."
        )
    check_where((), config.paths, config.split)
    check_split(config.split, config.validation, config.paths)
    train = [train_prefix(path) for path in config.paths]
    held_out = [train_prefix(path) for path in config.validation]
    places = dict.fromkeys(map(place_of, config.paths))
    reports = [] if held_out else [read_report(directory) for directory in places]
    for report in reports:
        if report is not None and report.validation_prefix is not None:
            held_out.append(report.validation_prefix)

    def check() -> None:
        for prefix in (*train, *held_out):
            check_vocabulary(open_store(prefix), vocab_size)

    run_on_first(check)
    learned = [open_text(path, split=config.split) for path in config.paths]
    held_out_parts: list[TokenStore | Path] = [*held_out]
    if any(config.split[1:2]):
        held_out_parts = [StorePart(prefix, config.split, 1) for prefix in train]
    held_out_segments = (
        DocumentSegments(held_out_parts, shortest, longest, end_id) if held_out_parts else None
    )
    return DocumentSegments(learned, shortest, longest, end_id), held_out_segments


def open_tokenizer(config: Any, kind: type[Any] | None = None) -> Any:
    """Load the tokenizer of a run: that of ``data.tokenizer``, `init_from`, or the prepared text.

    Args:
        config: a `RunConfig` with `data` and `model`.
        kind: required class of the tokenizer (default: any class).

    Raises:
        ConfigError: the run has no tokenizer, the tokenizer has a different class or more tokens
            than the model, or the text was prepared with a different tokenizer.
    """
    folder = find_tokenizer(config)
    data = config.data
    places = [*dict.fromkeys(map(place_of, (*data.paths, *data.validation)))]
    run_on_first(lambda: check_tokenizers(places, config.init_from, data.tokenizer))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if kind is not None and not isinstance(tokenizer, kind):
        raise ConfigError(
            f"the tokenizer in {str(folder)!r} is a {type(tokenizer).__name__} (needed: "
            f"{kind.__name__}). Pass the directory of another tokenizer with --data.tokenizer."
        )
    if len(tokenizer) > config.model.vocab_size:
        raise ConfigError(
            f"the tokenizer in {str(folder)!r} has {len(tokenizer)} tokens, but the model has "
            f"vocab_size={config.model.vocab_size}. Use the tokenizer of the model, or a larger "
            "vocab_size."
        )
    return tokenizer


def find_tokenizer(config: Any) -> Path:
    """Return the tokenizer directory of a run; see `open_tokenizer`.

    Raises:
        ConfigError: the run has no tokenizer.
    """
    report = read_report(config.data.paths[0]) if config.data.paths else None
    folder: Path | None = None
    if config.data.tokenizer is not None:
        folder = Path(config.data.tokenizer)
    elif own := find_own_tokenizer(config.init_from):
        folder = own
    elif report is not None:
        folder = report.tokenizer_dir
    elif config.init_from is not None:
        folder = find_model(config.init_from)
    if folder is None:
        raise ConfigError(
            "data.tokenizer is not set. Pass the directory of the model's tokenizer "
            "(--data.tokenizer DIR), or start from a model that has one (--model DIR)."
        )
    return folder
