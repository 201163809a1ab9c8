"""Every variant of the kernels that this machine runs, against plain torch and each other."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from bmforge.errors import ConfigError
from bmforge.native import processor_features
from bmforge.nn import plain_products, product_kernels, products, quantized
from bmforge.nn.linear import Linear
from bmforge.nn.packing import PackedMatrix, QuantSpec, pack_matrix, quantize_groups, unpack_matrix
from bmforge.nn.plain_products import multiply_plain, multiply_rows_plain, quantize_activations
from bmforge.nn.products import (
    Kernels,
    load_variant,
    multiply_packed,
    pack_weights,
    runnable_variants,
)
from bmforge.nn.quantized import pick_packed, store_packed
from bmforge.testing.tolerance import assert_close

SPECS = {
    "int8": QuantSpec(8, 32),
    "int8 of 16": QuantSpec(8, 16, scale_dtype="float32"),
    "int8 minima": QuantSpec(8, 64, symmetric=False, scale_dtype="float32"),
    "int8-dynamic": QuantSpec(8, 0, scale_dtype="float32"),
    "int4": QuantSpec(4, 32),
    "int4-128": QuantSpec(4, 128),
    "int4 rows": QuantSpec(4, 0, scale_dtype="float32"),
    "int4 minima": QuantSpec(4, 32, symmetric=False),
}


@pytest.fixture(params=runnable_variants())
def kernels(request: pytest.FixtureRequest) -> Kernels:
    found = load_variant(request.param)
    if found is None:
        pytest.skip("no compiler here")
    return found


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed(rows: int, columns: int, spec: QuantSpec) -> PackedMatrix:
    return pack_matrix(quantize_groups(draw(rows, columns), spec), spec)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("rows", [5, 16, 83])
def test_the_bits_of_plain_torch(kernels: Kernels, spec: QuantSpec, rows: int) -> None:
    """One to many tokens: every number of them has a way of its own through the kernel."""
    matrix, x, bias = packed(rows, 384, spec), draw(19, 384, seed=1), draw(rows, seed=2)
    want = multiply_plain(x, matrix, rows, spec, bias)
    for tokens in (0, 1, 2, 3, 5, 6, 7, 12, 19):
        got = kernels.multiply(x[:tokens], matrix, rows, spec, bias)
        assert torch.equal(got, want[:tokens])
    assert torch.equal(kernels.unpack(matrix, rows, spec), unpack_matrix(matrix, rows, spec))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_product_that_was_meant(spec: QuantSpec) -> None:
    """Against the dequantised matrix in float64: what is left is the activations' rounding."""
    matrix, x = packed(83, 384, spec), draw(19, 384, seed=1)
    dense = unpack_matrix(matrix, 83, spec).double()
    exact = x.double() @ dense.t()
    got = multiply_plain(x, matrix, 83, spec, None)
    group = spec.group_of(384)
    steps = x.view(19, -1, group).abs().amax(-1).repeat_interleave(group, 1).double() / 127
    bound = 0.5001 * steps @ dense.abs().t()  # every activation is off by half a step at most
    assert ((got - exact).abs() <= bound + 1e-4).all()
    assert torch.nn.functional.cosine_similarity(got.double(), exact).min() > 0.9995


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_activations_as_they_are(kernels: Kernels, spec: QuantSpec) -> None:
    """Columns of a group one after the other, groups one after the other: every variant's bits."""
    spec = replace(spec, activations="float")
    rows, columns = 21, 256
    matrix, x = packed(rows, columns, spec), draw(6, columns, seed=1)
    group = spec.group_of(columns)
    plain = replace(spec, symmetric=True)
    values = unpack_matrix(
        matrix._replace(minima=None, scales=torch.ones_like(matrix.scales)),
        rows,
        spec if spec.symmetric else replace(plain, symmetric=False),
    )
    scales, minima = (
        None if t is None else t.float().transpose(1, 2).flatten(0, 1)[:rows]
        for t in (matrix.scales, matrix.minima)
    )
    want = torch.zeros(6, rows)
    for g in range(columns // group):
        sums, totals = torch.zeros(6, rows), torch.zeros(6, 1)
        for c in range(g * group, (g + 1) * group):
            sums += x[:, c, None] * values[:, c]
            totals += x[:, c, None]
        want += sums * scales[:, g]
        if minima is not None:
            want += totals * minima[:, g]
    for tokens in (1, 3, 4, 6):
        assert torch.equal(kernels.multiply(x[:tokens], matrix, rows, spec, None), want[:tokens])
    assert_close(want, x @ unpack_matrix(matrix, rows, spec).t(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("spec", [s for s in SPECS.values() if s.symmetric], ids=lambda s: str(s))
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_packing_has_the_bits_of_torch(kernels: Kernels, spec: QuantSpec, rows: int) -> None:
    """Ties between values, zeros, and sizes from the smallest to the largest."""
    matrix = draw(rows, 384) * torch.logspace(-40, 4, 384)
    matrix[0, :64] = torch.arange(64) * 0.5 - 16
    matrix[0, 64:128] = 0
    matrix[-1, 128:160] = torch.tensor([-2.0, 2.0]).repeat(16)
    want = pack_matrix(quantize_groups(matrix, spec), spec)
    packed, scales = kernels.pack(matrix, spec)
    assert torch.equal(packed, want.packed)
    assert torch.equal(scales.to(spec.scale_type), want.scales)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e9])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_weights_that_no_scale_holds(value: float, name: str) -> None:
    matrix = draw(40, 64)
    matrix[37, 50] = value
    with pytest.raises(ConfigError, match="not finite or are too large"):
        pack_weights(matrix, SPECS[name])
    assert torch.equal(
        pack_weights(draw(40, 64).bfloat16(), SPECS[name]).packed,
        pack_matrix(quantize_groups(draw(40, 64).bfloat16(), SPECS[name]), SPECS[name]).packed,
    )


@pytest.mark.parametrize("group", [16, 32, 384])
def test_quantised_activations(kernels: Kernels, group: int) -> None:
    """Ties, tiny and huge values, zeros, and what is not finite."""
    x = draw(7, 384) * torch.logspace(-44, 38, 384)
    x[1] = 0
    x[2, :64] = torch.arange(64) + 0.5
    x[2, 64] = 127
    x[3, 5], x[4, 7], x[5, 9] = math.nan, math.inf, -math.inf
    values, scales, sums = kernels.quantize(x, group)
    want, want_scales = quantize_activations(x, group)
    assert torch.equal(values, want)
    assert torch.equal(scales.nan_to_num(-1.0), want_scales.nan_to_num(-1.0))
    assert torch.equal(sums, want.view(7, -1, group).sum(-1, dtype=torch.int32))
    assert scales[3:6, 0].isnan().all()
    assert not values[1].any()


def test_values_next_to_a_half_round_alike(kernels: Kernels) -> None:
    """Of a million values some are so close to n + 1/2 that another inverse rounds them up."""
    x = torch.randn(32768, 32, generator=torch.Generator().manual_seed(0))
    values, scales, _ = kernels.quantize(x, 32)
    want, want_scales = quantize_activations(x, 32)
    assert torch.equal(values, want)
    assert torch.equal(scales, want_scales)
    array = x.numpy()
    inverse = np.float32(127) / np.abs(array).max(1, keepdims=True)
    assert np.array_equal(want.numpy(), np.rint(array * inverse).astype(np.int8))


@pytest.mark.parametrize("spec", [SPECS["int8"], SPECS["int4"]], ids=["int8", "int4"])
def test_what_is_not_finite_stays_visible(kernels: Kernels, spec: QuantSpec) -> None:
    """In every result of its token, and in no other's."""
    x = draw(3, 64)
    x[1, 40] = math.inf
    got = kernels.multiply(x, packed(20, 64, spec), 20, spec, None)
    assert got[1].isnan().all()
    assert got[[0, 2]].isfinite().all()


@pytest.mark.parametrize("name", ["int8", "int8-dynamic", "int4"])
def test_the_same_bits_on_several_threads(kernels: Kernels, name: str) -> None:
    """Large enough that work is divided."""
    spec, before = SPECS[name], torch.get_num_threads()
    matrix, x = packed(330, 768, spec), draw(300, 768)
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(kernels.multiply(x, matrix, 330, spec, None))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    alone = kernels.multiply(x[150:151], matrix, 330, spec, None)
    assert torch.equal(alone, found[0][150:151])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1, 48, 64, 200, 2048, 5533, 9001, 20001])
