"""Products of packed weights with many tokens, against fp64 products with dequantized weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bmforge.nn import MoESpec, panel_products, products
from bmforge.nn.moe import Experts
from bmforge.nn.packing import PackedMatrix, QuantSpec, pack_matrix, quantize_groups, unpack_matrix
from bmforge.nn.product_kernels import Kernels
from bmforge.nn.products import load_variant, multiply_packed, runnable_variants
from bmforge.nn.quantized import store_packed
from bmforge.testing.tolerance import assert_close

SPECS = {
    "int8": QuantSpec(8, 32, activations="float"),
    "int8 of 16": QuantSpec(8, 16, activations="float", scale_dtype="float32"),
    "int8 rows": QuantSpec(8, 0, activations="float"),
    "int8 minima": QuantSpec(8, 64, False, "float", scale_dtype="float32"),
    "int4": QuantSpec(4, 32, activations="float"),
    "int4 of 96": QuantSpec(4, 96, activations="float"),
    "int4 rows": QuantSpec(4, 0, activations="float", scale_dtype="float32"),
    "int4 minima": QuantSpec(4, 64, False, "float"),
}
DTYPES = [torch.float32, torch.bfloat16]
# Relative rounding error of one result; sums of a few hundred products add little in fp32.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}


@pytest.fixture(params=runnable_variants())
def kernels(request: pytest.FixtureRequest) -> Kernels:
    variant = load_variant(request.param)
    if variant is None:
        pytest.skip("no compiler here")
    return variant


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pack(rows: int, columns: int, spec: QuantSpec) -> PackedMatrix:
    return pack_matrix(quantize_groups(draw(rows, columns), spec), spec)


def assert_near(got: Tensor, want: Tensor, size: Tensor) -> None:
    """Compare with fp64 results; `size` is the sum of the absolute products of each result."""
    off = (got.double() - want).abs()
    assert (off <= ROUNDING[got.dtype] * want.abs() + 2e-6 * size).all(), float(off.max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("rows", [5, 37, 48])
def test_parts_of_a_matrix(kernels: Kernels, spec: QuantSpec, rows: int, dtype: Any) -> None:
    """Parts equal the dequantized values, rounded; memory outside of the part is not written."""
    matrix = pack(rows, 192, spec)
    dense = unpack_matrix(matrix, rows, spec).to(dtype)
    padded = -(-rows // 16) * 16
    for part in (slice(0, 192), slice(64, 160), slice(160, 192)):
        width = part.stop - part.start
        first = 16 if rows > 16 else 0
        whole, some = (torch.full((rows + 1, width + 3), 77.0, dtype=dtype) for _ in range(2))
        kernels.unpack_part(matrix, slice(0, rows), part, spec, whole)
        assert torch.equal(whole[:rows, :width], dense[:, part])
        assert (whole[rows:] == 77).all()
        assert (whole[:, width:] == 77).all()
        kernels.unpack_part(matrix, slice(first, rows), part, spec, some)
        assert torch.equal(some[: rows - first, :width], dense[first:, part])
        assert (some[rows - first :] == 77).all()
        turned = torch.full((width + 1, padded + 3), 77.0, dtype=dtype)
        kernels.unpack_part(matrix, slice(0, rows), part, spec, turned, transposed=True)
        assert torch.equal(turned[:width, :rows], dense[:, part].t())
        assert (turned[width:] == 77).all()
        assert (turned[:, padded:] == 77).all()


def test_a_width_that_is_no_multiple_of_a_vector(kernels: Kernels) -> None:
    spec = SPECS["int8 rows"]
    matrix = pack(21, 76, spec)
    out = torch.full((21, 80), 77.0, dtype=torch.bfloat16)
    kernels.unpack_part(matrix, slice(0, 21), slice(32, 76), spec, out)
    assert torch.equal(out[:, :44], unpack_matrix(matrix, 21, spec)[:, 32:].bfloat16())
    assert (out[:, 44:] == 77).all()
    assert torch.equal(kernels.unpack(matrix, 21, spec), unpack_matrix(matrix, 21, spec))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize(("rows", "columns"), [(50, 192), (256, 384)])
@pytest.mark.parametrize("panel_bytes", [1, 1 << 16, 1 << 22])
def test_values_and_gradients(
    spec: QuantSpec,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    panel_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one panel or many, results equal those of the rounded weights, rounded once."""
    monkeypatch.setattr(products, "lacks_optimized_product", lambda dtype: False)
    monkeypatch.setattr(panel_products, "_PANEL_BYTES", panel_bytes)
    layer: Any = store_packed(nn.Linear(columns, rows), spec)
    layer.take_packed_(pack(rows, columns, spec))
    layer.bias.data.copy_(draw(rows, seed=3))
    layer.to(dtype)
    x = draw(3, 7, columns, seed=1).to(dtype).requires_grad_()
    grad = draw(3, 7, rows, seed=2).to(dtype)
    out = layer(x)
    x_grad, bias_grad = torch.autograd.grad(out, (x, layer.bias), grad)
    weight = unpack_matrix(pack(rows, columns, spec), rows, spec).to(dtype).double()
    wide, bias = x.detach().double(), layer.bias.detach().double()
    assert out.dtype == x_grad.dtype == dtype
    sizes = wide.abs() @ weight.abs().t(), grad.double().abs() @ weight.abs()
    assert_near(out, wide @ weight.t() + bias, sizes[0] + bias.abs())
    assert_near(x_grad, grad.double() @ weight, sizes[1])
    assert_near(bias_grad, grad.double().sum((0, 1)), grad.double().abs().sum((0, 1)))
    with torch.no_grad():
        assert torch.equal(layer(x), out)


