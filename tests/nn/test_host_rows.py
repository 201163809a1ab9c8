"""The CPU's kernels between products against float64 and torch, on every instruction set here."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bmforge.native import processor_features
from bmforge.nn import host_rows as module
from bmforge.nn.host_rows import (
    GATES,
    can_use_host_gated,
    can_use_host_gelu,
    can_use_host_rms_norm,
    host_gated,
    host_gelu,
    host_rms_norm,
)
from bmforge.nn.mlp import apply_gate, get_activation
from bmforge.nn.norm import RMSNorm

pytestmark = pytest.mark.skipif(module._kernel() is None, reason="no C++ compiler: torch is used")
VARIANTS = {"x86-64": "sse2", "x86-64-v3": "avx2", "x86-64-v4": "avx512f"}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if VARIANTS[request.param] not in processor_features():
        pytest.skip("this processor cannot run it")
    kernel = module._compile(f"-march={request.param} -ffp-contract=fast")
    monkeypatch.setattr(module, "_kernel", lambda: kernel)
    return request.param


def spread(*shape: int) -> Tensor:
    """Numbers of all sizes that occur, and those at which something overflows."""
    x = 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    x.view(-1)[:8] = torch.tensor([0.0, -0.0, 1e-30, -9.0, 12.0, -40.0, 1e4, -1e4])
    return x


def differentiate(function, grad: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    given = tuple(x.detach().clone().requires_grad_() for x in given)
    out = function(*given)
    return out, *torch.autograd.grad(out, given, grad)


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


@pytest.mark.parametrize("shape", [(3, 7), (2, 5, 4111), (1,) * 3 + (8,)])
def test_gelu_is_that_of_float64(variant: str, shape: tuple[int, ...]) -> None:
    x, grad = spread(*shape), torch.randn(*shape)
    ours = differentiate(host_gelu, grad, x)
    exact = differentiate(lambda x: F.gelu(x, approximate="tanh"), grad.double(), x.double())
    for one, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=1e-6)


def plain_gate(activation: str):
    return lambda gate, up: get_activation(activation)(gate) * up


@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("shape", [(3, 7), (2, 5, 4111), (1, 0)])
def test_gates_are_those_of_float64(variant: str, activation: str, shape: tuple[int, ...]) -> None:
    gate = spread(*shape) if shape[-1] else torch.empty(shape)
    up, grad = torch.randn(*shape), torch.randn(*shape)
    ours = differentiate(lambda g, u: host_gated(g, u, activation), grad, gate, up)
    exact = differentiate(plain_gate(activation), grad.double(), gate.double(), up.double())
    for one, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(3, 16), (2, 70, 48), (5, 768)])
def test_norm_is_that_of_float64(variant: str, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(*shape, generator=generator) for _ in range(2))
    weight = 1 + torch.randn(shape[-1], generator=generator)
    ours = differentiate(lambda x, w: host_rms_norm(x, w, 1e-5), grad, x, weight)
    exact = differentiate(plain_norm, grad.double(), x.double(), weight.double())
    for one, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=4e-6)


def test_bf16_is_within_its_rounding() -> None:
    x, grad = spread(40, 64).bfloat16(), torch.randn(40, 64).bfloat16()
    weight = torch.randn(64).bfloat16()
    cases = [
        (host_gelu, lambda x: F.gelu(x, approximate="tanh"), (x,)),
        (lambda x, w: host_rms_norm(x, w, 1e-5), plain_norm, (x, weight)),
        *(
            (partial(host_gated, activation=name), plain_gate(name), (x, x.flip(0)))
            for name in GATES
        ),
    ]
    for ours, plain, given in cases:
        exact = differentiate(plain, grad.double(), *(one.double() for one in given))
        for one, other in zip(differentiate(ours, grad, *given), exact, strict=True):
            assert one.dtype == torch.bfloat16
            assert (one.double() - other).norm() < 0.005 * other.norm()


def test_threads_do_not_change_a_bit() -> None:
    x, grad, weight = torch.randn(3, 300, 64).unbind(), torch.randn(300, 64), torch.randn(64)
    count, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            norm = differentiate(lambda x, w: host_rms_norm(x, w, 1e-5), grad, x[0], weight)
            gated = differentiate(lambda g, u: host_gated(g, u, "silu"), grad, x[1], x[2])
            found.append([*norm, *gated, *differentiate(host_gelu, grad, x[1])])
    finally:
        torch.set_num_threads(count)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_transposed_and_empty_tensors() -> None:
    x = torch.randn(32, 64)
    torch.testing.assert_close(host_gelu(x.t()), host_gelu(x).t(), rtol=0, atol=0)
    weight = torch.randn(32)
    straight = host_rms_norm(x.t().contiguous(), weight, 1e-5)
    grad = torch.randn(64, 32).t()
    torch.testing.assert_close(host_rms_norm(x.t(), weight, 1e-5), straight, rtol=0, atol=0)
    ours = differentiate(host_gelu, grad, x.t()[:, :32].t())
    theirs = differentiate(lambda x: F.gelu(x, approximate="tanh"), grad[:, :64], x.t()[:, :32].t())
    torch.testing.assert_close(ours, theirs)
    assert host_gelu(torch.empty(0, 5)).shape == (0, 5)
    assert host_rms_norm(torch.empty(0, 32), weight, 1e-5).shape == (0, 32)


def test_nan_stays() -> None:
    x = torch.full((1, 16), torch.nan, requires_grad=True)
    out = host_gelu(x)
    out.sum().backward()
    assert x.grad is not None
    assert out.isnan().all()
    assert x.grad.isnan().all()
    assert host_rms_norm(x, torch.ones(16), 1e-5).isnan().all()


def test_what_is_not_known_goes_to_torch() -> None:
    norm, rows = RMSNorm(16, 1e-5), torch.randn(1024, 16)
    assert can_use_host_rms_norm(rows, norm.weight)
    assert not can_use_host_rms_norm(rows[:1000], norm.weight)  # so few lie in the nearest cache
    assert not can_use_host_rms_norm(rows.double(), norm.weight)
    assert not can_use_host_rms_norm(torch.randn(1024, 24), torch.ones(24))
    assert not can_use_host_gelu(rows.half())
    assert can_use_host_gelu(rows)
    assert can_use_host_gated(rows, rows)
    assert not can_use_host_gated(rows, rows[:, :1])
    assert not can_use_host_gated(rows, rows.bfloat16())
    x = torch.randn(128, 128, dtype=torch.float64)
    assert torch.equal(get_activation("gelu_new")(x), F.gelu(x, approximate="tanh"))


def saved_shapes(out: Tensor) -> list[tuple[torch.Size, int]]:
    """Return the shape and address of every tensor that the graph of `out` saves."""
    nodes, seen, saved = [out.grad_fn], set(), {}
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [previous for previous, _ in node.next_functions]
        tensors = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        for tensor in (*tensors, *getattr(node, "saved_tensors", ())):
            if isinstance(tensor, Tensor):
                saved[tensor.data_ptr()] = tensor.shape
    return list(saved.items())


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_gate_saves_its_two_inputs_only(activation: str) -> None:
    gate, up = (torch.randn(64, 512, requires_grad=True) for _ in range(2))
    out = apply_gate(get_activation(activation), gate * 1, up * 1)
    large = [place for place, shape in saved_shapes(out) if shape == gate.shape]
    assert len(large) == 2