def test_plain_weights(kernels: Kernels, dtype: torch.dtype, columns: int) -> None:
    """One to many tokens on one to three threads have one order of summation, and its bits."""
    weight, x = draw(133, columns).to(dtype), draw(11, columns, seed=1)
    want = multiply_rows_plain(x, weight)
    exact, rounding = x.double() @ weight.double().t(), 1e-4 + 2e-8 * columns
    assert_close(want.double(), exact, rtol=1e-5, atol=rounding)
    before = torch.get_num_threads()
    try:
        for threads, tokens in ((1, 1), (2, 1), (1, 2), (3, 3), (1, 4), (2, 11)):
            torch.set_num_threads(threads)
            assert torch.equal(kernels.multiply_rows(x[:tokens], weight), want[:tokens])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_few_tokens_of_plain_weights(dtype: torch.dtype, has_bias: bool) -> None:
    """A few tokens are rounded once, from a product in fp32."""
    weight, x = draw(133, 200).to(dtype), draw(2, 3, 200, seed=1).to(dtype)
    bias = draw(133, seed=2).to(dtype) if has_bias else None
    if products.load_kernels() is None:
        pytest.skip("no compiler here")
    layer = Linear(200, 133, bias=has_bias, dtype=dtype)
    layer.load_state_dict({"weight": weight} | ({"bias": bias} if has_bias else {}))
    with torch.no_grad():
        got = products.multiply_dense(x, weight, bias)
        assert got is not None
        want = multiply_rows_plain(x.float().flatten(0, 1), weight)
        want = want if bias is None else want + bias.float()
        assert torch.equal(got, want.view(2, 3, 133).to(dtype))
        assert torch.equal(layer(x), got)
        apart = x.transpose(0, 1).contiguous().transpose(0, 1)  # not contiguous
        assert torch.equal(layer(apart), got)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            layer(x.flatten()[:600].view(6, 100))
        with FlopCounterMode(display=False) as counter:  # what counts operations sees them
            layer(x)
        assert counter.get_total_flops() == 2 * 6 * 200 * 133
        rounding = 1e-5 if dtype == torch.float32 else 0.02
        assert_close(torch.func.vmap(layer)(x), got, rtol=rounding, atol=5 * rounding)
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, x))).tangent
        assert torch.equal(tangent, F.linear(x, weight))
    assert products.multiply_dense(x, weight, bias) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_many_tokens_of_plain_weights(
    dtype: torch.dtype, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where torch is slow at halves they are multiplied in fp32 and rounded once; else by torch."""
    weight, x = draw(133, 200).to(dtype), draw(9, 6, 200, seed=1).to(dtype)
    bias = draw(133, seed=2).to(dtype) if has_bias else None
    layer = Linear(200, 133, bias=has_bias, dtype=dtype)
    layer.load_state_dict({"weight": weight} | ({"bias": bias} if bias is not None else {}))
    want = x.double() @ weight.double().t()
    want = want if bias is None else want + bias.double()
    rounding = torch.finfo(dtype).eps / 2
    # Sums of 200 products of about 1: libraries add them in different orders.
    atol = 1e-4
    with torch.no_grad():
        monkeypatch.setattr(products, "lacks_optimized_product", lambda dtype: False)
        assert products.multiply_dense(x, weight, bias) is None
        assert torch.equal(layer(x), F.linear(x, weight, bias))
        monkeypatch.setattr(
            products, "lacks_optimized_product", lambda dtype: dtype != torch.float32
        )
        got = layer(x)
        assert got.dtype == dtype
        assert got.shape == (9, 6, 133)
        assert_close(got.double(), want, rtol=1.01 * rounding, atol=atol)
        turned = layer(x.transpose(0, 1)).transpose(0, 1)  # not contiguous
        assert_close(turned.double(), want, rtol=1.01 * rounding, atol=atol)
        assert (products.multiply_dense(x, weight, bias) is None) == (dtype == torch.float32)
        for numbers in (1, 200 * 50):  # a row at a time, and a last panel of 33
            monkeypatch.setattr(products, "_PANEL_NUMBERS", numbers)
            assert_close(layer(x).double(), want, rtol=1.01 * rounding, atol=atol)
        monkeypatch.setattr(products, "load_kernels", lambda: None)  # a few, without a compiler
        assert_close(layer(x[0, :2]).double(), want[0, :2], rtol=1.01 * rounding, atol=atol)
    assert products.multiply_dense(x, weight, bias) is None


def test_what_torch_is_slow_at() -> None:
    """As torch's library says of this processor; never numbers that are not halves."""
    asked = torch.ops.mkldnn
    assert products.lacks_optimized_product(torch.float16) == (
        not asked._is_mkldnn_fp16_supported()
    )
    assert products.lacks_optimized_product(torch.bfloat16) == (
        not asked._is_mkldnn_bf16_supported()
    )
    assert not products.lacks_optimized_product(torch.float32)


def test_the_widest_row(kernels: Kernels) -> None:
    """The largest sums that one scale allows do not leave 32 bits."""
    spec = QuantSpec(8, 0, scale_dtype="float32")
    matrix = pack_matrix(quantize_groups(torch.full((2, 1 << 17), -1.0), spec), spec)
    x = torch.ones(1, 1 << 17)
    want = multiply_plain(x, matrix, 2, spec, None)
    assert_close(want, torch.full((1, 2), -float(1 << 17)))
    assert torch.equal(kernels.multiply(x, matrix, 2, spec, None), want)


def test_torch_takes_over_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "load_kernels", lambda: None)
    spec = SPECS["int4"]
    matrix, x = packed(20, 64, spec), draw(3, 64)
    want = multiply_plain(x, matrix, 20, spec, None)
    assert torch.equal(multiply_packed(x, matrix, 20, spec), want)
    assert torch.equal(products.dequantize(matrix, 20, spec), unpack_matrix(matrix, 20, spec))


