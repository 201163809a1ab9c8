"""The Triton kernels in Triton's interpreter; `test_triton_numbers.py` runs this in a process.

Only fp32 and fp16: the interpreter truncates fp32 to bf16, and computes bf16 on its raw bits.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.nn import losses
from bmforge.nn.norm import RMSNorm
from bmforge.nn.packing import QuantSpec, pack_matrix, quantize_groups, unpack_matrix
from bmforge.nn.plain_products import multiply_plain, quantize_activations
from bmforge.nn.position import RopeSpec, apply_rope, rope_table
from bmforge.nn.products import load_kernels
from bmforge.nn.triton_kernels import launch as triton_launch
from bmforge.nn.triton_kernels import products as triton_products
from bmforge.nn.triton_kernels.launch import TritonKernels
from bmforge.nn.triton_kernels.load import find_difference, find_loss_difference

assert os.environ["TRITON_INTERPRET"] == "1"
EXAMPLES = int(os.environ["KERNEL_EXAMPLES"])
KERNELS = TritonKernels(emulates=True)
# As on NVIDIA's GPUs before sm_80: no kernel with tensor cores.
PLAIN_KERNELS = replace(KERNELS, has_tensor_cores=False)
draws = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES < 100,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Return True for equal values of one dtype; all NaN are equal."""
    return left.dtype == right.dtype and torch.equal(left.nan_to_num(-7), right.nan_to_num(-7))


def put_specials(x: Tensor, seed: int) -> Tensor:
    """Put NaN, infinity, denormals, zeros and halves into some rows, scaled over many decades."""
    x = x * torch.logspace(-9, 9, len(x))[:, None]
    kinds = [float("nan"), float("inf"), -float("inf"), 1e-41]
    row = seed % len(x)
    x[row, seed % x.shape[1]] = kinds[seed % 4]
    x[(row + 1) % len(x), :32] = 0
    x[(row + 2) % len(x), 32:36] = torch.tensor([127.0, 2.5, 3.5, -0.5])
    return x


@st.composite
def specs(draw: st.DrawFn) -> QuantSpec:
    """Draw a scheme with quantized activations."""
    bits = draw(st.sampled_from([4, 8]))
    group = draw(st.sampled_from([0, 32, 64, 96, 128] + [16] * (bits == 8)))
    symmetric = draw(st.booleans())
    scales = draw(st.sampled_from(["float16", "float32"]))
    try:
        return QuantSpec(bits, group, symmetric, scale_dtype=scales)
    except ConfigError:
        return QuantSpec(bits, group, True, scale_dtype=scales)


@draws
@given(
    spec=specs(),
    blocks=st.integers(1, 3),
    rows=st.sampled_from([1, 16, 37]),
    tokens=st.sampled_from([1, 2, 3, 4, 5, 17]),
    has_bias=st.booleans(),
    is_half=st.booleans(),
    has_tensor_cores=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products_have_the_bits_of_the_cpu(
    spec: QuantSpec,
    blocks: int,
    rows: int,
    tokens: int,
    has_bias: bool,
    is_half: bool,
    has_tensor_cores: bool,
    seed: int,
) -> None:
    """Equal to torch's operations and, with a compiler, to the C++ kernels."""
    columns = 384 * blocks
    matrix = pack_matrix(quantize_groups(random(seed, rows, columns), spec), spec)
    x = put_specials(random(seed + 1, tokens, columns), seed)
    x = x.half() if is_half else x
    bias = random(seed + 2, rows) if has_bias else None
    kernels = KERNELS if has_tensor_cores else PLAIN_KERNELS
    got = kernels.multiply(x, matrix, rows, spec, bias)
    wide = x.float()
    assert same_bits(got, multiply_plain(wide, matrix, rows, spec, bias).to(x.dtype))
    compiled = load_kernels()
    if compiled is not None:
        assert same_bits(got, compiled.multiply(wide, matrix, rows, spec, bias).to(x.dtype))


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "spec",
    [QuantSpec(4, 32), QuantSpec(4, 128, symmetric=False, scale_dtype="float32"), QuantSpec(8, 96)],
    ids=str,
)
def test_joint_products_have_the_bits_of_separate_ones(
    spec: QuantSpec, has_bias: bool, tokens: int
) -> None:
    heights, x = (37, 16, 70), put_specials(random(9, tokens, 384), 2).half()
    factors = [
        (
            pack_matrix(quantize_groups(random(seed, height, 384), spec), spec),
            height,
            random(seed + 5, height).half() if has_bias else None,
        )
        for seed, height in enumerate(heights)
    ]
    kernels = KERNELS if tokens > 1 else PLAIN_KERNELS
    quantized = kernels.quantize(x, spec.group_of(384))
    got = kernels.multiply_quantized(quantized, factors, spec, x.dtype)
    want = [
        multiply_plain(x.float(), m, height, spec, None if b is None else b.float()).half()
        for m, height, b in factors
    ]
    assert all(map(same_bits, got, want))


