"""Layers of experts against a plain loop over tokens and experts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from bmforge.errors import ConfigError
from bmforge.nn.grouped import grouped_linear, take_rows
from bmforge.nn.load_balance import load_balancing_loss
from bmforge.nn.moe import MoE, MoESpec, dispatch_locally, limit_loads
from bmforge.testing.tolerance import assert_close

HIDDEN = 8
SPECS = {
    "mixtral": MoESpec(4, 2, 12),
    "raw_weights": MoESpec(5, 3, 12, normalize_weights=False),
    "plain": MoESpec(4, 1, 12, "gelu", gated=False),
    "shared": MoESpec(4, 2, 12, normalize_weights=False, shared_size=10),
    "shared_without_gate": MoESpec(4, 2, 12, shared_size=10, shared_gate=False),
    "all_experts": MoESpec(3, 3, 12),
    "many_idle": MoESpec(16, 1, 6),
}


def build(spec: MoESpec, dtype: torch.dtype = torch.float64) -> MoE:
    """Return a layer with random weights."""
    torch.manual_seed(0)
    return MoE(HIDDEN, spec).to(dtype)


def tokens(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return random input that wants a gradient."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, HIDDEN, dtype=dtype, generator=generator, requires_grad=True)


def reference(moe: MoE, spec: MoESpec, x: Tensor, kept: Tensor | None = None) -> Tensor:
    """The same, token by token and expert by expert; `kept` says which of them do work."""
    activation = {"silu": F.silu, "gelu": F.gelu}[spec.activation]
    experts = moe.experts
    rows = []
    for number, token in enumerate(x.reshape(-1, HIDDEN)):
        probability = torch.softmax(moe.router.weight @ token, 0)
        best = sorted(range(spec.num_experts), key=lambda e: -probability[e].item())
        best = best[: spec.experts_per_token]
        whole = sum(probability[e] for e in best) if spec.normalize_weights else 1.0
        row = torch.zeros_like(token)
        for e in best:
            if kept is not None and e not in kept[number]:
                continue
            inner = activation((experts.gate_proj if spec.gated else experts.up_proj)[e] @ token)
            inner = inner * (experts.up_proj[e] @ token) if spec.gated else inner
            row = row + probability[e] / whole * (experts.down_proj[e] @ inner)
        if moe.shared_expert is not None:
            shared = moe.shared_expert(token)
            if moe.shared_gate is not None:
                shared = shared * torch.sigmoid(moe.shared_gate.weight[0] @ token)
            row = row + shared
        rows.append(row)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("name", list(SPECS))
def test_values_and_gradients(name: str) -> None:
    """Output, router logits and every gradient are the loop's."""
    spec = SPECS[name]
    moe = build(spec)
    x, direction = tokens(3, 5), torch.randn(3, 5, HIDDEN, dtype=torch.float64)
    inputs = {"x": x, **dict(moe.named_parameters())}

    def run(out: Tensor) -> dict[str, Tensor]:
        grads = torch.autograd.grad((out * direction).sum(), list(inputs.values()))
        return dict(zip(inputs, grads, strict=True))

    out, logits = moe(x)
    want = reference(moe, spec, x)
    assert_close(out, want)
    assert_close(logits, x.flatten(0, 1) @ moe.router.weight.T)
    assert_close(run(out), run(want))


def test_no_token_is_dropped() -> None:
    """All tokens with one expert are all computed; idle experts have gradients of zero."""
    moe = build(MoESpec(4, 1, 12))
    x = tokens(6).abs().detach()
    with torch.no_grad():
        moe.router.weight.copy_(torch.tensor([0.0, 0.0, 1.0, 0.0])[:, None].expand(4, HIDDEN))
    out, _ = moe(x)
    assert_close(out, reference(moe, MoESpec(4, 1, 12), x))
    out.sum().backward()
    grad = moe.experts.up_proj.grad
    assert grad is not None
    assert grad[2].abs().sum() > 0
    assert grad[[0, 1, 3]].abs().sum() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_kernel_is_the_same_product(dtype: torch.dtype) -> None:
    """Torch's grouped product, which accelerators use, computes what the loop does."""
    torch.manual_seed(0)
    x, weight = torch.randn(12, 16, dtype=dtype), torch.randn(4, 8, 16, dtype=dtype)
    ends = torch.tensor([3, 3, 10, 12])
    want = F.grouped_mm(x, weight.transpose(1, 2), offs=ends.to(torch.int32))
    assert_close(grouped_linear(x, weight, ends), want)


def test_gradients_of_parts() -> None:
    """The registered gradients are the numerical ones."""
    ends = torch.tensor([2, 2, 5])
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: grouped_linear(a, b, ends), (x, weight))
    index = torch.tensor([2, 0, 1, 1, 0, 2])
    places = torch.tensor([1, 4, 2, 3, 0, 5])
    rows = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.equal(take_rows(rows, index, places), rows[index])
    assert torch.autograd.gradcheck(lambda a: take_rows(a, index, places), (rows,))


def test_frozen_parts_cost_no_gradient() -> None:
    """Frozen experts get none, and the input's is the same."""
    moe, x = build(SPECS["mixtral"]), tokens(2, 3)
    (want,) = torch.autograd.grad(moe(x)[0].sum(), x)
    moe.experts.requires_grad_(False)
    moe(x)[0].sum().backward()
    assert moe.experts.up_proj.grad is None
    assert_close(x.grad, want)