def test_kernels_with_other_bits_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    load_variant.cache_clear()
    monkeypatch.setattr(plain_products, "multiply_plain", lambda x, *rest: x.new_zeros(1, 37))
    try:
        assert load_variant("plain") is None
    finally:
        load_variant.cache_clear()


def test_variants_are_what_the_processor_has() -> None:
    found = runnable_variants()
    assert found[-1] == "plain"
    assert ("avx2" in found) == ({"avx2", "f16c"} <= processor_features())


@pytest.mark.parametrize("family", ["25", "26"])
def test_what_a_processor_likes_changes_no_bits(
    family: str, monkeypatch: pytest.MonkeyPatch, kernels: Kernels
) -> None:
    fields = {"vendor_id": "AuthenticAMD", "cpu family": family}
    monkeypatch.setattr(product_kernels, "processor_field", lambda name: fields[name])
    assert product_kernels._measured_flags() == (["-DAHEAD_BYTES=256"] if family == "25" else [])
    other = product_kernels.compile_variant(kernels.name)
    assert other is not None
    matrix, x = packed(40, 256, SPECS["int8"]), draw(3, 256)
    given = (x, matrix, 40, SPECS["int8"], None)
    assert torch.equal(other.multiply(*given), kernels.multiply(*given))
    assert torch.equal(other.multiply_rows(x, x), kernels.multiply_rows(x, x))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_rows_by_their_numbers(kernels: Kernels, spec: QuantSpec) -> None:
    matrix = packed(37, 256, spec)
    index = torch.tensor([36, 0, 17, 17, 5])
    want = unpack_matrix(matrix, 37, spec)
    picked = kernels.pick(matrix, index, 37, spec)
    assert picked is not None
    assert torch.equal(picked, want[index])
    for number in (37, -1):  # in the panel's last rows, or before the first
        assert kernels.pick(matrix, torch.tensor([0, number]), 37, spec) is None
    pairs = torch.stack((index, index.flip(0)), 1)
    assert torch.equal(pick_packed(pairs, matrix, 37, spec), want[pairs])
    assert torch.equal(pick_packed(pairs.t(), matrix, 37, spec), want[pairs.t()])
    assert torch.equal(pick_packed(index.int(), matrix, 37, spec), want[index])
    assert pick_packed(index[:0], matrix, 37, spec).shape == (0, 256)
    assert torch.equal(pick_packed(index[::2], matrix, 37, spec), want[index[::2]])


