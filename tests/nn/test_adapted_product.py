"""A packed layer with its LoRA in one autograd function, against the formula in fp64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bmforge.nn import panel_products, products
from bmforge.nn.adapter_selection import AdapterChoice, Selection, run_with_selection
from bmforge.nn.low_rank import LowRank, LowRankOptions
from bmforge.nn.packed_linear import QuantizedLinear
from bmforge.nn.packing import QuantSpec, pack_matrix, quantize_groups
from bmforge.nn.part import attach_part_
from bmforge.nn.products import load_kernels
from bmforge.nn.quantized import store_packed
from bmforge.testing.tolerance import assert_close

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="no compiler here")
SPECS = {
    "int8": QuantSpec(8, 32, activations="float"),
    "int4 minima": QuantSpec(4, 64, False, "float"),
    "int4 rows": QuantSpec(4, 0, activations="float"),
}
OFF = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def _many_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrices of these tests have several panels, and bf16 counts as fast."""
    monkeypatch.setattr(panel_products, "_PANEL_BYTES", 1 << 14)
    monkeypatch.setattr(products, "lacks_library", lambda dtype: False)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def build(spec: QuantSpec, has_bias: bool = True, **options: Any) -> tuple[Any, LowRank]:
    """Return a packed layer from 192 to 150 features with a LoRA whose update is not 0."""
    layer: Any = store_packed(nn.Linear(192, 150, bias=has_bias), spec)
    layer.take_packed_(pack_matrix(quantize_groups(draw(150, 192), spec), spec))
    if has_bias:
        layer.bias.data.copy_(draw(150, seed=4))
    part = LowRank(192, 150, LowRankOptions(5, alpha=3.0, **options), draw(1))
    for number, tensor in enumerate(part.parameters()):
        tensor.data.copy_(draw(*tensor.shape, seed=5 + number) / 8)
    attach_part_(layer, "lora", part)
    return layer, part


def is_fused(out: Tensor) -> bool:
    return type(out.grad_fn).__name__ == "AdaptedProductBackward"


@pytest.mark.parametrize("dtype", OFF, ids=str)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_values_and_gradients_of_the_formula(
    spec: QuantSpec, dtype: torch.dtype, has_bias: bool
) -> None:
    """Each subset of the tensors may need gradients; the others get none."""
    layer, part = build(spec, has_bias)
    weight = layer.dense(dtype).double()
    layer.to(dtype)
    grad = draw(3, 7, 150, seed=2).to(dtype)
    tensors = [draw(3, 7, 192, seed=1).to(dtype), part.down, part.up]
    tensors += [layer.bias] if has_bias else []
    for needs in itertools.product((False, True), repeat=len(tensors)):
        if not any(needs):
            continue
        for tensor, needed in zip(tensors, needs, strict=True):
            tensor.requires_grad_(needed)
            tensor.grad = None
        out = layer(tensors[0])
        assert is_fused(out)
        out.backward(grad)
        wide = [t.detach().double().requires_grad_(n) for t, n in zip(tensors, needs, strict=True)]
        x, down, up, *bias = wide
        want = x @ weight.t() + 3 / 5 * x @ down.t() @ up.t()
        want = want + bias[0] if bias else want
        want.backward(grad.double())
        pairs = [(out, want), *((a.grad, b.grad) for a, b in zip(tensors, wide, strict=True))]
        for number, (a, b) in enumerate(pairs):
            assert (a is None) == (b is None), (needs, number)
            if a is not None and b is not None:
                assert a.dtype == dtype
                error = (a.double() - b).norm() / b.norm()
                assert error < OFF[dtype], (needs, number, float(error))


def test_second_derivatives() -> None:
    """The gradients of a gradient's norm are those of the formula."""
    layer, part = build(SPECS["int8"])
    weight = layer.dense(torch.float32).double()
    results = []
    for is_own in (True, False):
        dtype = torch.float32 if is_own else torch.float64
        x = draw(20, 192, seed=1).to(dtype).requires_grad_()
        down, up = (t if is_own else t.detach().double() for t in (part.down, part.up))
        down, up = down.requires_grad_(), up.requires_grad_()
        out = layer(x) if is_own else x @ weight.t() + 3 / 5 * x @ down.t() @ up.t()
        bias = 0 if is_own else layer.bias.detach().double()
        (first,) = torch.autograd.grad((out + bias).pow(3).sum(), x, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), (x, down, up)))
    for mine, want in zip(*results, strict=True):
        assert (mine.double() - want).norm() < 1e-5 * want.norm()


def test_calls_that_are_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results equal those of separate functions; what one function cannot compute is not fused."""
    spec, x = SPECS["int8"], draw(20, 192, seed=1).requires_grad_()

    def compare(layer: Any, fused: bool, given: Tensor = x) -> None:
        torch.manual_seed(7)
        out = layer(given)
        assert type(out) is Tensor
        assert is_fused(out) == fused
        with monkeypatch.context() as patch:
            patch.setattr(QuantizedLinear, "_fused_adapter", lambda self, x: None)
            torch.manual_seed(7)
            want = layer(given)
        assert not is_fused(want)
        assert_close(out, want, rtol=1e-5, atol=1e-4)

    layer, part = build(spec)
    compare(layer, True)
    compare(layer, False, x[:16])
    with torch.no_grad():
        compare(layer, False)
    compare(layer.bfloat16(), True, x.bfloat16())
    layer.bias.data, part.up.data, part.down.data = (
        t.data.float() for t in (layer.bias, part.up, part.down)
    )
    compare(layer, False, x.bfloat16())  # the adapter in fp32
    with torch.autocast("cpu", torch.bfloat16):
        compare(layer, False)
    for weight, samples in ((0.5, None), (1.0, torch.tensor([1]))):
        selection = Selection({part: AdapterChoice(weight, samples)}, 2)
        with run_with_selection(selection):
            compare(layer, False, x.view(2, 10, 192))
    attach_part_(layer, "other", LowRank(192, 150, LowRankOptions(2), draw(1)))
    nn.init.ones_(layer.other.down)
    nn.init.ones_(layer.other.up)
    compare(layer, False)
    layer, _ = build(spec, dropout=0.5)
    compare(layer, False)
    compare(layer.eval(), True)
    compare(build(spec, bias=True)[0], False)
    compare(build(QuantSpec(8, 32))[0], False)  # quantized activations
    layer, _ = build(QuantSpec(8, 32, activations="float", outlier_ratio=0.02))
    compare(layer, False)


def test_hooks_get_tensors() -> None:
    """Hooks, before or after the adapters' own, and global ones get a tensor."""
    layer, _ = build(SPECS["int8"])
    x, outputs = draw(20, 192, seed=1).requires_grad_(), []

    def watch(*given: Any) -> None:
        outputs.append((given[0], given[-1]))

    layer.register_forward_hook(watch)
    want = layer(x)
    assert is_fused(want)
    assert outputs.pop() == (layer, want)
    handle = layer.register_forward_hook(watch, prepend=True)
    assert not is_fused(layer(x))
    handle.remove()
    every: Any = nn.modules.module
    handle = every.register_module_forward_hook(watch)
    assert not is_fused(layer(x))
    handle.remove()
    assert is_fused(layer(x))
    assert all(type(out) is Tensor for _, out in outputs)


def test_the_output_may_be_changed_in_place() -> None:
    layer, _ = build(SPECS["int8"])
    out = layer(draw(2, 20, 192, seed=1).requires_grad_())
    assert is_fused(out)
    out.mul_(2).sum().backward()
