"""Reads CPM-Pretrain's preprocessed T5 corpora, with span corruption already applied.

There are three token stores: ``PREFIX_context`` has the texts with a sentinel in place of every
span, ``PREFIX_target`` the spans, each after its sentinel, and ``PREFIX_target_offset`` the offsets
of the spans. Sentinel k of a text is stored as vocabulary size + k. A sequence is `seq_len`
consecutive tokens of the contexts, across texts; its sentinels are renumbered. Source:
``megatron/data/T5_dataset.py`` of TsinghuaAI/CPM-1-Pretrain, which shuffles texts in every epoch
before it cuts sequences; this module cuts sequences once and shuffles them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bmforge.batch import IGNORE_INDEX
from bmforge.data import TokenStore
from bmforge.data.load.example import Example, fingerprint_of
from bmforge.data.store.token_store import store_paths
from bmforge.errors import ConfigError, DataError
from bmforge.recipes.inputs.examples import digest_stores

__all__ = ["SpanCorpus", "is_span_corpus"]


def is_span_corpus(prefix: str) -> bool:
    """Return True if a path is the prefix of a preprocessed span corpus."""
    return store_paths(f"{prefix}_context")[1].is_file()


@dataclass(frozen=True)
class _CorpusRange:
    """Range of texts in a preprocessed corpus.

    Args:
        prefix: path of the corpus.
        contexts, targets, offsets: token stores of the corpus.
        starts: index of the first token of every text in `contexts`.
        first: index of the first token of this range.
        rows: number of sequences of this range.
    """

    prefix: str
    contexts: TokenStore
    targets: TokenStore
    offsets: TokenStore
    starts: NDArray[np.int64]
    first: int
    rows: int


class SpanCorpus:
    """Sequences of preprocessed corpora, as an `ExampleSource`.

    Args:
        prefixes: path prefixes, without suffixes such as ``_context.idx``.
        split: relative sizes of the splits of the texts, as in `data.split`; if empty, all texts
            are used.
        index: index of the split to read.
        config: run config with `data.seq_len`, `target_len` and `model`.
        sentinels: token ids of the sentinels.
        vocab_size: vocabulary size of the corpus; stored ids from here on are sentinels.

    Raises:
        ConfigError: `target_len` is not set.
        DataError: a store is missing or damaged, or the data do not fill a single sequence.
    """

    def __init__(
        self,
        prefixes: Sequence[str],
        split: Sequence[float],
        index: int,
        config: Any,
        sentinels: Sequence[int],
        vocab_size: int,
    ) -> None:
        if config.target_len is None:
            raise ConfigError(
                "target_len is not set, but preprocessed spans are packed into targets of this "
                "length. Set the maximum number of tokens of a target (CPM-Pretrain's "
                "--dec-seq-length), such as --target-len 384."
            )
        self._length, self._longest = config.data.seq_len, config.target_len
        self._sentinels, self._vocab_size = sentinels, vocab_size
        self._parts = [self._open(prefix, split, index) for prefix in prefixes]
        self._bounds = [0, *accumulate(part.rows for part in self._parts)]
        if self._bounds[-1] == 0:
            raise DataError(
                f"{list(prefixes)} do not fill one sequence of data.seq_len={self._length} tokens. "
                "Use more text, or reduce data.seq_len."
            )
        self.columns: Mapping[str, tuple[int, int]] = {
            "input_ids": (self._length, config.model.pad_token_id),
            "labels": (self._longest, IGNORE_INDEX),
        }
        sizes = [(part.contexts.num_tokens, part.first, part.rows) for part in self._parts]
        self.fingerprint = fingerprint_of(sizes, self._length, self._longest)
        stores = [(part.contexts, part.targets, part.offsets) for part in self._parts]
        self.content = digest_stores(list(chain.from_iterable(stores)))

    def _open(self, prefix: str, split: Sequence[float], index: int) -> _CorpusRange:
        contexts, targets, offsets = (
            TokenStore(f"{prefix}_{name}") for name in ("context", "target", "target_offset")
        )
        if not len(contexts) == len(targets) == len(offsets):
            raise DataError(
                f"{prefix!r} has stores of different lengths: {len(contexts)} contexts, "
                f"{len(targets)} targets and {len(offsets)} offsets. Copy all three again."
            )
        shares = split or (1,)
        bounds = [0, *accumulate(round(len(contexts) * s / sum(shares)) for s in shares)]
        first, last = (min(bound, len(contexts)) for bound in bounds[index : index + 2])
        starts = np.asarray(contexts.pointers) // contexts.dtype.itemsize
        ends = np.append(starts, contexts.num_tokens)
        rows = int(ends[last] - ends[first]) // self._length
        return _CorpusRange(prefix, contexts, targets, offsets, starts, int(ends[first]), rows)

    def __len__(self) -> int:
        return self._bounds[-1]

    def make(self, index: int, seed: tuple[int | str, ...]) -> Example:
        """Return the sequence at `index`; `seed` has no effect."""
        number = next(i for i, (a, b) in enumerate(pairwise(self._bounds)) if a <= index < b)
        part = self._parts[number]
        begin = part.first + (index - self._bounds[number]) * self._length
        source = part.contexts.tokens[begin : begin + self._length].tolist()
        target: list[int] = []
        count = 0
        for offset, token in enumerate(source):
            if token >= self._vocab_size:
                source[offset] = self._sentinel(count, part)
                target += [source[offset], *self._span(part, begin + offset, token)]
                count += 1
        target.append(self._sentinel(count, part))
        return {"input_ids": source, "labels": target[: self._longest]}

    def _sentinel(self, count: int, part: _CorpusRange) -> int:
        if count >= len(self._sentinels):
            raise DataError(
                f"a sequence of {part.prefix!r} has more spans than the tokenizer has sentinel "
                f"tokens ({len(self._sentinels)}). Reduce data.seq_len={self._length}."
            )
        return self._sentinels[count]

    def _span(self, part: _CorpusRange, position: int, token: int) -> list[int]:
        """Return the ids of the span that the sentinel at `position` of the contexts replaces."""
        text = int(np.searchsorted(part.starts, position, side="right")) - 1
        number = token - self._vocab_size
        span: list[int] = []
        if 2 * number + 2 <= int(part.offsets.sizes[text]):
            offset, length = part.offsets.get(text, 2 * number, 2).tolist()
            if length > 0 and offset + length <= int(part.targets.sizes[text]):
                span = part.targets.get(text, offset, length).tolist()
        if span[:1] != [token] or max(span[1:], default=0) >= self._vocab_size:
            raise DataError(
                f"{part.prefix!r}, text {text}: span {number} does not match its offset. Use the "
                "three token stores of one corpus, prepared with this tokenizer of "
                f"{self._vocab_size} tokens."
            )
        return span[1:]