@pytest.mark.parametrize("number", [37, 47, 99, -1, -48])  # panels end with row 47
@pytest.mark.parametrize("has_kernels", [True, False])
def test_rows_that_are_not_there(
    number: int, has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernels:
        monkeypatch.setattr(quantized, "load_kernels", lambda: None)
    spec = SPECS["int4"]
    matrix = packed(37, 256, spec)
    with pytest.raises(IndexError, match=r"allowed: 0 to 36"):
        pick_packed(torch.tensor([0, number]), matrix, 37, spec)
    assert pick_packed(torch.tensor([[36]]), matrix, 37, spec).shape == (1, 1, 256)


def test_what_holds_no_numbers_is_not_read() -> None:
    """A tensor whose memory is elsewhere is torch's to refuse, or to resolve."""
    spec = SPECS["int8"]
    matrix, x = packed(37, 256, spec), draw(2, 256)
    layer = store_packed(torch.nn.Linear(256, 37), spec)
    layer.take_packed_(matrix)
    want = layer(x)
    assert torch.equal(layer(torch._neg_view(-x)), want)
    with FakeTensorMode() as mode:
        mode.allow_non_fake_inputs = True
        fake = torch.empty(2, 256)
    assert not products.are_plain_cpu_tensors(fake)
    assert not products.are_plain_cpu_tensors(torch.empty(2, 256, device="meta"))
    assert layer(torch.empty(2, 256, device="meta")).shape == (2, 37)
    with torch.profiler.profile() as profile, torch.no_grad():
        layer(x)
    assert any("multiply_packed" in event.key for event in profile.key_averages())


def test_another_default_dtype_changes_nothing() -> None:
    spec, index = SPECS["int8"], torch.tensor([3, 5])
    matrix, x = packed(37, 256, spec), draw(2, 256)
    want = pick_packed(index, matrix, 37, spec), multiply_packed(x, matrix, 37, spec)
    torch.set_default_dtype(torch.float64)
    try:
        found = pick_packed(index, matrix, 37, spec), multiply_packed(x, matrix, 37, spec)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(found, want, strict=True))