@draws
@given(
    group=st.sampled_from([16, 32, 96, 128, 384]),
    tokens=st.integers(1, 5),
    seed=st.integers(0, 99),
    is_half=st.booleans(),
)
def test_quantized_activations_have_the_bits_of_the_cpu(
    group: int, tokens: int, seed: int, is_half: bool
) -> None:
    x = put_specials(random(seed, tokens, 384), seed)
    x = x.half() if is_half else x
    values, scales, sums = KERNELS.quantize(x, group)
    want_values, want_scales = quantize_activations(x.float(), group)
    assert torch.equal(values, want_values)
    assert same_bits(scales, want_scales)
    assert torch.equal(sums, want_values.view(tokens, -1, group).sum(-1, dtype=torch.int32))
    up = put_specials(random(seed + 1, tokens, 384), seed + 3).to(x.dtype)
    gated, apart = KERNELS.quantize(x, group, up), KERNELS.multiply_by_silu(x, up)
    assert all(map(same_bits, gated, KERNELS.quantize(apart, group)))


@draws
@given(spec=specs(), rows=st.sampled_from([1, 16, 37]), seed=st.integers(0, 99))
def test_dequantized_matrices_have_the_bits_of_the_cpu(
    spec: QuantSpec, rows: int, seed: int
) -> None:
    matrix = pack_matrix(quantize_groups(random(seed, rows, 384), spec), spec)
    want = unpack_matrix(matrix, rows, spec)
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(KERNELS.dequantize(matrix, rows, spec, dtype), want.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [64, 100, 768])
@pytest.mark.parametrize("has_residual", [False, True])
def test_norms_are_those_of_the_module(dtype: torch.dtype, width: int, has_residual: bool) -> None:
    norm = RMSNorm(width, 1e-5).to(dtype)
    norm.weight.data = random(0, width).to(dtype)
    x, residual = random(1, 3, 2, width).to(dtype), random(2, 3, 2, width).to(dtype)
    want_total = residual + x if has_residual else x
    wide = want_total.double()
    exact = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight.double()
    total, out = KERNELS.add_rms_norm(x, residual if has_residual else None, norm.weight, 1e-5)
    assert torch.equal(total, want_total)
    assert out.dtype == dtype
    ratio = {torch.float32: 1e-6, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(out.double(), exact, rtol=ratio, atol=1e-6)
    torch.testing.assert_close(out, norm(want_total), rtol=ratio, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("group", [32, 128])
def test_quantized_norms_equal_two_kernels(
    dtype: torch.dtype, has_residual: bool, group: int
) -> None:
    x, weight = random(1, 3, 384).to(dtype), random(0, 384).to(dtype)
    x[1, 5] = float("nan")
    residual = random(2, 3, 384).to(dtype) if has_residual else None
    total, *got = KERNELS.quantize_norm(x, residual, weight, 1e-5, group)
    want_total, normed = KERNELS.add_rms_norm(x, residual, weight, 1e-5)
    assert same_bits(total, want_total)
    for left, right in zip(got, KERNELS.quantize(normed, group), strict=True):
        assert same_bits(left, right)


@draws
@given(
    tokens=st.integers(1, 4),
    heads=st.sampled_from([1, 3]),
    width=st.sampled_from([16, 80, 128]),
    share=st.sampled_from([1, 2, 4]),
    is_interleaved=st.booleans(),
    is_half=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rotated_heads_have_the_bits_of_torch(
    tokens: int,
    heads: int,
    width: int,
    share: int,
    is_interleaved: bool,
    is_half: bool,
    seed: int,
) -> None:
    dtype = torch.float16 if is_half else torch.float32
    spec = RopeSpec(width // share, interleaved=is_interleaved)
    positions = torch.arange(seed, seed + tokens)[None]
    cos, sin = rope_table(spec, positions, dtype)
    x = random(seed, tokens, heads, width).to(dtype)
    got = KERNELS.rotate(x, cos[0, 0], sin[0, 0], is_interleaved)
    want = apply_rope(x.transpose(0, 1)[None], (cos, sin), is_interleaved)
    assert torch.equal(got, want[0].transpose(0, 1))


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rotation_and_storage_in_one_kernel_equal_two(
    dtype: torch.dtype, is_interleaved: bool
) -> None:
    query, key, value = (random(n, 5, (3, 2, 2)[n], 80).to(dtype) for n in range(3))
    slots = torch.tensor([6, 0, 6, 2, 2]), torch.tensor([0, 15, 7, 3, 4])
    cos, sin = random(3, 5, 40).to(dtype), random(4, 5, 40).to(dtype)
    want, got = ([torch.zeros(7, 2, 16, 80, dtype=dtype) for _ in range(2)] for _ in range(2))
    KERNELS.store((KERNELS.rotate(key, cos, sin, is_interleaved), value), tuple(want), slots)
    rotated = KERNELS.rotate_and_store(
        (query, key, value), (cos, sin, is_interleaved), tuple(got), slots
    )
    assert torch.equal(rotated, KERNELS.rotate(query, cos, sin, is_interleaved))
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [16, 80])
def test_keys_and_values_are_written_to_their_places(dtype: torch.dtype, width: int) -> None:
    key, value = random(0, 5, 3, width).to(dtype), random(1, 5, 3, width).to(dtype)
    place = torch.tensor([6, 0, 6, 2, 2]), torch.tensor([0, 15, 7, 3, 4])
    stored = torch.zeros(7, 3, 16, width, dtype=dtype), torch.ones(7, 3, 16, width, dtype=dtype)
    want = [pages.clone() for pages in stored]
    for pages, new in zip(want, (key, value), strict=True):
        pages[place[0], :, place[1]] = new
    KERNELS.store((key, value), stored, place)
    assert torch.equal(stored[0], want[0])
    assert torch.equal(stored[1], want[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [5, 1024, 1500])
def test_gates_are_those_of_torch(dtype: torch.dtype, width: int) -> None:
    gate, up = (10 * random(seed, 3, width).to(dtype) for seed in (0, 1))
    gate[0, 0], gate[1, 1] = -200, 60000
    got = KERNELS.multiply_by_silu(gate, up)
    limit = 1e-6 if dtype == torch.float32 else 1e-3
    torch.testing.assert_close(got, F.silu(gate) * up, rtol=limit, atol=1e-7)


@draws
@given(
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 3, 8]),
    width=st.sampled_from([16, 80, 128]),
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    window=st.sampled_from([None, 1, 16, 40, 500]),
    kind=st.sampled_from(["fp32", "fp16", "int8", "int8 of fp16"]),
    seed=st.integers(0, 99),
)
def test_paged_attention_is_exact_attention(
    kv_heads: int,
    group: int,
    width: int,
    lengths: list[int],
    window: int | None,
    kind: str,
    seed: int,
) -> None:
    """Against attention in fp64 over the tokens of each sequence."""
    dtype = torch.float16 if kind.endswith("fp16") else torch.float32
    tables, count = make_tables(lengths, seed)
    shape = (count, kv_heads, 16, width)
    keys, values = random(seed, *shape).to(dtype), random(seed + 1, *shape).to(dtype)
    scales = None
    if kind.startswith("int8"):
        keys, key_scales = quantize_activations(keys.float(), width)
        values, value_scales = quantize_activations(values.float(), width)
        scales = key_scales[..., 0], value_scales[..., 0]
    spoil_unwritten(keys if scales is None else scales[0], tables, lengths)
    spoil_unwritten(values if scales is None else scales[1], tables, lengths)
    query = random(seed + 2, len(lengths), kv_heads * group, width).to(dtype)
    ends = torch.tensor(lengths, dtype=torch.int32)
    got = KERNELS.attend(query, (keys, values), scales, tables, ends, width**-0.5, window)
    for number, length in enumerate(lengths):
        shown = slice(max(0, length - window) if window else 0, length)
        pages = tables[number, : -(-length // 16)].long()
        k, v = (
            (t[pages].double() * (1 if s is None else s[pages][..., None].double()))
            .transpose(0, 1)
            .flatten(1, 2)[:, shown]
            .repeat_interleave(group, 0)
            for t, s in zip((keys, values), scales or (None, None), strict=True)
        )
        scores = (query[number].double()[:, None] @ k.transpose(1, 2)) * width**-0.5
        want = (scores.softmax(-1) @ v)[:, 0]
        limit = 2e-6 if dtype == torch.float32 else 2e-3
        torch.testing.assert_close(got[number].double(), want, rtol=limit, atol=limit)


def spoil_unwritten(pages: Tensor, tables: Tensor, lengths: list[int]) -> None:
    """Put NaN behind the last token of each sequence, and into pages of no sequence."""
    written = torch.zeros(pages.shape[0], 16, dtype=torch.bool)
    for table, length in zip(tables.long(), lengths, strict=True):
        position = torch.arange(length)
        written[table[position // 16], position % 16] = True
    pages.transpose(1, 2)[~written] = float("nan")


def make_tables(lengths: list[int], seed: int) -> tuple[Tensor, int]:
    """Return page tables of random pages, and the number of pages."""
    counts = [-(-length // 16) for length in lengths]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(seed))
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for number, pages in enumerate(order[: sum(counts)].split(counts)):
        tables[number, : len(pages)] = pages
    return tables, len(order)


@triton.jit
def add_as_tree(total, terms, C: tl.constexpr):
    """Add the columns of terms in another order than the CPU."""
    return total + tl.sum(terms, 1)


def test_the_check_of_a_device_finds_another_order_of_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = torch.device("cpu")
    assert find_difference(KERNELS, host) == find_loss_difference(KERNELS, host) == ""
    monkeypatch.setattr(triton_products, "add_in_order", add_as_tree)
    assert "differs from the CPU's" in find_difference(KERNELS, host)


def test_the_check_of_a_device_compares_parts_that_are_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def keep_last(part, stats, out, parts, *sizes, **options):
        stats[:, :, : parts - 1, :, 0] = float("-inf")
        join[grid](part, stats, out, parts, *sizes, **options)

    grid, join = (2, 2), triton_launch.join_parts
    monkeypatch.setattr(triton_launch, "join_parts", {grid: keep_last})
    assert find_difference(KERNELS, torch.device("cpu")) == (
        "paged attention differs from the CPU's result"
    )


def test_the_check_of_a_device_reports_a_kernel_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(TritonKernels, "attend", fail)
    assert find_difference(KERNELS, torch.device("cpu")) == (
        "a kernel failed (RuntimeError: no kernel image"
    )


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [64, 128])
def test_product_with_one_group_in_a_row(group, symmetric):
    spec = QuantSpec(4, group, symmetric=symmetric)
    matrix = pack_matrix(quantize_groups(random(0, 19, group), spec), spec)
    for tokens in (1, 17):
        x = random(tokens, tokens, group)
        want = multiply_plain(x, matrix, 19, spec, None)
        assert same_bits(KERNELS.multiply(x, matrix, 19, spec, None), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("columns", [1, 37, 4096, 5000])
@pytest.mark.parametrize("factor", [None, 0.25])
def test_losses_and_gradients_of_logits(
    dtype: torch.dtype, columns: int, factor: float | None
) -> None:
    """Equal to torch's in fp64, for rows with a gap between them, large and infinite logits."""
    buffer = random(0, 5, columns + 3) * torch.tensor([1.0, 100.0, 1e-3, 1.0, 1.0])[:, None]
    logits = buffer.to(dtype)[:, :columns]
    if columns > 2:
        logits[3, 1:] = -float("inf")
        logits[4, 0] = float("nan")  # in a row without a label
    labels = torch.tensor([0, columns - 1, columns // 2, 0, -100])
    exact = logits.double().requires_grad_()
    with torch.enable_grad():
        want = F.cross_entropy(exact, labels, reduction="none")
        want[:4].sum().backward()
    tile = logits.clone()
    scale = None if factor is None else torch.tensor(factor)
    got = KERNELS.cross_entropy_(tile, labels, scale, has_gradient=False)
    assert same_bits(tile, logits)
    torch.testing.assert_close(got.double(), want.nan_to_num(0.0), rtol=1e-5, atol=1e-5)
    assert torch.equal(got, KERNELS.cross_entropy_(tile, labels, scale, has_gradient=True))
    assert exact.grad is not None
    slope = exact.grad.nan_to_num(0.0) * (1.0 if factor is None else factor)
    limit = 1e-6 if dtype == torch.float32 else 1e-3
    torch.testing.assert_close(tile.double(), slope, rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("vocab", [64, 101])
@pytest.mark.parametrize("has_more", [False, True])
def test_the_linear_cross_entropy_with_the_kernel(
    dtype: torch.dtype, vocab: int, has_more: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and all gradients are those of torch's operations, also if the head is padded."""
    labels = torch.randint(vocab, (23,), generator=torch.Generator().manual_seed(1))
    labels[::4] = -100

    def run() -> list[Tensor]:
        inputs = [random(0, 23, 16), random(1, vocab, 16)]
        if has_more:
            inputs += [random(2, vocab), random(3, 23, 2), random(4, vocab, 2)]
        inputs = [t.to(dtype).requires_grad_() for t in inputs]
        hidden, weight, bias, *pair = (*inputs, *(() if has_more else (None,)))
        with torch.enable_grad():
            loss = losses.linear_cross_entropy(
                hidden, weight, labels, bias, 7.0, added=[tuple(pair)] if pair else ()
            )
            (loss * 3).backward()
        return [loss.detach(), *(t.grad for t in inputs)]

    want = run()
    monkeypatch.setattr(losses, "find_loss_kernels", lambda *_: KERNELS)
    monkeypatch.setattr(losses, "_HOST_CHUNK_ELEMENTS", 8 * vocab)
    monkeypatch.setattr(losses, "_FEW_TOKENS", 1)
    limit = 1e-5 if dtype == torch.float32 else 4e-3
    for got, expected in zip(run(), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=limit, atol=limit)


def plain_checksum(tensors: list[Tensor], steps: list[int]) -> int:
    """The sum modulo 2**64 in Python, of 8-byte words or, if they do not fit, of bytes."""
    mask, total = (1 << 64) - 1, 0
    for number, (tensor, step) in enumerate(zip(tensors, steps, strict=True)):
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        size = 1 if len(data) % 8 else 8
        words = [int.from_bytes(data[n : n + size], "little") for n in range(0, len(data), size)]
        for i, word in enumerate(words[::step]):
            mixed = ((i + (number << 40) + 1) * 0x9E3779B97F4A7C15) & mask
            mixed ^= ((mixed - (mixed >> 63 << 64)) >> 30) & mask  # an arithmetic shift
            mixed = (mixed * 0xBF58476D1CE4E5B9) & mask
            mixed ^= ((mixed - (mixed >> 63 << 64)) >> 27) & mask
            total += word * (mixed | 1)
    return total & mask


def test_the_checksum_of_tensors() -> None:
    tensors = [random(0, 70, 64), random(1, 3).half(), random(2, 130, 65)]
    for steps in ([1, 1, 1], [71, 1, 133]):
        got = int(KERNELS.checksum(tensors, steps)) & ((1 << 64) - 1)
        assert got == plain_checksum(tensors, steps)
    before = int(KERNELS.checksum(tensors, [1, 1, 1]))
    tensors[0][[3, 5]] = tensors[0][[5, 3]]
    assert int(KERNELS.checksum(tensors, [1, 1, 1])) != before
