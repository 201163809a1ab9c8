"""Prefix caching: pages are found by a hash over all tokens up to their end.

The hash starts with the model and a salt, so that prompts with different salts never share pages,
and response times reveal nothing about the prompts of users with other salts.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from bmforge.infer.engine.pages import PAGE_TOKENS, Pages

__all__ = ["PrefixKeys", "find_prefix", "register_prefix"]


class PrefixKeys:
    """Hashes of a sequence's full pages, computed on demand.

    Args:
        model: text that identifies the model and its adapters.
        salt: salt of the prefix cache, as in `Request`.
    """

    def __init__(self, model: str, salt: str) -> None:
        # The length separates model and salt, so that no two pairs give the same text.
        begin = f"{len(model)}:{model}{salt}".encode("utf-8", "surrogatepass")
        self._keys = [hashlib.blake2b(begin, digest_size=24).digest()]

    def copy(self) -> PrefixKeys:
        """Return a copy for a forked sequence."""
        twin = PrefixKeys("", "")
        twin._keys = list(self._keys)
        return twin

    def of(self, tokens: Sequence[int], page: int) -> bytes:
        """Return the key of the full page with this index in a sequence."""
        while len(self._keys) < page + 2:
            first = (len(self._keys) - 1) * PAGE_TOKENS
            numbers = array("q", tokens[first : first + PAGE_TOKENS])
            assert len(numbers) == PAGE_TOKENS, "only full pages have keys"
            # A key includes the key before it, so equal keys mean equal tokens from the start.
            digest = hashlib.blake2b(self._keys[-1] + numbers.tobytes(), digest_size=24)
            self._keys.append(digest.digest())
        return self._keys[page + 1]


def find_prefix(pages: Pages, keys: PrefixKeys, tokens: Sequence[int], unit: int) -> list[int]:
    """Return the cached pages of a sequence's first tokens, and add a reference to each page.

    The last token is never taken from the cache, because its logits are needed.

    Args:
        pages: page allocator.
        keys: page keys of the sequence.
        tokens: token ids of the sequence.
        unit: granularity in tokens, a multiple of the page size.
    """
    cached: list[int] = []
    for number in range((len(tokens) - 1) // PAGE_TOKENS):
        page = pages.find(keys.of(tokens, number))
        if page is None:
            break
        cached.append(page)
    num_pages = len(cached) * PAGE_TOKENS // unit * unit // PAGE_TOKENS
    for page in cached[:num_pages]:
        pages.share(page)
    return cached[:num_pages]


def register_prefix(
    pages: Pages, keys: PrefixKeys, tokens: Sequence[int], own_pages: Sequence[int], numbers: range
) -> None:
    """Register pages of a sequence in the prefix cache.

    Args:
        pages: page allocator.
        keys: page keys of the sequence.
        tokens: token ids of the sequence.
        own_pages: page table of the sequence.
        numbers: indices of the pages that became full.
    """
    for number in numbers:
        pages.register(own_pages[number], keys.of(tokens, number))
