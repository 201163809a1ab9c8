from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from bmforge.data.load.order import derive_key, draw_below, permute

PLAIN_MASK = (1 << 64) - 1


def plain_mix(x: int) -> int:
    """splitmix64's finaliser on Python's integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & PLAIN_MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & PLAIN_MASK
    return x ^ (x >> 31)


def plain_permute(index: int, n: int, key: bytes) -> int:
    """The network of the docstring, one number at a time."""
    a = 1
    while a * a < n:
        a += 1
    b = (n + a - 1) // a
    keys = [int.from_bytes(key[8 * i : 8 * i + 8], "little") for i in range(8)]
    while True:
        left, right = divmod(index, b)
        for i in range(0, 8, 2):
            left = (left + plain_mix((right + keys[i]) & PLAIN_MASK)) % a
            right = (right + plain_mix((left + keys[i + 1]) & PLAIN_MASK)) % b
        index = left * b + right
        if index < n:
            return index


@pytest.mark.parametrize("sizes", [range(1, 200), [1000, 4095, 4096, 4097, 65537, 99991]])
def test_bijection(sizes: range | list[int]) -> None:
    for n in sizes:
        out = permute(np.arange(n), n, derive_key("corpus", n, 7))
        assert (np.sort(out) == np.arange(n)).all()


@pytest.mark.parametrize("n", [1, 2, 3, 17, 1000, 12345])
def test_against_plain_integers(n: int) -> None:
    key = derive_key("x", 1, 2)
    indices = np.arange(0, n, max(1, n // 50))
    expected = [plain_permute(i, n, key) for i in indices.tolist()]
    assert permute(indices, n, key).tolist() == expected


def test_large_range_stays_inside_and_distinct() -> None:
    n = 2**61 - 1
    indices = np.concatenate([np.arange(1000), n - 1 - np.arange(1000)])
    out = permute(indices, n, derive_key(0))
    assert len(set(out.tolist())) == 2000
    assert out.min() >= 0
    assert out.max() < n


def test_every_order_of_four_is_equally_likely() -> None:
    counts = Counter(tuple(permute(np.arange(4), 4, derive_key(i)).tolist()) for i in range(4800))
    assert len(counts) == 24
    chi_square = sum((c - 200) ** 2 / 200 for c in counts.values())
    assert chi_square < 49.7  # 99.9 % point for 23 degrees of freedom


def test_keys_and_draws() -> None:
    assert derive_key("a", 1) != derive_key("a", 2) != derive_key("a", "2")
    draws = Counter(draw_below(7, derive_key(i)) for i in range(7000))
    assert sorted(draws) == list(range(7))
    assert sum((c - 1000) ** 2 / 1000 for c in draws.values()) < 22.5  # 99.9 %, 6 degrees
