"""BASE layers: balanced assignments against all there are, and layers against plain loops."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.nn.balanced_assignment import assign_balanced
from bmforge.nn.moe import MoE, MoESpec
from bmforge.testing.tolerance import assert_close


def affinities(tokens: int, experts: int, seed: int = 0, kind: str = "spread") -> Tensor:
    """Random affinities: spread, nearly all for one expert, all tokens alike, or with ties."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(tokens, experts, generator=generator, dtype=torch.float64)
    if kind == "one_expert":
        drawn[:, 0] += 5
    elif kind == "alike":
        drawn = drawn[:1].expand(tokens, -1).clone()
    elif kind == "ties":
        drawn = drawn.round()
    elif kind == "equal":
        drawn = torch.zeros_like(drawn)
    return drawn


def total(affinity: Tensor, owners: Tensor) -> float:
    """Return the sum of the chosen affinities."""
    return affinity.gather(1, owners[:, None]).sum().item()


def best_total(affinity: Tensor) -> float:
    """Try every balanced assignment."""
    tokens, experts = affinity.shape
    want = sorted(tokens // experts + (e < tokens % experts) for e in range(experts))
    return max(
        sum(affinity[t, e].item() for t, e in enumerate(owners))
        for owners in itertools.product(range(experts), repeat=tokens)
        if sorted(owners.count(e) for e in range(experts)) == want
    )


KINDS = ["spread", "one_expert", "alike", "ties", "equal"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "experts"), [(8, 2), (6, 3), (8, 4), (5, 5), (6, 1)])
def test_best_of_all_balanced_assignments(tokens: int, experts: int, kind: str) -> None:
    """Loads are even, and no other assignment with even loads has a larger sum."""
    for seed in range(3):
        affinity = affinities(tokens, experts, seed, kind)
        owners = assign_balanced(affinity)
        counts = torch.bincount(owners, minlength=experts)
        assert counts.tolist() == [tokens // experts] * experts
        assert total(affinity, owners) == pytest.approx(best_total(affinity), abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_two_experts_in_closed_form(kind: str) -> None:
    """With two experts the half that prefers the first one most goes there."""
    affinity = affinities(1000, 2, 1, kind)
    owners = assign_balanced(affinity)
    assert torch.bincount(owners).tolist() == [500, 500]
    gain = (affinity[:, 0] - affinity[:, 1]).sort(descending=True).values[:500].sum()
    assert total(affinity, owners) == pytest.approx((affinity[:, 1].sum() + gain).item(), abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "experts"), [(7, 3), (2, 4), (1, 3), (0, 3), (101, 8)])
def test_loads_where_experts_do_not_divide_tokens(tokens: int, experts: int, kind: str) -> None:
    """Loads differ by one at most."""
    affinity = affinities(max(tokens, 1), experts, 2, kind)[:tokens]
    counts = torch.bincount(assign_balanced(affinity), minlength=experts)
    assert counts.sum() == tokens
    assert counts.max() - counts.min() <= 1


def test_prices_prove_that_a_large_one_is_nearly_the_best() -> None:
    """For many tokens: the sum reaches what any prices show to be the largest that can be.

    For prices p of the experts no balanced assignment has more than the sum over tokens of
    max_e (a - p) plus the prices of all places (duality of linear assignment).
    """
    affinity = affinities(512, 8, 3, "one_expert")
    owners = assign_balanced(affinity)
    assert torch.bincount(owners).tolist() == [64] * 8
    prices = torch.zeros(8, dtype=torch.float64)
    bound = float("inf")
    for step in range(3000):
        best = affinity - prices
        bound = min(bound, (best.max(1).values.sum() + 64 * prices.sum()).item())
        load = torch.bincount(best.argmax(1), minlength=8).double()
        prices = prices + (load - 64) / 64 * 0.5 / (1 + step / 20)
    spread = (affinity.max() - affinity.min()).item()
    assert total(affinity, owners) <= bound + 1e-9
    assert bound - total(affinity, owners) < 1e-3 * spread * 512


def test_the_same_every_time_and_in_any_dtype() -> None:
    """The result depends on the values only; half precision and gradients do not matter."""
    affinity = affinities(64, 4)
    want = assign_balanced(affinity)
    assert torch.equal(assign_balanced(affinity.clone().requires_grad_()), want)
    half = affinity.bfloat16()
    assert torch.equal(assign_balanced(half), assign_balanced(half.double()))
    assert torch.equal(assign_balanced(affinity * 3), want)


def test_values_that_are_not_finite() -> None:
    """They count as the smallest that is, and do not hang the search."""
    affinity = affinities(8, 2)
    affinity[0, 1] = affinity.min() - 1
    want = assign_balanced(affinity)
    affinity[0, 1] = -torch.inf
    affinity[3, 0] = torch.nan
    counts = torch.bincount(assign_balanced(affinity), minlength=2)
    assert counts.tolist() == [4, 4]
    assert want[0] == 0
    assert assign_balanced(affinity)[0] == 0
    assert torch.bincount(assign_balanced(torch.full((6, 3), torch.nan))).tolist() == [2, 2, 2]


def test_operator_passes_torch_checks() -> None:
    """The operator's schema and fake shapes agree with what it does."""
    torch.library.opcheck(torch.ops.bmforge.assign_balanced, (affinities(8, 2),))


HIDDEN, SPEC = 8, MoESpec(4, 1, 12, "gelu_new", choice="balanced")


def build() -> MoE:
    """Return a layer with random weights."""
    torch.manual_seed(0)
    return MoE(HIDDEN, SPEC).double()


def tokens(*shape: int) -> Tensor:
    """Return random input that wants a gradient."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(*shape, HIDDEN, dtype=torch.float64, generator=generator)
    return drawn.requires_grad_()


def reference(moe: MoE, x: Tensor, owners: Tensor) -> Tensor:
    """Every token through its expert, not weighed."""
    parts = moe.experts
    rows = []
    for token, expert in zip(x.reshape(-1, HIDDEN), owners.tolist(), strict=True):
        gate = F.gelu(parts.gate_proj[expert] @ token, approximate="tanh")
        rows.append(parts.down_proj[expert] @ (gate * (parts.up_proj[expert] @ token)))
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("training", [False, True])
def test_values_and_gradients(training: bool) -> None:
    """Outputs and gradients are the loop's; the router gets none."""
    moe, x = build().train(training), tokens(3, 8)
    logits = x.detach().flatten(0, 1) @ moe.router.weight.detach().T
    owners = assign_balanced(logits) if training else logits.argmax(1)
    counts = torch.bincount(owners, minlength=4).tolist()
    assert (counts == [6] * 4) == training
    out, router_logits = moe(x)
    want = reference(moe, x, owners)
    assert_close(out, want)
    assert_close(router_logits, logits)
    direction = torch.randn(3, 8, HIDDEN, dtype=torch.float64)
    inputs = {"x": x, **dict(moe.experts.named_parameters())}
    got = torch.autograd.grad((out * direction).sum(), list(inputs.values()), retain_graph=True)
    expected = torch.autograd.grad((want * direction).sum(), list(inputs.values()))
    assert_close(dict(zip(inputs, got, strict=True)), dict(zip(inputs, expected, strict=True)))
    (out * direction).sum().backward()
    assert moe.router.weight.grad is None


@pytest.mark.parametrize("training", [False, True])
def test_compiles_whole(training: bool) -> None:
    """One graph, whatever is assigned."""
    torch.compiler.reset()
    moe = build().train(training)
    compiled = torch.compile(moe, fullgraph=True, backend="eager")
    for seed in range(2):
        x = torch.randn(2, 8, HIDDEN, dtype=torch.float64, generator=torch.manual_seed(seed))
        moe.zero_grad()
        compiled(x)[0].square().sum().backward()
        got = {n: p.grad.clone() for n, p in moe.experts.named_parameters()}
        moe.zero_grad()
        moe(x)[0].square().sum().backward()
        assert_close(got, {n: p.grad for n, p in moe.experts.named_parameters()})
    torch.compiler.reset()


def test_one_expert_per_token() -> None:
    """More than one cannot be balanced."""
    with pytest.raises(ConfigError, match="experts_per_token=2"):
        MoESpec(4, 2, 12, choice="balanced")
