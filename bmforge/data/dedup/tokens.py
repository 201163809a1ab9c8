"""What texts are compared by: words, each Chinese character by itself, and hashes of their runs.

Case, width and punctuation do not count. Hashes depend on the text alone, not on the process.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from bmforge.data.clean.characters import HAN

__all__ = [
    "Hashes",
    "digest_string",
    "hash_runs",
    "hash_tokens",
    "locate_tokens",
    "mix",
    "split_tokens",
]

Hashes = NDArray[np.uint64]

# Kana are divided as Chinese characters are: neither has spaces between words.
_TOKEN = re.compile(rf"[{HAN}\u3040-\u30ff]|[^\W_{HAN}\u3040-\u30ff]+")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def split_tokens(text: str) -> list[str]:
    """Return what a text is compared by."""
    return _TOKEN.findall(unicodedata.normalize("NFKC", text).lower())


def locate_tokens(text: str) -> tuple[list[str], list[tuple[int, int]]]:
    """Return the same tokens one by one as they stand in `text`, and where each begins and ends.

    A token is folded by itself here, so that places stay those of `text`.
    """
    found = list(_TOKEN.finditer(text))
    tokens = [unicodedata.normalize("NFKC", one[0]).lower() for one in found]
    return tokens, [one.span() for one in found]


def digest_string(text: str) -> bytes:
    """Return 128 bits by which a text or an id is known."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


@lru_cache(maxsize=1 << 17)
def _hash_token(token: str) -> int:
    data = token.encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def hash_tokens(tokens: list[str]) -> Hashes:
    """Return a 64-bit hash per token."""
    return np.fromiter(map(_hash_token, tokens), np.uint64, len(tokens))


def mix(values: Hashes) -> Hashes:
    """Return other 64-bit numbers, one for each, in which every bit depends on every bit.

    Source: the finisher of SplitMix64 (Steele et al. 2014).
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def hash_runs(tokens: Hashes, length: int) -> Hashes:
    """Return a hash of every run of `length` neighbours; none where there are fewer.

    Shape: `tokens` (N,); returned (max(N - length + 1, 0),).
    """
    count = len(tokens) - length + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    runs = tokens[:count].copy()
    for shift in range(1, length):
        runs *= _FACTOR
        runs += tokens[shift : shift + count]
    return mix(runs)
