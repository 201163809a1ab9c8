"""View of selected documents of a token store, without copying."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bmforge.data.store.lazy import GatheredArray
from bmforge.data.store.token_store import TokenStore

__all__ = ["SelectedStore"]


class SelectedStore(TokenStore):
    """View of the documents of a token store for which a mask is True.

    Args:
        store: single or sharded store.
        mask: True for the documents to include, shape (documents,).

    Memory: 16 bytes per included document, and 32 per run of adjacent documents.
    """

    def __init__(self, store: TokenStore, mask: NDArray[np.bool_]) -> None:
        self.prefix, self.dtype, self._store = store.prefix, store.dtype, store
        edges = (edge for span in store.documents() for edge in span)
        spans = np.fromiter(edges, dtype=np.int64).reshape(-1, 2)
        self._spans = spans[mask]
        sizes = self._spans[:, 1] - self._spans[:, 0]
        self.tokens: Any = GatheredArray(store.tokens, self._spans)
        self.sizes: Any = sizes
        self.pointers: Any = (np.cumsum(sizes) - sizes) * self.dtype.itemsize
        self.doc_idx: Any = np.arange(len(sizes) + 1, dtype=np.int64)

    def map_for_random_access(self) -> Any:
        """Return a second memory mapping of `tokens`, for reading short spans in random order."""
        return GatheredArray(self._store.map_for_random_access(), self._spans)

    def documents(self) -> Iterator[tuple[int, int]]:
        """Yield the token range of each document: first token, and one past its last."""
        start = 0
        for size in self.sizes.tolist():
            yield start, start + size
            start += size
