"""Dropped inputs: the same gradients bit for bit, fewer bytes kept; recompute left alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from bmforge.nn import AttentionSpec, Block, BlockSpec, MLPSpec, NormSpec
from bmforge.nn.recompute import call_and_drop
from bmforge.testing import assert_close

KINDS = [
    pytest.param((NormSpec("layer"), True, MLPSpec(96)), id="plain"),
    pytest.param((NormSpec("rms"), False, MLPSpec(96, "silu", gated=True)), id="gated"),
]


def build(kind):
    torch.manual_seed(0)
    norm, bias, mlp = kind
    return Block(BlockSpec(32, AttentionSpec(4, 2, 8, qkv_bias=bias), mlp, norm=norm), 0)


def gradients(block, run):
    """Return the gradients of every parameter and of the input."""
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    run(block, x).square().sum().backward()
    return [x.grad, *(p.grad for p in block.parameters())]


def plain_forward(block, x):
    """The block's formula written out, without dropping anything."""
    y = x + block.attn(block.attn_norm(x))
    mlp, normed = block.mlp, block.mlp_norm(y)
    up = mlp.up_proj(normed)
    inner = mlp.activation(up)
    if mlp.gate_proj is not None:
        inner = mlp.activation(mlp.gate_proj(normed)) * up
    return y + mlp.down_proj(inner)


def recomputed(block, x):
    return checkpoint(block, x, use_reentrant=False)


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("run", [Block.__call__, recomputed], ids=["plain", "recompute"])
def test_gradients_are_the_same_bits(options, run):
    expected = gradients(build(options), plain_forward)
    for got, want in zip(gradients(build(options), run), expected, strict=True):
        assert torch.equal(got, want)


def kept_shapes(run):
    """Return how many tensors of each shape autograd itself still holds after forward."""
    value = torch.randn(4, 8, requires_grad=True)
    first, second = nn.Linear(8, 16), nn.Linear(16, 8)
    hidden = first(value)
    alive = []

    class Spy(nn.Module):
        def forward(self, x):
            out = second(x)
            node = out.grad_fn
            alive.append(node)
            return out

    out = run(Spy(), hidden)
    saved = [getattr(alive[0], name) for name in dir(alive[0]) if name.startswith("_raw_saved")]
    del hidden
    return out, [raw.data for raw in saved if raw.data is not None]


def test_the_value_itself_is_not_kept():
    _, kept = kept_shapes(lambda spy, h: spy(torch.tanh(h)))
    _, dropped = kept_shapes(
        lambda spy, h: call_and_drop(spy, torch.tanh(h), lambda: torch.tanh(h))
    )
    assert any(isinstance(k, torch.Tensor) and k.shape == (4, 16) for k in kept)
    assert not any(isinstance(k, torch.Tensor) and k.shape == (4, 16) for k in dropped)
    assert any(not isinstance(k, torch.Tensor) for k in dropped)


def test_other_peoples_hooks_are_left_alone():
    seen = []
    linear = nn.Linear(8, 8)
    value = torch.randn(2, 8, requires_grad=True)
    with saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t):
        normed = torch.tanh(value)
        call_and_drop(linear, normed, lambda: torch.tanh(value)).sum().backward()
    assert torch.Size([2, 8]) in seen
    assert torch.equal(linear.bias.grad, torch.full((8,), 2.0))


def test_without_gradients_nothing_changes():
    value = torch.randn(2, 8)
    assert torch.equal(call_and_drop(torch.sin, value, lambda: value), torch.sin(value))


@pytest.mark.parametrize("place", ["pre", "parallel"])
@pytest.mark.parametrize("kind", KINDS)
def test_swapped_weights_are_those_of_forward(kind, place) -> None:
    """A call with other weights has their gradients, though backward comes after they are gone."""
    norm, bias, mlp = kind
    torch.manual_seed(0)
    spec = BlockSpec(32, AttentionSpec(4, 2, 8, qkv_bias=bias), mlp, norm=norm, norm_place=place)
    block, plain = Block(spec, 0).double(), Block(spec, 0).double()
    other = {
        name: (p.detach() + torch.randn_like(p)).requires_grad_()
        for name, p in block.named_parameters()
    }
    plain.load_state_dict(other)
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    torch.func.functional_call(block, other, (x,)).square().sum().backward()
    plain(x).square().sum().backward()
    wanted = dict(plain.named_parameters())
    assert_close({n: t.grad for n, t in other.items()}, {n: wanted[n].grad for n in other})
