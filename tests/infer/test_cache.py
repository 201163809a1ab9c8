"""The key-value cache against concatenating by hand."""

from __future__ import annotations

import pytest
import torch

from bmforge.errors import ShapeError
from bmforge.infer import KVCache


def draw(rows: int, length: int) -> torch.Tensor:
    """Random keys (rows, 3, length, 4)."""
    return torch.randn(rows, 3, length, 4, dtype=torch.float64)


def test_append_equals_concatenation() -> None:
    """Every layer gets back all it stored; the length moves once per call."""
    cache = KVCache(num_layers=2, max_length=9)
    past: list[list[torch.Tensor]] = [[], []]
    total = 0
    for length in (4, 1, 3, 1):
        for layer in range(2):
            assert cache.length == total
            key, value = draw(2, length), draw(2, length)
            past[layer].append(torch.stack((key, value)))
            keys, values = cache.append(layer, key, value)
            expected = torch.cat(past[layer], 3)
            assert torch.equal(keys, expected[0])
            assert torch.equal(values, expected[1])
            assert keys.dtype == torch.float64
        total += length
    assert cache.length == 9


def test_views_share_one_buffer() -> None:
    """Appending copies nothing but the new tokens."""
    cache = KVCache(num_layers=1, max_length=8)
    first, _ = cache.append(0, draw(1, 2), draw(1, 2))
    second, _ = cache.append(0, draw(1, 1), draw(1, 1))
    assert first.data_ptr() == second.data_ptr()


def test_a_call_that_fails_half_way_can_be_repeated() -> None:
    """Only the last layer moves the length."""
    cache = KVCache(num_layers=2, max_length=8)
    cache.append(0, draw(1, 2), draw(1, 2))
    assert cache.length == 0
    key, value = draw(1, 2), draw(1, 2)
    for layer in range(2):
        keys, _ = cache.append(layer, key, value)
        assert torch.equal(keys, key)
    assert cache.length == 2


@pytest.mark.parametrize("rows", [[2, 0, 1], [1, 1, 1], [0, 0, 1, 1, 2, 2], [2]])
def test_reorder(rows: list[int]) -> None:
    """Rows are permuted, repeated or dropped, and appending goes on."""
    cache = KVCache(num_layers=2, max_length=6)
    stored = [draw(3, 4) for _ in range(2)]
    for layer in range(2):
        cache.append(layer, stored[layer], stored[layer] * 2)
    cache.reorder(torch.tensor(rows))
    for layer in range(2):
        new = draw(len(rows), 1)
        keys, values = cache.append(layer, new, new)
        assert torch.equal(keys, torch.cat((stored[layer][rows], new), 2))
        assert torch.equal(values, torch.cat((stored[layer][rows] * 2, new), 2))


def test_full_and_mismatched_caches_say_so() -> None:
    """No room and another batch size are errors with the numbers."""
    cache = KVCache(num_layers=1, max_length=4)
    cache.append(0, draw(2, 3), draw(2, 3))
    with pytest.raises(ShapeError, match=r"3 of max_length=4 tokens are used, and 2 more"):
        cache.append(0, draw(2, 2), draw(2, 2))
    with pytest.raises(ShapeError, match="has 2 sequences, but the batch has 3"):
        cache.append(0, draw(3, 1), draw(3, 1))


def test_tokens_of_the_models_own() -> None:
    """What a model puts in front is kept, returned and reordered, and counted nowhere."""
    cache = KVCache(num_layers=2, max_length=4)
    cache.extra_length = 3
    stored = draw(2, 3 + 2)
    for layer in range(2):
        assert cache.length == 0
        cache.append(layer, stored, stored)
    assert cache.length == 2
    cache.reorder(torch.tensor([1, 1, 0]))
    new = draw(3, 2)
    for layer in range(2):
        keys, _ = cache.append(layer, new, new)
        assert torch.equal(keys, torch.cat((stored[[1, 1, 0]], new), 2))
    assert cache.length == 4
    with pytest.raises(ShapeError, match="max_length=4"):
        cache.append(0, draw(3, 1), draw(3, 1))
