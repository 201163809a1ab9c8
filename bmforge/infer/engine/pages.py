"""Page allocator of the KV cache with reference counts and a prefix cache.

A page stores `PAGE_TOKENS` tokens of every layer. Sequences with equal beginnings share pages. A
full page may be registered under a hash of all tokens up to its end. The page can be found by this
hash until it is evicted, even after its last sequence ended.

Source: Kwon et al., "Efficient memory management for large language model serving with
PagedAttention" (2023).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

__all__ = ["PAGE_TOKENS", "Pages", "pages_of"]

PAGE_TOKENS = 16


def pages_of(tokens: int) -> int:
    """Return the number of pages needed for this many tokens."""
    return -(-tokens // PAGE_TOKENS)


class Pages:
    """Page allocator with reference counts.

    Args:
        count: number of pages.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        # Lowest indices first, because pages that were never written occupy no memory.
        self._free = list(range(count))
        self._references = [0] * count
        self._by_key: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached prefixes, oldest first

    @property
    def available(self) -> int:
        """Number of free and evictable pages."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Number of pages in use by sequences."""
        return self.count - self.available

    def take(self) -> int | None:
        """Allocate a page, evicting the oldest cached prefix if needed; None if all are used.

        The new page has one reference, and is not registered in the prefix cache.
        """
        if self._free:
            page = heapq.heappop(self._free)
        elif self._idle:
            # The page gets new content, so its key must not find it any longer.
            page, _ = self._idle.popitem(last=False)
            del self._by_key[self._keys.pop(page)]
        else:
            return None
        self._references[page] = 1
        return page

    def share(self, page: int) -> None:
        """Add a reference to a page."""
        self._idle.pop(page, None)
        self._references[page] += 1

    def give_back(self, page: int) -> None:
        """Drop a reference; an unused page stays cached if it is registered, else it is freed."""
        assert self._references[page] > 0, f"page {page} was freed, but no request uses it"
        self._references[page] -= 1
        if self._references[page]:
            return
        if page in self._keys:
            self._idle[page] = None
        else:
            heapq.heappush(self._free, page)

    def is_shared(self, page: int) -> bool:
        """Return True if several sequences use a page, so that writing requires a copy."""
        return self._references[page] > 1

    def register(self, page: int, key: bytes) -> None:
        """Register a full page in the prefix cache under the hash `key`, unless one of them is."""
        # Sequences that run at the same time may compute the same prefix; the first page is kept.
        if key not in self._by_key and page not in self._keys:
            self._by_key[key] = page
            self._keys[page] = key

    def find(self, key: bytes) -> int | None:
        """Return the page registered under `key`, which the caller must `share`, or None."""
        return self._by_key.get(key)

    def forget(self) -> None:
        """Drop all cached prefixes."""
        for page in self._idle:
            heapq.heappush(self._free, page)
        self._idle.clear()
        self._by_key.clear()
        self._keys.clear()
