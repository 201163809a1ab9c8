"""Stateless sample order: a keyed permutation of [0, n), computed element by element.

Source: the generalized Feistel network with cycle walking of Black and Rogaway, "Ciphers with
arbitrary finite domains" (2002). A number below n is written as (left, right) with left < a and
right < b, a and b near sqrt(n); each round adds a function of one half to the other, which is a
permutation for any function (Luby and Rackoff, 1988). A result >= n is permuted again until
it is below n; this is rare, as a b - n < a. The round function is the finalizer of splitmix64
(Steele, Lea and Flood, 2014). The permutation is for shuffling, not for secrecy.
"""

from __future__ import annotations

import math
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

__all__ = ["derive_key", "draw_below", "permute"]

_ROUNDS = 8
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def derive_key(*parts: int | str) -> bytes:
    """Return a 64-byte key derived from `parts`, including their order and types."""
    return blake2b(repr(parts).encode(), digest_size=8 * _ROUNDS).digest()


def draw_below(n: int, key: bytes) -> int:
    """Return a pseudorandom number in [0, n) that depends only on `key`."""
    return int.from_bytes(blake2b(key, digest_size=16, person=b"draw").digest(), "little") % n


def permute(indices: NDArray[np.int64], n: int, key: bytes) -> NDArray[np.int64]:
    """Apply a pseudorandom permutation of [0, n), selected by `key`, to `indices`.

    Args:
        indices: numbers in [0, n), any shape.
        n: size of the permuted range, 1 <= n < 2**62.
        key: 64-byte key from `derive_key`.

    Memory: O(len(indices)), independent of n.
    """
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    keys = np.frombuffer(key, dtype="<u8").astype(np.uint64)
    values = _feistel(np.asarray(indices).astype(np.uint64).ravel(), a, b, keys)
    limit = np.uint64(n)
    outside = np.flatnonzero(values >= limit)
    while len(outside):
        values[outside] = _feistel(values[outside], a, b, keys)
        outside = outside[values[outside] >= limit]
    return values.astype(np.int64).reshape(np.shape(indices))


def _feistel(
    values: NDArray[np.uint64], a: int, b: int, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Permute numbers in [0, a b) by applying the Feistel network once."""
    size_left, size_right = np.uint64(a), np.uint64(b)
    left, right = np.divmod(values, size_right)
    for key_left, key_right in keys.reshape(-1, 2):
        left = (left + _mix(right + key_left) % size_left) % size_left
        right = (right + _mix(left + key_right) % size_right) % size_right
    return left * size_right + right


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash 64-bit numbers; the multiplications overflow intentionally."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
