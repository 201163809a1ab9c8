"""Triton kernel for the products of several packed matrices with the same activations.

One launch instead of three costs less, and its programs fill a GPU that the rows of a small matrix
(keys or values with grouped queries) do not fill.
"""

from bmforge.nn.triton_kernels.language import jit, tl
from bmforge.nn.triton_kernels.products import multiply_few, multiply_tiles, multiply_wide_groups

__all__ = ["multiply_matrices"]


@jit
def multiply_panels(
    packed, scales, minima, bias, values, value_scales, sums, panel, t, tokens, rows,
    KIND: tl.constexpr, K: tl.constexpr, T: tl.constexpr, BITS: tl.constexpr, G: tl.constexpr,
    PLAIN: tl.constexpr, HAS_BIAS: tl.constexpr, PAIRS: tl.constexpr, EMULATE: tl.constexpr,
    STAGES: tl.constexpr, C: tl.constexpr, Q: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Multiply tokens `t` by Q panels of 16 rows and add the bias; return (T, 16 * Q) in fp32."""
    # Tokens after the last read the last token, so that no load needs a mask; they are not stored.
    at = tl.minimum(t, tokens - 1)
    if KIND == "few":
        total = multiply_few(
            packed, scales, minima, values, value_scales, sums, panel, at,
            K, T, BITS, G, PLAIN, PAIRS, EMULATE, STAGES, C,
        )  # fmt: skip
    elif KIND == "tiles":
        total = multiply_tiles(
            packed, scales, minima, values, value_scales, sums, panel, at, (rows + 15) // 16,
            K, T, BITS, G, PLAIN, PAIRS, STAGES, C, Q, FULL,
        )  # fmt: skip
    else:
        total = multiply_wide_groups(
            packed, scales, minima, values, value_scales, sums, panel, at,
            K, T, BITS, G, PLAIN, EMULATE, STAGES, C,
        )  # fmt: skip
    if HAS_BIAS:
        row = panel * 16 + tl.arange(0, 16 * Q)
        total = total + tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)[None, :]
    return total


@jit
def select_operand(number, first, second, third, COUNT: tl.constexpr):
    """Return `first`, `second` or `third` for the numbers 0, 1 and 2, which are below COUNT."""
    # Which matrix a program reads is known at run time only, so pointers are selected by value.
    if COUNT > 1:
        first = tl.where(number == 1, second, first)
    if COUNT > 2:
        first = tl.where(number == 2, third, first)
    return first


@jit
def multiply_matrices(
    packed, scales, minima, bias, out, packed1, scales1, minima1, bias1, out1,
    packed2, scales2, minima2, bias2, out2, values, value_scales, sums, tokens,
    N: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, COUNT: tl.constexpr,
    KIND: tl.constexpr, K: tl.constexpr, T: tl.constexpr, BITS: tl.constexpr, G: tl.constexpr,
    PLAIN: tl.constexpr, HAS_BIAS: tl.constexpr, PAIRS: tl.constexpr, EMULATE: tl.constexpr,
    STAGES: tl.constexpr, C: tl.constexpr, Q: tl.constexpr,
):  # fmt: skip
    """Multiply quantized activations by COUNT packed matrices (at most three) of one scheme.

    A program multiplies T tokens by Q panels of 16 rows of one matrix.

    Args:
        packed: (panels, blocks, 16) int32 words; for KIND "tiles", (panels, blocks, 64) uint8.
        scales: (panels, groups, 16); 32-bit words of two fp16 numbers if PAIRS.
        minima: minima in the form of the scales; ignored if PLAIN.
        bias: (N,); not read unless HAS_BIAS.
        out: (tokens, N); the second and third matrix have N1 and N2 rows.
        values: quantized activations, (tokens, K / 4) int32 words; int8 for KIND "tiles".
        value_scales: scales of the activations, (tokens, groups) fp32.
        sums: sums of the activations by group, (tokens, groups) int32.
        KIND: "few", "tiles" or "wide"; selects the kernel in `products`.
        C: groups that an iteration multiplies; blocks for KIND "wide".
    """
    W: tl.constexpr = 16 * Q
    FULL: tl.constexpr = (
        (N + 15) // 16 % Q == 0 and (N1 + 15) // 16 % Q == 0 and (N2 + 15) // 16 % Q == 0
    )
    # The programs of the first matrix come before those of the second.
    START1: tl.constexpr = (N + W - 1) // W
    START2: tl.constexpr = START1 + (N1 + W - 1) // W
    part = tl.program_id(0)
    number = (part >= START1).to(tl.int32) + (part >= START2).to(tl.int32)
    panel = (part - select_operand(number, 0, START1, START2, COUNT)) * Q
    rows = select_operand(number, N, N1, N2, COUNT)
    t = tl.program_id(1) * T + tl.arange(0, T)
    total = multiply_panels(
        select_operand(number, packed, packed1, packed2, COUNT),
        select_operand(number, scales, scales1, scales2, COUNT),
        select_operand(number, minima, minima1, minima2, COUNT),
        select_operand(number, bias, bias1, bias2, COUNT),
        values, value_scales, sums, panel, t, tokens, rows, KIND, K, T, BITS, G, PLAIN, HAS_BIAS,
        PAIRS, EMULATE, STAGES, C, Q, FULL,
    ).to(out.dtype.element_ty)  # fmt: skip
    row = panel * 16 + tl.arange(0, W)
    inside = (t < tokens)[:, None] & (row < rows)[None, :]
    address = (
        select_operand(number, out, out1, out2, COUNT)
        + t.to(tl.int64)[:, None] * rows
        + row[None, :]
    )
    tl.store(address, total, mask=inside)
