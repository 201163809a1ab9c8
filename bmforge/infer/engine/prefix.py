"""Prefixes that were computed before: found by a hash over all tokens up to a page's end.

The hash begins with the model and a salt, so that prompts of different salts never meet: who does
not know a salt learns nothing from how soon an answer begins.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from bmforge.infer.engine.pages import PAGE_TOKENS, Pages

__all__ = ["PrefixKeys", "find_prefix", "register_prefix"]


class PrefixKeys:
    """The keys of a sequence's pages, made as they are asked for.

    Args:
        model: what tells the model that computes.
        salt: as in `Request`.
    """

    def __init__(self, model: str, salt: str) -> None:
        begin = f"{len(model)}:{model}{salt}".encode("utf-8", "surrogatepass")
        self._keys = [hashlib.blake2b(begin, digest_size=24).digest()]

    def copy(self) -> PrefixKeys:
        """Return the same keys, for a sequence that goes on in another way."""
        twin = PrefixKeys("", "")
        twin._keys = list(self._keys)
        return twin

    def of(self, tokens: Sequence[int], page: int) -> bytes:
        """Return the key of a page of these tokens, which is full."""
        while len(self._keys) < page + 2:
            first = (len(self._keys) - 1) * PAGE_TOKENS
            numbers = array("q", tokens[first : first + PAGE_TOKENS])
            assert len(numbers) == PAGE_TOKENS, "only full pages have keys"
            made = hashlib.blake2b(self._keys[-1] + numbers.tobytes(), digest_size=24)
            self._keys.append(made.digest())
        return self._keys[page + 1]


def find_prefix(pages: Pages, keys: PrefixKeys, tokens: Sequence[int], unit: int) -> list[int]:
    """Return pages that hold the beginning of a sequence, each shared once more.

    At least the last token is left to be computed, as its scores are wanted.

    Args:
        pages: where they are looked for.
        keys: of the sequence.
        tokens: of the sequence.
        unit: only whole stretches of so many tokens count, a multiple of a page's.
    """
    found: list[int] = []
    for number in range((len(tokens) - 1) // PAGE_TOKENS):
        page = pages.find(keys.of(tokens, number))
        if page is None:
            break
        found.append(page)
    whole = len(found) * PAGE_TOKENS // unit * unit // PAGE_TOKENS
    for page in found[:whole]:
        pages.share(page)
    return found[:whole]


def register_prefix(
    pages: Pages, keys: PrefixKeys, tokens: Sequence[int], held: Sequence[int], known: range
) -> None:
    """Let pages of a sequence be found by others.

    Args:
        pages: all of them.
        keys: of the sequence.
        tokens: of the sequence.
        held: its pages.
        known: numbers of those of its pages that became full.
    """
    for number in known:
        pages.register(held[number], keys.of(tokens, number))
