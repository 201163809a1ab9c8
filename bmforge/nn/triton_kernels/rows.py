"""Triton kernels for rows of activations: quantization, norms, rotation, gates, cache writes."""

from bmforge.nn.triton_kernels.language import jit, tl

__all__ = [
    "add_rms_norm",
    "multiply_by_silu",
    "quantize_rows",
    "rotate_and_store",
    "rotate_heads",
    "store_heads",
]


@jit
def round_half_even(x):
    """Round to the nearest integer, for ``|x| < 2**22``; the interpreter has no libdevice."""
    # Near 1.5 * 2**23 adjacent fp32 numbers differ by 1, so the addition itself rounds.
    return (x + 12582912.0) - 12582912.0


@jit
def quantize_groups(v):
    """Quantize groups (C, BG) in fp32; return integers (C, BG) int32 and scales (C,)."""
    # Bits of non-negative floats are ordered as integers; infinity and NaN are the largest.
    largest_bits = tl.max(tl.abs(v).to(tl.int32, bitcast=True), 1)
    is_finite = largest_bits < 0x7F800000
    largest = tl.where(is_finite, largest_bits, 0).to(tl.float32, bitcast=True)
    # `/` is approximate in Triton; bit-identical results need IEEE division.
    scale = tl.math.div_rn(largest, 127.0)
    # Below the smallest normal number a group counts as zeros, as in `quantize_activations`; 1
    # replaces a divisor that may be 0.
    is_zero = scale < 1.1754943508222875e-38
    inverse = tl.where(is_zero, 0.0, tl.math.div_rn(127.0, tl.where(is_zero, 1.0, largest)))
    v = tl.where(is_finite[:, None], v, 0.0)
    rounded = round_half_even(v * inverse[:, None]).to(tl.int32)
    return rounded, tl.where(is_finite, tl.where(is_zero, 0.0, scale), float("nan"))


@jit
def gate_by_silu(gate, up):
    """Return ``silu(gate) * up`` in their dtype, rounding silu(gate) to it first, as torch does."""
    wide = gate.to(tl.float32)
    activated = tl.math.div_rn(wide, 1.0 + tl.exp(-wide)).to(gate.dtype).to(tl.float32)
    return (activated * up.to(tl.float32)).to(gate.dtype)