def test_panels_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """No buffer of forward or backward is larger than a panel and its padding."""
    if products.load_kernels() is None:
        pytest.skip("no compiler here")
    spec, sizes = SPECS["int4"], []
    unpack = Kernels.unpack_part

    def watch(*given: Any, **more: Any) -> None:
        sizes.append(given[5].numel() * given[5].itemsize)
        unpack(*given, **more)

    monkeypatch.setattr(Kernels, "unpack_part", watch)
    monkeypatch.setattr(Kernels, "unpack", None)
    monkeypatch.setattr(panel_products, "_PANEL_BYTES", 1 << 19)
    layer: Any = store_packed(nn.Linear(512, 1024, bias=False), spec)
    layer.take_packed_(pack(1024, 512, spec))
    layer(draw(20, 512).requires_grad_()).sum().backward()
    padding = 4 * 32 * 1024
    assert len(sizes) == 8
    assert max(sizes) <= (1 << 19) + padding < 4 * 1024 * 512 / 3


def test_few_tokens_are_multiplied_in_fp32() -> None:
    """Up to 16 tokens, bf16 results are the rounded fp32 results of the kernels, bit for bit."""
    for spec in SPECS.values():
        matrix, x, bias = pack(37, 192, spec), draw(16, 192, seed=1).bfloat16(), draw(37, seed=2)
        want = multiply_packed(x.float(), matrix, 37, spec, bias)
        assert torch.equal(multiply_packed(x, matrix, 37, spec, bias), want.bfloat16())


