"""Attention with a trained bias against a softmax that is written out, in float64."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from bmforge.nn import attention_bias
from bmforge.nn.attention_bias import biased_attention
from bmforge.testing.tolerance import assert_close


class Case(NamedTuple):
    """Inputs; all but the mask want gradients."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor
    mask: Tensor | None

    @property
    def trained(self) -> dict[str, Tensor]:
        """What has a gradient, by name."""
        return {name: t for name, t in self._asdict().items() if name != "mask"}


def make_case(shape: tuple[int, int, int, int, int], bias_rows: int = 1, mask: str = "") -> Case:
    """Return random inputs, laid out as projections make them.

    Args:
        shape: B, N, T, S, H.
        bias_rows: rows of the bias.
        mask: "", "keys" (padding) or "causal" (of every row its own).
    """
    rows, heads, queries, keys, width = shape

    def draw(length: int) -> Tensor:
        drawn = torch.randn(rows, length, heads, width, dtype=torch.float64)
        return drawn.transpose(1, 2).requires_grad_()

    bias = torch.randn(bias_rows, heads, queries, keys, dtype=torch.float64, requires_grad=True)
    shown = None
    if mask == "keys":
        shown = torch.rand(rows, 1, 1, keys) < 0.7
        shown[..., 0] = True
    elif mask == "causal":
        shown = torch.rand(rows, 1, queries, keys).tril() > 0.3
        shown[..., 0] = True
    return Case(draw(queries), draw(keys), draw(keys), bias, shown)


def plain(case: Case, scale: float | None, kept: Tensor | float = 1.0) -> Tensor:
    """The same with all weights at once; `kept` is what each weight is multiplied by."""
    scale = case.query.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * case.query @ case.key.transpose(-1, -2) + case.bias
    if case.mask is not None:
        scores = scores.masked_fill(~case.mask, -math.inf)
    return (scores.softmax(-1) * kept) @ case.value


def compare(case: Case, got: Tensor, want: Tensor) -> None:
    """Compare results and the gradients of everything."""
    assert_close(got, want)
    grad = torch.randn_like(want)
    tensors = list(case.trained.values())
    gotten = torch.autograd.grad(got, tensors, grad)
    wanted = torch.autograd.grad(want, tensors, grad)
    assert_close(
        dict(zip(case.trained, gotten, strict=True)), dict(zip(case.trained, wanted, strict=True))
    )


SHAPES = {
    "square": (3, 4, 7, 7, 5),
    "wide": (2, 3, 4, 11, 6),
    "one_query": (2, 3, 1, 9, 4),
    "one_row": (1, 2, 8, 8, 3),
}


