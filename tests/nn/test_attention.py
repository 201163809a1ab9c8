"""Attention, masks and the small blocks against plain implementations."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.errors import ConfigError, ShapeError
from bmforge.nn import (
    MLP,
    Attention,
    AttentionSpec,
    Block,
    BlockSpec,
    MLPSpec,
    NormSpec,
    build_mask,
    build_norm,
)
from bmforge.testing import assert_close

B, T, D, H = 2, 6, 24, 4
CPU = torch.device("cpu")


def plain_mask(
    past: int, padding: Tensor | None, documents: Tensor | None, rows: int = B
) -> Tensor:
    """Decide for every query and key in a loop whether one sees the other."""
    seen = torch.zeros(rows, T, past + T, dtype=torch.bool)
    for b in range(rows):
        for t in range(T):
            for s in range(past + T):
                sees = s <= past + t
                if padding is not None and not padding[b, s] and s != past + t:
                    sees = False
                if documents is not None and documents[b, t] != documents[b, s]:
                    sees = False
                seen[b, t, s] = sees
    return seen


@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("padded", ["no", "left", "right"])
def test_mask_equals_a_loop(past: int, padded: str) -> None:
    """Causal, with a past, with padding on either side."""
    padding = None
    if padded != "no":
        padding = torch.ones(B, past + T, dtype=torch.long)
        padding[0, :4] = 0
        padding = padding if padded == "left" else padding.flip(1)
    mask = build_mask((B, T), CPU, past=past, attention_mask=padding)
    if past == 0 and padding is None:
        assert mask is None
        return
    expected = plain_mask(past, padding, None)
    assert torch.equal(mask[:, 0].expand(B, -1, -1), expected)


@pytest.mark.parametrize("padded", [False, True])
def test_document_mask_equals_a_loop(padded: bool) -> None:
    """Packed documents see only themselves."""
    documents = torch.tensor([[0, 0, 1, 1, 1, 2], [5, 5, 5, 5, 5, 5]])
    padding = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]]) if padded else None
    mask = build_mask((B, T), CPU, attention_mask=padding, document_ids=documents)
    assert torch.equal(mask[:, 0], plain_mask(0, padding, documents))


def test_one_new_token_needs_no_mask() -> None:
    """A single query sees everything before it."""
    assert build_mask((B, 1), CPU, past=7) is None


def plain_attention(layer: Attention, x: Tensor, mask: Tensor, groups: int) -> Tensor:
    """Softmax attention written out head by head."""
    query, key, value = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)
    scale = 1 / math.sqrt(H) if layer.scale is None else layer.scale
    outputs = []
    for head in range(query.shape[-1] // H):
        own = slice(head * H, (head + 1) * H)
        shared = slice(head // groups * H, (head // groups + 1) * H)
        scores = query[..., own] @ key[..., shared].transpose(1, 2) * scale
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        outputs.append(weights @ value[..., shared])
    return layer.o_proj(torch.cat(outputs, -1))


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 2), (6, 1)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_equals_plain_softmax(
    heads: int, kv_heads: int, bias: bool, scale: float | None
) -> None:
    """Grouped heads, biases and scales, causal and masked, forward and backward."""
    torch.manual_seed(0)
    layer = Attention(D, AttentionSpec(heads, kv_heads, H, bias, bias, scale)).double()
    x = torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    padding = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    masked = plain_mask(0, padding, None)
    for given, seen in ((None, causal.expand(B, T, T)), (masked[:, None], masked)):
        ours = layer(x, given)
        theirs = plain_attention(layer, x, seen, heads // kv_heads)
        assert_close(ours, theirs)
        weight = torch.randn_like(ours)
        inputs = [x, *layer.parameters()]
        mine = torch.autograd.grad((ours * weight).sum(), inputs)
        plain = torch.autograd.grad((theirs * weight).sum(), inputs)
        for a, b in zip(mine, plain, strict=True):
            assert_close(a, b)


def test_dropout_only_in_training() -> None:
    """Attention and residual dropout are off in eval mode and on in training."""
    attn = AttentionSpec(6, 6, H, dropout=0.5)
    spec = BlockSpec(D, attn, MLPSpec(32), residual_dropout=0.5)
    block, x = Block(spec, 0), torch.randn(B, T, D)
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))


def test_query_and_key_norms() -> None:
    """Per-head norms apply to queries and keys before the scores."""
    layer = Attention(D, AttentionSpec(6, 2, H, False, False, qk_norm=NormSpec("rms", 1e-6)))
    nn.init.uniform_(layer.q_norm.weight, 0.5, 2)
    x = torch.randn(B, T, D)
    query = F.rms_norm(layer.q_proj(x).unflatten(-1, (6, H)), (H,), layer.q_norm.weight, 1e-6)
    key = F.rms_norm(layer.k_proj(x).unflatten(-1, (2, H)), (H,), layer.k_norm.weight, 1e-6)
    key = key.repeat_interleave(3, 2)
    value = layer.v_proj(x).unflatten(-1, (2, H)).repeat_interleave(3, 2)
    scores = torch.einsum("btnh,bsnh->bnts", query, key) / math.sqrt(H)
    weights = scores.masked_fill(~torch.ones(T, T).tril().bool(), -torch.inf).softmax(-1)
    mixed = torch.einsum("bnts,bsnh->btnh", weights, value).flatten(2)
    assert_close(layer(x), layer.o_proj(mixed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rms_norm_equals_torch(dtype: torch.dtype) -> None:
    """The RMS norm is torch's."""
    norm = build_norm(NormSpec("rms"), D).to(dtype)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
    x = torch.randn(3, D, dtype=dtype)
    assert_close(norm(x), F.rms_norm(x, (D,), norm.weight, 1e-5))


