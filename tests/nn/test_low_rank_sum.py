"""The fused sum of a layer's output and its LoRA update, against the formula in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.nn.low_rank import LowRank, LowRankOptions
from bmforge.nn.low_rank_sum import AddLowRank, can_use_low_rank_sum
from bmforge.nn.part import attach_part_

TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}


def make_tensors(shape: tuple[int, ...], rank: int, dtype: torch.dtype) -> list[Tensor]:
    """Return out, x, down and up for a layer from 16 to 24 features."""
    generator = torch.Generator().manual_seed(rank)
    sizes = [(*shape, 24), (*shape, 16), (rank, 16), (24, rank)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in sizes]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 1, 4)], ids=str)
@pytest.mark.parametrize("rank", [1, 5])
def test_values_and_gradients_are_those_of_the_formula(
    shape: tuple[int, ...], rank: int, dtype: torch.dtype
) -> None:
    """Each subset of the inputs may need gradients; the others get none."""
    tensors = make_tensors(shape, rank, dtype)
    grad = make_tensors(shape, rank, torch.float64)[0].flip(0)
    for needs in itertools.product((False, True), repeat=4):
        if not any(needs):
            continue
        ours = [t.clone().requires_grad_(n) for t, n in zip(tensors, needs, strict=True)]
        wide = [t.double().clone().requires_grad_(n) for t, n in zip(tensors, needs, strict=True)]
        out, x, down, up = wide
        want = out + 0.7 * F.linear(F.linear(x, down), up)
        got = AddLowRank.apply(*ours, 0.7)
        got.backward(grad.to(dtype))
        want.backward(grad)
        pairs = [(got, want), *((a.grad, b.grad) for a, b in zip(ours, wide, strict=True))]
        for number, (a, b) in enumerate(pairs):
            assert (a is None) == (b is None), (needs, number)
            if a is not None and b is not None:
                error = (a.double() - b).norm() / b.norm()
                assert error < TOLERANCES[dtype], (needs, number, float(error))


def test_second_derivatives_are_right() -> None:
    inputs = [t.requires_grad_() for t in make_tensors((3,), 2, torch.float64)]
    assert torch.autograd.gradgradcheck(lambda *t: AddLowRank.apply(*t, 0.7), inputs)


def test_a_training_step_of_a_layer_uses_it_and_tracing_does_not() -> None:
    layer, options = nn.Linear(16, 24), LowRankOptions(4, alpha=8.0)
    layer.requires_grad_(False)
    part = LowRank.for_module(layer, options)
    nn.init.normal_(part.down)
    nn.init.normal_(part.up)
    attach_part_(layer, "lora", part)
    x = torch.randn(3, 16)
    fused = layer(x)
    assert fused.grad_fn.name() == "AddLowRankBackward"
    with torch.no_grad():
        torch.testing.assert_close(layer(x), fused)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(compiled, fused)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).grad_fn.name() != "AddLowRankBackward"
    wide = x.double()
    assert not can_use_low_rank_sum(fused, wide, part.down, part.up)