@pytest.mark.parametrize("block", [1, 8, 30, 60, 200, 10_000])
@pytest.mark.parametrize("mask", ["", "keys", "causal"])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_forward_and_gradients(
    shape: str, mask: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All results and gradients, whether a block is a row of scores or all of them."""
    monkeypatch.setattr(attention_bias, "_HOST_TILE_ELEMENTS", block)
    for bias_rows in (1, SHAPES[shape][0]):
        for scale in (1.0, None):
            case = make_case(SHAPES[shape], bias_rows, mask)
            compare(case, biased_attention(*case, scale), plain(case, scale))


def test_gradcheck() -> None:
    """Backward is the derivative of forward."""
    case = make_case((2, 2, 3, 4, 2), mask="keys")
    tensors = list(case.trained.values())
    assert torch.autograd.gradcheck(lambda *t: biased_attention(*t, case.mask, 1.0), tensors)


@pytest.mark.parametrize("grad", [True, False])
def test_bias_that_forbids(grad: bool) -> None:
    """-inf in the bias is a mask, and gets no gradient."""
    case = make_case((2, 3, 6, 6, 4))
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    forbidding = case.bias.detach().masked_fill(~causal, -math.inf).requires_grad_(grad)
    got = biased_attention(case.query, case.key, case.value, forbidding, None, 1.0)
    want = plain(case._replace(mask=causal[None, None]), 1.0)
    assert_close(got, want)
    if grad:
        got.sum().backward()
        assert (forbidding.grad[..., ~causal] == 0).all()
        assert forbidding.grad.isfinite().all()


@pytest.mark.parametrize("mask", ["", "keys"])
def test_without_a_trained_bias(mask: str) -> None:
    """A fixed bias, or no gradients at all, give the same numbers."""
    case = make_case((2, 3, 5, 7, 4), mask=mask)
    want = plain(case, 1.0)
    fixed = case._replace(bias=case.bias.detach())
    assert_close(biased_attention(*fixed, 1.0), want)
    with torch.no_grad():
        assert_close(biased_attention(*case, 1.0), want)


def test_layout_of_the_result() -> None:
    """The result lies as the queries do, so that joining its heads copies nothing."""
    case = make_case((2, 3, 5, 5, 4))
    joined = biased_attention(*case, 1.0).transpose(1, 2)
    assert joined.is_contiguous()


@pytest.mark.parametrize("block", [30, 10_000])
def test_dropout_given_what_it_kept(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kept weights known, result and gradients are exact.

    Values that are the identity show the weights themselves, so a draw with the same generator
    state tells which were kept.
    """
    monkeypatch.setattr(attention_bias, "_HOST_TILE_ELEMENTS", block)
    case = make_case((3, 2, 6, 6, 6), mask="keys")
    identity = torch.eye(6, dtype=torch.float64).expand(3, 2, 6, 6).clone()
    torch.manual_seed(7)
    shown = biased_attention(case.query, case.key, identity, case.bias, case.mask, 1.0, 0.4)
    kept = (shown != 0).to(torch.float64) / 0.6
    assert 0 < (kept == 0).double().mean() < 1
    torch.manual_seed(7)
    compare(case, biased_attention(*case, 1.0, 0.4), plain(case, 1.0, kept))


def test_dropout_statistics() -> None:
    """A weight is dropped as often as asked, and what is left has the same mean."""
    case = make_case((4, 2, 64, 64, 64))
    identity = torch.eye(64, dtype=torch.float64).expand(4, 2, 64, 64).clone()
    got = biased_attention(case.query, case.key, identity, case.bias, None, None, 0.3)
    weights = plain(case._replace(value=identity), None)
    share = (got == 0).double().mean().item()
    assert abs(share - 0.3) < 5 * math.sqrt(0.3 * 0.7 / got.numel())
    left = got != 0
    assert_close(got[left], weights[left] / 0.7)
    again = biased_attention(case.query, case.key, identity, case.bias, None, None, 0.3)
    assert not torch.equal(got, again)


def test_half_precision() -> None:
    """bf16 stays as close to the exact result as a softmax in bf16 does; dtypes are kept."""
    case = make_case((2, 4, 32, 32, 16))
    want = plain(case, 1.0)
    half = [t.detach().bfloat16().requires_grad_() for t in case.trained.values()]
    got = biased_attention(*half, None, 1.0)
    assert got.dtype == torch.bfloat16
    assert (got.double() - want).norm() < 0.02 * want.norm()
    got.sum().backward()
    assert all(t.grad.dtype == torch.bfloat16 for t in half)
    want.sum().backward()
    for t, exact in zip(half, case.trained.values(), strict=True):
        assert (t.grad.double() - exact.grad).norm() < 0.05 * exact.grad.norm()


def test_no_weights_are_kept() -> None:
    """What backward keeps has no tensor of B x N x T x S."""
    case = make_case((2, 3, 40, 40, 4))
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        biased_attention(*case, 1.0)
    assert max(sizes) == case.bias.numel()


def test_compiles_whole() -> None:
    """Under the compiler there is one graph, with the same gradients."""
    case = make_case((2, 3, 5, 5, 4), mask="keys")
    compiled = torch.compile(biased_attention, fullgraph=True, backend="eager")
    compare(case, compiled(*case, 1.0), biased_attention(*case, 1.0))
    torch.compiler.reset()
