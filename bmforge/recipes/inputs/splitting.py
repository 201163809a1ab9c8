"""Splits the documents of a token store into training and validation sets."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from bmforge.data import TokenStore
from bmforge.errors import ConfigError, DataError

__all__ = ["StorePart", "check_split", "refuse_split"]


class StorePart(TokenStore):
    """One split of a token store's documents, which can be read like a token store.

    As in Megatron-LM, each split consists of whole documents in their original order.

    Args:
        prefix: path of the store without ``.bin`` or ``.idx``.
        split: relative sizes of the splits.
        index: index of this split.

    Raises:
        DataError: the split has no document, or the store is damaged.

    Memory: 16 bytes per document.
    """

    def __init__(self, prefix: str | os.PathLike[str], split: Sequence[float], index: int) -> None:
        super().__init__(prefix)
        edges = (edge for span in super().documents() for edge in span)
        spans = np.fromiter(edges, dtype=np.int64).reshape(-1, 2)
        bounds = [0, *accumulate(round(len(spans) * share / sum(split)) for share in split)]
        first, last = (min(bound, len(spans)) for bound in bounds[index : index + 2])
        if first == last:
            raise DataError(
                f"token store {str(prefix)!r} has {len(spans)} documents, too few for "
                f"data.split={tuple(split)}: entry {index} selects none. Raise this entry."
            )
        self._spans = spans[first:last].copy()
        self._begin, self._end = int(spans[first, 0]), int(spans[last - 1, 1])
        self.tokens = self.tokens[self._begin : self._end]

    def map_for_random_access(self) -> NDArray[np.integer]:
        """Return a second memory map of `tokens`, for reading short ranges in random order."""
        return TokenStore(self.prefix).map_for_random_access()[self._begin : self._end]

    @property
    def num_documents(self) -> int:
        """Number of documents in this split."""
        return len(self._spans)

    def documents(self) -> Iterator[tuple[int, int]]:
        """Yield the token range of each document: first token, and one past its last."""
        for start, end in self._spans:
            yield int(start) - self._begin, int(end) - self._begin


def check_split(split: Sequence[float], validation: object, paths: Sequence[str]) -> None:
    """Raise `ConfigError` for invalid split sizes, or if the data has its own validation set."""
    if not split:
        return
    if len(split) > 3 or min(split) < 0 or split[0] <= 0:
        raise ConfigError(
            f"data.split={tuple(split)} must be at most three weights (training, validation, "
            "unused), none below 0 and the first above 0, such as 949 50 1."
        )
    if validation:
        raise ConfigError(
            f"data.split={tuple(split)} and data.validation={validation!r} cannot be used "
            "together. Leave one of them out."
        )
    if any(os.path.isdir(path) for path in paths):
        raise ConfigError(
            "data.split is only supported for token stores; a directory of `bmforge "
            "prepare` has its own validation data (prepare's --validation-fraction)."
        )


def refuse_split(split: Sequence[float]) -> None:
    """Raise `ConfigError` if `split` is set for a recipe that reads no token stores."""
    if split:
        raise ConfigError(
            f"data.split={tuple(split)} has no effect, because it divides token stores and this "
            "recipe reads files. Pass validation files with data.validation."
        )
