"""Blocks left out in training, and norms without weights."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
import torch.nn.functional as F

from bmforge.nn import AttentionSpec, Block, BlockSpec, MLPSpec, NormSpec, build_norm


def make_block(layer_drop: float, place: Literal["pre", "post", "parallel"] = "pre") -> Block:
    """A block of width 8."""
    torch.manual_seed(0)
    attn, mlp = AttentionSpec(2, 2, 4), MLPSpec(16)
    return Block(BlockSpec(8, attn, mlp, norm_place=place, layer_drop=layer_drop), 0)


@pytest.mark.parametrize("place", ["pre", "post", "parallel"])
def test_left_out_in_training_only(place: Literal["pre", "post", "parallel"]) -> None:
    """A block that is always left out hands its input on; evaluation always runs it."""
    x = torch.randn(2, 5, 8)
    block = make_block(1.0, place)
    assert torch.equal(block.train()(x), x)
    assert torch.equal(block.eval()(x), make_block(0.0, place)(x))


def test_left_out_as_often_as_asked() -> None:
    """Each call draws once: the input or the whole block, in the asked proportion."""
    block = make_block(0.25).train()
    x = torch.randn(1, 3, 8)
    whole = make_block(0.0)(x)
    torch.manual_seed(0)
    draws = [bool(torch.rand(()) < 0.25) for _ in range(200)]
    torch.manual_seed(0)
    for left_out in draws:
        assert torch.equal(block(x), x if left_out else whole)
    assert 30 < sum(draws) < 70


def test_plain_layer_norm() -> None:
    """A layer norm without weights is the bare normalisation."""
    norm = build_norm(NormSpec(eps=1e-3, affine=False), 8)
    x = torch.randn(2, 8)
    assert not list(norm.parameters())
    assert torch.equal(norm(x), F.layer_norm(x, (8,), eps=1e-3))
