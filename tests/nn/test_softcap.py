"""Soft caps of attention scores and of logits against their formulas, with all gradients."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bmforge.nn import (
    HeadInput,
    LMHead,
    linear_cross_entropy,
    linear_logprobs,
    losses,
)
from bmforge.nn.attention import compute_attention
from bmforge.nn.int8 import store_int8
from bmforge.nn.packing import QuantSpec
from bmforge.nn.quantized import store_packed
from bmforge.testing import assert_close

CAP = 1.5


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Return random numbers whose gradient is wanted."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def gradients(value: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Return the gradients of a weighted sum of `value`."""
    weights = torch.linspace(0.5, 2.0, value.numel(), dtype=value.dtype).view_as(value)
    return list(torch.autograd.grad((value * weights).sum(), inputs))


@pytest.mark.parametrize(
    ("masks", "causal", "biased", "length"),
    list(product(*[[True, False]] * 3, [1, 7])),
)
def test_attention(masks: bool, causal: bool, biased: bool, length: int) -> None:
    """Scores are capped before the bias, for grouped heads, and masked afterwards."""
    if biased and not masks and causal:
        pytest.skip("a caller with a bias passes the causal mask")
    query, key, value = draw(2, 4, length, 6), draw(2, 2, 7, 6, seed=1), draw(2, 2, 7, 6, seed=2)
    mask = torch.rand(2, 1, length, 7, generator=torch.Generator().manual_seed(3)) < 0.7
    mask[..., 0] = True
    inputs = [query, key, value]
    bias = draw(1, 4, length, 7) if biased else None
    inputs += [bias] if bias is not None else []
    shown = mask if masks else torch.ones(length, 7, dtype=torch.bool)
    if causal and not masks and length > 1:
        shown = shown.tril()
    scores = torch.tanh(query @ key.repeat_interleave(2, 1).mT * 0.9 / CAP) * CAP
    scores = (scores if bias is None else scores + bias).masked_fill(~shown, -torch.inf)
    expected = scores.softmax(-1) @ value.repeat_interleave(2, 1)
    given = mask if masks else None
    got = compute_attention(query, key, value, given, bias, causal, 0.9, 0.0, softcap=CAP)
    assert_close(got, expected)
    for ours, theirs in zip(gradients(got, inputs), gradients(expected, inputs), strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("tile", [None, (3, 4)])
def test_loss_of_a_head(tile: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss and its gradients are those of capped logits, in one tile and in many."""
    if tile is not None:
        cut = losses.Tiling(*tile, keeps=True)
        monkeypatch.setattr(losses, "find_tiling", lambda *arguments: cut)
    hidden, weight, bias, low, rows = draw(8, 5), draw(11, 5), draw(11), draw(8, 2), draw(11, 2)
    labels = torch.tensor([3, 0, -100, 10, 5, 5, -100, 1])
    inputs = [hidden, weight, bias, low, rows]
    logits = torch.tanh((hidden @ weight.T + bias + low @ rows.T) / CAP) * CAP
    expected = F.cross_entropy(logits, labels)
    got = linear_cross_entropy(hidden, weight, labels, bias, None, None, [(low, rows)], CAP)
    assert_close(got, expected)
    for ours, theirs in zip(gradients(got, inputs), gradients(expected, inputs), strict=True):
        assert_close(ours, theirs)


def test_scores_of_tokens() -> None:
    """Log-probabilities and entropies are those of capped logits."""
    hidden, weight = draw(8, 5), draw(11, 5)
    labels = torch.tensor([3, 0, 2, 10, 5, 5, 7, 1])
    logs = (torch.tanh(hidden @ weight.T / CAP) * CAP).log_softmax(-1)
    expected = torch.stack((logs.gather(1, labels[:, None])[:, 0], -(logs.exp() * logs).sum(-1)))
    head = HeadInput(hidden, weight, softcap=CAP)
    got = linear_logprobs(head, labels, with_entropy=True)[:2]
    assert_close(got, expected)
    pairs = zip(
        gradients(got, [hidden, weight]), gradients(expected, [hidden, weight]), strict=True
    )
    for ours, theirs in pairs:
        assert_close(ours, theirs)
    assert_close(head.logits(), torch.tanh(hidden @ weight.T / CAP) * CAP)


def test_head() -> None:
    head = LMHead(5, 11, bias=False).double()
    head.softcap = CAP
    hidden = draw(8, 5)
    assert_close(head(hidden), torch.tanh(F.linear(hidden, head.weight) / CAP) * CAP)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_quantized_heads_keep_the_cap(scheme: str) -> None:
    head = LMHead(64, 11, bias=False)
    head.softcap = CAP
    hidden = draw(8, 64).detach().float()
    stored: Any = store_int8(head, {}) if scheme == "int8" else store_packed(head, QuantSpec(4, 64))
    plain = F.linear(hidden, stored.matrix(hidden.dtype))
    assert_close(stored(hidden), torch.tanh(plain / CAP) * CAP)