def test_bf16_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """If torch multiplies bf16 slowly, and for fp16, the product is in fp32 and rounded once."""
    monkeypatch.setattr(products, "lacks_optimized_product", lambda dtype: True)
    spec = SPECS["int4"]
    matrix = pack(37, 192, spec)
    weight = unpack_matrix(matrix, 37, spec).double()
    layer: Any = store_packed(nn.Linear(192, 37, bias=False), spec)
    layer.take_packed_(matrix)
    for dtype in (torch.bfloat16, torch.float16):
        x = draw(20, 192, seed=1).to(dtype).requires_grad_()
        out = layer(x)
        assert_close(out.double(), x.double() @ weight.t(), rtol=2.0**-8, atol=1e-5)
        exact = out.detach().float() - (x.detach().double() @ weight.t()).float()
        assert exact.abs().max() <= torch.finfo(dtype).eps / 2 * out.abs().max()
        (x_grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
        assert_close(x_grad.double(), weight.sum(0).expand(20, -1), rtol=2.0**-8, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_compiler(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's products with the whole dequantized matrix give nearly the same."""
    spec = SPECS["int4"]
    layer: Any = store_packed(nn.Linear(192, 37), spec)
    layer.take_packed_(pack(37, 192, spec))
    x = draw(20, 192, seed=1).to(dtype).requires_grad_()
    want = layer(x)
    (theirs,) = torch.autograd.grad(want.float().square().sum(), x)
    monkeypatch.setattr(products, "load_kernels", lambda: None)
    monkeypatch.setattr("bmforge.nn.packed_autograd.load_kernels", lambda: None)
    got = layer(x)
    (mine,) = torch.autograd.grad(got.float().square().sum(), x)
    close = 1e-5 if dtype == torch.float32 else 0.02
    assert (got - want).abs().max() <= close * want.abs().max()
    assert (mine - theirs).abs().max() <= close * theirs.abs().max()


def test_autocast_multiplies_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a plain layer; the result and the gradient have the dtype of the input."""
    monkeypatch.setattr(products, "lacks_optimized_product", lambda dtype: False)
    spec = SPECS["int4"]
    layer: Any = store_packed(nn.Linear(192, 37), spec)
    layer.take_packed_(pack(37, 192, spec))
    x = draw(20, 192, seed=1).requires_grad_()
    grad = draw(20, 37, seed=2)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    narrow = x.detach().bfloat16().requires_grad_()
    want = layer(narrow)
    if products.load_kernels() is not None:
        assert torch.equal(out, want.float())
    (mine,) = torch.autograd.grad(out, x, grad)
    (theirs,) = torch.autograd.grad(want, narrow, grad.bfloat16())
    assert mine.dtype == torch.float32
    assert_close(mine, theirs.float(), rtol=0.02, atol=0.02)


def test_second_derivatives() -> None:
    """The gradient of a gradient's norm is that of a plain layer."""
    spec = SPECS["int4"]
    plain = nn.Linear(192, 37)
    layer: Any = store_packed(plain, spec)
    layer.take_packed_(pack(37, 192, spec))
    with torch.no_grad():
        plain.weight.copy_(layer.dense(torch.float32))
    results = []
    for module in (layer, plain):
        x = draw(20, 192, seed=1).requires_grad_()
        (first,) = torch.autograd.grad(module(x).pow(3).sum(), x, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), x)[0])
    assert_close(*results, rtol=1e-4, atol=1e-3 * float(results[1].abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["int4", "int8 of 16"])
def test_gradients_of_experts(name: str, dtype: torch.dtype) -> None:
    """Experts with many, few and no tokens, against plain experts with the dequantized weights."""
    spec = SPECS[name]
    packed: Any = store_packed(Experts(64, MoESpec(4, 2, 96)), spec)
    for key, (_, rows, columns) in packed.stack_sizes().items():
        packed.fill_(key, draw(4, rows, columns, seed=rows))
    x = draw(60, 64, seed=1).to(dtype).requires_grad_()
    ends, grad = torch.tensor([30, 30, 33, 60]), draw(60, 96, seed=2).to(dtype)
    out = packed.multiply("up_proj", x, ends)
    (x_grad,) = torch.autograd.grad(out, x, grad)
    assert out.dtype == x_grad.dtype == dtype
    first = 0
    for expert, last in enumerate(ends.tolist()):
        rows = slice(first, last)
        first = last
        # The three tokens of the third expert are multiplied in fp32 in forward.
        weight = packed.dense("up_proj", dtype)[expert].double()
        forward = packed.plain("up_proj")[expert].double() if last == 33 else weight
        wide = x.detach()[rows].double()
        assert_near(out[rows], wide @ forward.t(), wide.abs() @ weight.abs().t())
        wide = grad[rows].double()
        assert_near(x_grad[rows], wide @ weight, wide.abs() @ weight.abs())
