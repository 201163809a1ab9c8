"""Tokens that deduplication and decontamination compare, and hashes of token n-grams.

A token is a word by Unicode's text segmentation (UAX 29), combining marks included. Scripts
without spaces between words (Han, kana, Thai, Lao, Burmese, Khmer) have one token per grapheme
cluster. Case, width, punctuation and invisible format characters are ignored. Hashes depend only on
the text, not on the process.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain

import numpy as np
import regex
from numpy.typing import NDArray

from bmforge.data.clean.string_cache import StringCache

__all__ = [
    "Hashes",
    "digest_string",
    "hash_runs",
    "hash_tokens",
    "locate_tokens",
    "splitmix64",
    "split_tokens",
]

Hashes = NDArray[np.uint64]

_EAST_ASIAN = r"[\p{Han}\p{Hiragana}\p{Katakana}\u30fc\uff70]"
# LineBreak=SA is Unicode's class of scripts that need a dictionary to find word boundaries.
_TOKEN = regex.compile(
    rf"(?V1)[[\p{{L}}\p{{N}}]--{_EAST_ASIAN}--\p{{LineBreak=SA}}]"
    rf"[[\p{{L}}\p{{N}}\p{{M}}]--{_EAST_ASIAN}--\p{{LineBreak=SA}}]*"
    rf"|[{_EAST_ASIAN}&&[\p{{L}}\p{{N}}]][\p{{M}}\uff9e\uff9f]*"
    r"|(?=[\p{LineBreak=SA}&&\p{L}])\X"
)
# Soft hyphens, zero-width spaces, direction marks, variation selectors: they are invisible, so a
# copy that has them is still a copy.
_INVISIBLE = regex.compile(r"[\p{Default_Ignorable_Code_Point}\p{Cf}]+")
# Everything but letters and digits becomes a space, in texts of ASCII characters alone.
_ASCII_SPACES = {code: " " for code in range(128) if not chr(code).isalnum()}
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def split_tokens(text: str) -> list[str]:
    """Split a text into normalized tokens."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", _INVISIBLE.sub("", text))
    text = text.lower()
    if text.isascii():
        return text.translate(_ASCII_SPACES).split()
    # No token contains a space, so the tokens of frequent strings are cached.
    return list(chain.from_iterable(map(_TOKENS_OF_RUN.__getitem__, text.split())))


def _tokens_of_run(run: str) -> list[str]:
    """Return the tokens of a normalized string without spaces."""
    return _TOKEN.findall(run)


_TOKENS_OF_RUN = StringCache(_tokens_of_run)


def locate_tokens(text: str) -> tuple[list[str], list[tuple[int, int]]]:
    """Return the tokens of a text, and the start and end offset of each in the original text.

    Each token is normalized separately, so that the offsets refer to `text`.
    """
    if text.isascii():
        spots = [match.span() for match in _TOKEN.finditer(text)]  # matches take more
        return [text[begin:end].lower() for begin, end in spots], spots
    visible, offsets = _strip_invisible(text)
    matches = list(_TOKEN.finditer(visible))
    tokens = [unicodedata.normalize("NFKC", match[0]).lower() for match in matches]
    return tokens, [(offsets[match.start()], offsets[match.end() - 1] + 1) for match in matches]


def _strip_invisible(text: str) -> tuple[str, Sequence[int]]:
    """Remove invisible characters; return the text and the original offset of each character."""
    gaps = [match.span() for match in _INVISIBLE.finditer(text)]
    if not gaps:
        return text, range(len(text))
    begins, ends = [0, *(end for _, end in gaps)], [*(begin for begin, _ in gaps), len(text)]
    spans = list(zip(begins, ends, strict=True))
    offsets = np.concatenate([np.arange(begin, end) for begin, end in spans]).tolist()
    return "".join(text[begin:end] for begin, end in spans), offsets


def digest_string(text: str) -> bytes:
    """Return the 128-bit digest of a string, which identifies a text or a document id."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _hash_token(token: str) -> int:
    data = token.encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


_HASH_OF_TOKEN = StringCache(_hash_token, 1 << 16)


def hash_tokens(tokens: list[str]) -> Hashes:
    """Return the 64-bit hash of each token."""
    return np.fromiter(map(_HASH_OF_TOKEN.__getitem__, tokens), np.uint64, len(tokens))


def splitmix64(values: Hashes) -> Hashes:
    """Apply a 64-bit mixing bijection: every output bit depends on every input bit.

    Source: the finalizer of SplitMix64 (Steele et al. 2014).
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def hash_runs(tokens: Hashes, length: int) -> Hashes:
    """Return the hash of every n-gram of `length` tokens; empty if there are fewer tokens.

    Shape: `tokens` (N,); returned (max(N - length + 1, 0),).
    """
    count = len(tokens) - length + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    runs = tokens[:count].copy()
    for shift in range(1, length):
        runs *= _FACTOR
        runs += tokens[shift : shift + count]
    return splitmix64(runs)