def test_operators_pass_torch_checks() -> None:
    """The operators' schema, fake shapes and gradients agree with what they do."""
    ends = torch.tensor([2, 2, 5])
    x, weight = torch.randn(5, 3, requires_grad=True), torch.randn(3, 4, 3, requires_grad=True)
    torch.library.opcheck(torch.ops.bmforge.grouped_linear, (x, weight, ends))
    torch.library.opcheck(torch.ops.bmforge.grouped_outer, (torch.randn(5, 4), x.detach(), ends))


@pytest.mark.parametrize("name", ["mixtral", "shared"])
def test_compiles_whole(name: str) -> None:
    """One graph, whatever the router decides."""
    torch.compiler.reset()
    moe = build(SPECS[name])
    compiled = torch.compile(moe, fullgraph=True, backend="eager")
    for seed in range(3):
        x = torch.randn(2, 5, HIDDEN, dtype=torch.float64, generator=torch.manual_seed(seed))
        moe.zero_grad()
        compiled(x)[0].square().sum().backward()
        got = {n: p.grad.clone() for n, p in moe.named_parameters() if p.grad is not None}
        moe.zero_grad()
        moe(x)[0].square().sum().backward()
        assert_close(got, {n: p.grad for n, p in moe.named_parameters() if p.grad is not None})
    torch.compiler.reset()


def test_dispatch_is_replaceable() -> None:
    """A layout's own way to the experts is used instead."""
    moe, x = build(SPECS["mixtral"]), tokens(2, 3)
    seen = []

    def dispatch(tokens: Tensor, index: Tensor, num_experts: int, run) -> Tensor:
        seen.append((tuple(tokens.shape), tuple(index.shape), num_experts))
        return dispatch_locally(tokens, index, num_experts, run)

    want = moe(x)[0]
    moe.dispatch = dispatch
    assert torch.equal(moe(x)[0], want)
    assert seen == [((6, HIDDEN), (6, 2), 4)]


@pytest.mark.parametrize("padded", [False, True])
def test_load_balancing_loss(padded: bool) -> None:
    """Value and gradient are transformers'; even load gives k, one busy expert E."""
    torch.manual_seed(0)
    logits = [torch.randn(6, 4, requires_grad=True) for _ in range(3)]
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]]) if padded else None
    ours = load_balancing_loss(logits, 2, mask)
    theirs = load_balancing_loss_func(tuple(logits), 4, 2, mask)
    assert_close(ours, theirs)
    got, want = torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits)
    for one, other in zip(got, want, strict=True):
        assert_close(one, other)
    even = torch.eye(4).repeat(2, 1) * 100
    assert_close(load_balancing_loss([even], 1), torch.tensor(1.0))
    busy = torch.tensor([[100.0, 0, 0, 0]]).expand(6, 4)
    assert_close(load_balancing_loss([busy], 1), torch.tensor(4.0))


def limit_plainly(index: Tensor, experts: int, capacity: int) -> Tensor:
    """GShard's loops: all first choices in order, then all second ones."""
    loads, out = [0] * experts, index.clone()
    for choice in range(index.shape[1]):
        for token in range(index.shape[0]):
            expert = index[token, choice].item()
            loads[expert] += 1
            if loads[expert] > capacity:
                out[token, choice] = experts
    return out


@pytest.mark.parametrize("name", ["mixtral", "raw_weights", "many_idle", "shared"])
@pytest.mark.parametrize("factor", [0.1, 0.8, 1.3, 100.0])
def test_capacity(name: str, factor: float) -> None:
    """Dropped choices are the loops', and count nothing; gradients as well. Only in training."""
    spec = SPECS[name]
    moe, x = build(spec), tokens(4, 6)
    everything = moe(x)[0]
    _, index = moe._route(moe.router(x.flatten(0, 1)))
    capacity = -(-int(factor * 100) * 24 * spec.experts_per_token // (100 * spec.num_experts))
    kept = limit_plainly(index, spec.num_experts, capacity)
    assert torch.equal(limit_loads(index, spec.num_experts, capacity), kept)
    assert torch.bincount(kept.flatten()).max() > 0
    dropped = int((kept == spec.num_experts).sum())
    assert dropped > 0 if factor < 1 else factor < 100 or dropped == 0
    moe.capacity_factor = factor
    out, _ = moe(x)
    want = reference(moe, spec, x, kept)
    assert_close(out, want)
    inputs = {"x": x, **dict(moe.named_parameters())}
    direction = torch.randn(4, 6, HIDDEN, dtype=torch.float64)

    def run(out: Tensor) -> dict[str, Tensor]:
        grads = torch.autograd.grad((out * direction).sum(), list(inputs.values()))
        return dict(zip(inputs, grads, strict=True))

    assert_close(run(out), run(want))
    assert torch.equal(moe.eval()(x)[0], everything)


def test_impossible_counts() -> None:
    """More experts per token than there are is refused, and a capacity without effect."""
    with pytest.raises(ConfigError, match="experts_per_token=5"):
        MoESpec(4, 5, 12)
    for factor in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="capacity_factor"):
            MoESpec(4, 2, 12, capacity_factor=factor)
    with pytest.raises(ConfigError, match="no effect with choice='balanced'"):
        MoESpec(4, 1, 12, choice="balanced", capacity_factor=1.0)
    assert build(MoESpec(4, 2, 12, capacity_factor=1.25)).capacity_factor == 1.25
