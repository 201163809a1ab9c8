"""Which pages of keys and values are taken, by how many sequences, and which keep a prefix.

A page has room for `PAGE_TOKENS` tokens of every layer. Sequences that begin alike share pages; one
that is full may be registered under a key that tells all tokens up to its end, and is found again
by it after nobody needs it, until its room is wanted.

Source: Kwon et al., "Efficient memory management for large language model serving with
PagedAttention" (2023).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

__all__ = ["PAGE_TOKENS", "Pages", "pages_of"]

PAGE_TOKENS = 16


def pages_of(tokens: int) -> int:
    """Return how many pages hold so many tokens."""
    return -(-tokens // PAGE_TOKENS)


class Pages:
    """The pages of a pool, by number.

    Args:
        count: how many there are.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        # The lowest numbers first: memory that was never written is not there yet.
        self._free = list(range(count))
        self._references = [0] * count
        self._by_key: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # registered, the oldest first

    @property
    def available(self) -> int:
        """Pages that can be taken."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Pages that some sequence needs."""
        return self.count - self.available

    def take(self) -> int | None:
        """Return a page for new tokens, if need be one that keeps a prefix; None when all are used.

        It has one reference and no key.
        """
        if self._free:
            page = heapq.heappop(self._free)
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            del self._by_key[self._keys.pop(page)]
        else:
            return None
        self._references[page] = 1
        return page

    def share(self, page: int) -> None:
        """Count one more sequence that needs a page."""
        self._idle.pop(page, None)
        self._references[page] += 1

    def give_back(self, page: int) -> None:
        """Count one less; a page that nobody needs stays for its prefix, or is free."""
        assert self._references[page] > 0, f"page {page} is given back and nobody has it"
        self._references[page] -= 1
        if self._references[page]:
            return
        if page in self._keys:
            self._idle[page] = None
        else:
            heapq.heappush(self._free, page)

    def is_shared(self, page: int) -> bool:
        """Tell whether writing into a page would change what another sequence reads."""
        return self._references[page] > 1

    def register(self, page: int, key: bytes) -> None:
        """Let a full page be found by its key, unless another one is found by it already."""
        if key not in self._by_key and page not in self._keys:
            self._by_key[key] = page
            self._keys[page] = key

    def find(self, key: bytes) -> int | None:
        """Return the page of a key; who uses it must `share` it."""
        return self._by_key.get(key)

    def forget(self) -> None:
        """Drop every prefix."""
        for page in self._idle:
            heapq.heappush(self._free, page)
        self._idle.clear()
        self._by_key.clear()
        self._keys.clear()