def test_layer_norm_with_and_without_bias() -> None:
    """The layer norm is torch's, its bias optional."""
    assert build_norm(NormSpec(), D).bias is not None
    assert build_norm(NormSpec(bias=False), D).bias is None


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("gelu", F.gelu),
        ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
        ("relu", F.relu),
        ("silu", F.silu),
    ],
)
@pytest.mark.parametrize("gated", [False, True])
def test_mlp(name: str, function: object, gated: bool) -> None:
    """Plain and gated feed-forward with every activation, forward and backward."""
    torch.manual_seed(0)
    mlp = MLP(D, MLPSpec(32, name, gated)).double()
    x = torch.randn(3, D, dtype=torch.float64, requires_grad=True)
    inner = mlp.up_proj(x)
    inner = function(mlp.gate_proj(x)) * inner if gated else function(inner)
    expected = mlp.down_proj(inner)
    assert_close(mlp(x), expected)
    inputs = [x, *mlp.parameters()]
    mine = torch.autograd.grad(mlp(x).square().sum(), inputs)
    for a, b in zip(mine, torch.autograd.grad(expected.square().sum(), inputs), strict=True):
        assert_close(a, b)


def test_unknown_activation() -> None:
    """The nearest name is suggested."""
    with pytest.raises(ConfigError, match="Did you mean 'gelu'"):
        MLP(D, MLPSpec(32, "gelo"))


def test_masks_that_would_broadcast_are_refused():
    one = torch.ones(2, 1, dtype=torch.long)
    with pytest.raises(ShapeError, match=r"attention_mask has the shape \(2, 1\).*\(2, 4\)"):
        build_mask((2, 1), one.device, past=3, attention_mask=one)
    with pytest.raises(ShapeError, match=r"document_ids has the shape \(2, 1\)"):
        build_mask((2, 5), one.device, document_ids=one)
    with pytest.raises(ShapeError, match="cannot be used with a KV cache"):
        build_mask((2, 1), one.device, past=3, document_ids=one)


def test_rows_without_anything_to_see() -> None:
    """Not causal, a row of padding looks at everything; the others at what is shown."""
    padding = torch.ones(B, T, dtype=torch.long)
    padding[0], padding[1, 4:] = 0, 0
    mask = build_mask((B, T), CPU, attention_mask=padding, causal=False)
    assert mask[0].all()
    assert torch.equal(mask[1, 0, 0], padding[1].bool())
    documents = torch.tensor([[0] * T, [0, 0, 0, 0, 1, 1]])
    mask = build_mask((B, T), CPU, attention_mask=padding, document_ids=documents, causal=False)
    assert mask[1, 0, 4:].all()
    assert torch.equal(mask[1, 0, :4], padding[1].bool().expand(4, T))
