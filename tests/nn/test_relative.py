"""T5's buckets and bias against transformers' attention, and against themselves in pieces."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.models.t5.modeling_t5 import T5Attention

from bmforge.nn.relative import RelativeBias, find_buckets
from bmforge.testing.tolerance import assert_close

SIZES = [(32, 128), (8, 20), (16, 32), (512, 2048), (256, 2048)]


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), SIZES)
def test_buckets(num_buckets: int, max_distance: int, bidirectional: bool) -> None:
    """Every distance has transformers' bucket."""
    distance = torch.arange(-3000, 3001)
    want = T5Attention._relative_position_bucket(distance, bidirectional, num_buckets, max_distance)
    got = find_buckets(distance, bidirectional, num_buckets, max_distance)
    assert torch.equal(got, want)
    assert got.min() == 0
    assert got.max() == num_buckets - 1


def test_known_buckets() -> None:
    """Numbers that OpenBMB's original code gives for 512 buckets and 2048 positions."""
    distance = torch.tensor([1, -1, 127, 128, -200, 2047])
    want = [257, 1, 383, 384, 148, 511]
    assert find_buckets(distance, True, 512, 2048).tolist() == want


def make_pair(causal: bool) -> tuple[RelativeBias, T5Attention]:
    """Return our bias and transformers' attention with the same table."""
    config = transformers.T5Config(
        num_heads=3,
        d_model=12,
        d_kv=4,
        is_decoder=causal,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
    )
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    ours = RelativeBias(3, 8, 20, causal)
    with torch.no_grad():
        ours.weight.copy_(torch.randn(8, 3))
        theirs.relative_attention_bias.weight.copy_(ours.weight)
    return ours, theirs


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "offset"), [(7, 7, 0), (1, 1, 0), (1, 9, 8), (4, 30, 26), (30, 11, 0)]
)
def test_bias_and_gradient(causal: bool, queries: int, keys: int, offset: int) -> None:
    """The bias is transformers', and -inf where a decoder may not look; so is its gradient."""
    ours, theirs = make_pair(causal)
    want = theirs.compute_bias(queries, keys, past_seen_tokens=offset)
    got = ours(queries, keys, offset)
    assert got.shape == want.shape == (1, 3, queries, keys)
    later = torch.arange(keys)[None] > torch.arange(offset, offset + queries)[:, None]
    seen = ~later if causal else torch.ones_like(later)
    assert torch.equal(got[:, :, seen], want[:, :, seen])
    assert (got[:, :, ~seen] == -torch.inf).all()
    grad = torch.randn_like(want) * seen
    got.backward(grad)
    want.backward(grad)
    assert_close(ours.weight.grad, theirs.relative_attention_bias.weight.grad)


def test_rows_of_a_cached_step() -> None:
    """The rows of later tokens are those of the whole."""
    bias, _ = make_pair(causal=True)
    whole = bias(12, 12)
    for start, end in ((0, 5), (5, 6), (6, 12)):
        assert torch.equal(bias(end - start, end, start), whole[:, :, start:end, :end])


def test_layout_and_repr() -> None:
    """The bias is contiguous, as the attention reads it often; the sizes are shown."""
    bias = RelativeBias(3)
    assert bias(6, 9).is_contiguous()
    assert repr(bias) == "RelativeBias(heads=3, buckets=32, max_distance=128)"