@jit
def quantize_rows(
    x, up, values, scales, sums,
    K: tl.constexpr, G: tl.constexpr, BG: tl.constexpr, C: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Quantize activations by groups of columns, bit for bit as `quantize_activations`.

    If GATED, the activations are ``silu(x) * up``, else `up` is not read.

    x and up (T, K) -> values (T, K) int8, scales (T, K/G) fp32, sums of a group's values (T, K/G)
    int32.
    A program computes C groups of one row; BG is G rounded up to a power of two.
    """
    GROUPS: tl.constexpr = K // G
    t = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * C + tl.arange(0, C)
    column = tl.arange(0, BG)
    inside = (g < GROUPS)[:, None] & (column < G)[None, :]
    offset = t * K + g[:, None] * G + column[None, :]
    v = tl.load(x + offset, mask=inside, other=0.0)
    if GATED:
        v = gate_by_silu(v, tl.load(up + offset, mask=inside, other=0.0))
    rounded, scale = quantize_groups(v.to(tl.float32))
    tl.store(values + offset, rounded.to(tl.int8), mask=inside)
    tl.store(scales + t * GROUPS + g, scale, mask=g < GROUPS)
    tl.store(sums + t * GROUPS + g, tl.sum(rounded, 1), mask=g < GROUPS)


@jit
def add_rms_norm(
    x, residual, weight, total, out, scales, sums, eps,
    D: tl.constexpr, BD: tl.constexpr, HAS_RESIDUAL: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Compute ``total = residual + x`` and ``out = weight * total / rms(total)`` per row.

    A program computes one row. The sum is rounded to the dtype of x before its mean square is
    computed, as torch does. If G is not 0, a power of two, the result is quantized in groups of G
    columns like in `quantize_rows`, and `out` is int8.
    """
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    inside = d < D
    v = tl.load(x + t * D + d, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        r = tl.load(residual + t * D + d, mask=inside, other=0.0)
        v = (r.to(tl.float32) + v.to(tl.float32)).to(v.dtype)
        tl.store(total + t * D + d, v, mask=inside)
    wide = v.to(tl.float32)
    mean = tl.sum(wide * wide, 0) / D
    normed = wide * tl.math.div_rn(1.0, tl.sqrt_rn(mean + eps))
    w = tl.load(weight + d, mask=inside, other=0.0)
    # The norm is rounded to the weight's dtype before the product, as in `plain_rms_norm`.
    scaled = (w.to(tl.float32) * normed.to(w.dtype).to(tl.float32)).to(w.dtype)
    if G == 0:
        tl.store(out + t * D + d, scaled, mask=inside)
    else:
        groups = tl.reshape(scaled.to(tl.float32), (BD // G, G))
        rounded, scale = quantize_groups(groups)
        tl.store(out + t * D + d, tl.reshape(rounded, (BD,)).to(tl.int8), mask=inside)
        g = tl.arange(0, BD // G)
        tl.store(scales + t * (D // G) + g, scale, mask=g < D // G)
        tl.store(sums + t * (D // G) + g, tl.sum(rounded, 1), mask=g < D // G)


@jit
def rotate_head(
    x, cos, sin, H: tl.constexpr, BH: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Return one head of a token, (H,) at `x`, with its first R dims rotated."""
    h = tl.arange(0, BH)
    inside, turned = h < H, h < R
    v = tl.load(x + h, mask=inside, other=0.0)
    if INTERLEAVED:
        partner, is_first = h ^ 1, h % 2 == 0
    else:
        is_first = h < R // 2
        partner = tl.where(is_first, h + R // 2, h - R // 2)
    # The partner of a dim is in the registers of another lane, so it is read again.
    other = tl.load(x + partner, mask=turned, other=0.0).to(tl.float32)
    c = tl.load(cos + h, mask=turned, other=0.0).to(tl.float32)
    s = tl.load(sin + h, mask=turned, other=0.0).to(tl.float32)
    along = (v.to(tl.float32) * c).to(v.dtype).to(tl.float32)
    across = (tl.where(is_first, -other, other) * s).to(v.dtype).to(tl.float32)
    return tl.where(turned, (along + across).to(v.dtype), v)


@jit
def rotate_heads(
    x, cos, sin, out,
    N: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate the first R dims of each head (RoPE), with the roundings of torch's operations.

    x (T, N, H), cos and sin (T, R) -> out (T, N, H). A program computes one head of one token.
    """
    t, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    h = tl.arange(0, BH)
    base = (t * N + head) * H
    rotated = rotate_head(x + base, cos + t * R, sin + t * R, H, BH, R, INTERLEAVED)
    tl.store(out + base + h, rotated, mask=h < H)


@jit
def rotate_and_store(
    query, key, value, cos, sin, out, keys, values, pages, offsets,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate queries (T, N, H) like `rotate_heads`; write rotated keys and values to a KV cache.

    For keys and values see `store_heads`. A program computes one head of queries, or one of keys
    and values, of one token.
    """
    t, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    h = tl.arange(0, BH)
    # All lanes of a program take the same branch, so none of them waits.
    if head < N:
        base = (t * N + head) * H
        rotated = rotate_head(query + base, cos + t * R, sin + t * R, H, BH, R, INTERLEAVED)
        tl.store(out + base + h, rotated, mask=h < H)
    else:
        base = (t * K + head - N) * H
        slot = (tl.load(pages + t) * K + head - N) * 16 + tl.load(offsets + t)
        rotated = rotate_head(key + base, cos + t * R, sin + t * R, H, BH, R, INTERLEAVED)
        tl.store(keys + slot * H + h, rotated, mask=h < H)
        copied = tl.load(value + base + h, mask=h < H)
        tl.store(values + slot * H + h, copied, mask=h < H)


@jit
def store_heads(
    key, value, keys, values, pages, offsets,
    K: tl.constexpr, H: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Write the keys and values of T tokens, (T, K, H), to a KV cache, (pages, K, 16, H).

    `pages` and `offsets` are (T,) int64. A program writes one head of one token.
    """
    t, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    h = tl.arange(0, BH)
    inside = h < H
    source = (t * K + head) * H + h
    target = ((tl.load(pages + t) * K + head) * 16 + tl.load(offsets + t)) * H + h
    tl.store(keys + target, tl.load(key + source, mask=inside), mask=inside)
    tl.store(values + target, tl.load(value + source, mask=inside), mask=inside)


@jit(do_not_specialize=["count"])
def multiply_by_silu(gate, up, out, count, B: tl.constexpr):
    """Compute ``out = silu(gate) * up`` for flat tensors of `count` values."""
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = at < count
    g = tl.load(gate + at, mask=inside, other=0.0)
    u = tl.load(up + at, mask=inside, other=0.0)
    tl.store(out + at, gate_by_silu(g, u), mask=inside)
