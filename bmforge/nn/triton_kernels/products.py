"""Triton kernels for products of packed matrices with few tokens.

Results are bit-identical to those of `multiply_plain`: the integer sums of a group are exact, and
the groups' terms are added in order. A tree reduction (`tl.sum`) would change the last bits of most
results. Fused multiply-add must be off when the kernels are launched.
"""

from bmforge.nn.triton_kernels.language import jit, tl

__all__ = ["dequantize", "multiply_few", "multiply_tiles", "multiply_wide_groups"]


@jit
def dot4(a, b, c, IS_UNSIGNED: tl.constexpr, EMULATE: tl.constexpr):
    """Return c + the dot product of four bytes of `a`, signed or not, and four signed bytes of `b`.

    The product is emulated in Triton's interpreter and on GPUs without the dp4a instruction.
    """
    if EMULATE:
        for i in tl.static_range(4):
            if IS_UNSIGNED:
                left = (a >> (8 * i)) & 255
            else:
                # Moving the byte to the top and back extends its sign.
                left = (a << (24 - 8 * i)) >> 24
            c = c + left * ((b << (24 - 8 * i)) >> 24)
        return c
    elif IS_UNSIGNED:
        return tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@jit
def add_8_in_order(total, terms):
    """Add the columns of terms (R, 8) to total (R,), one after the other."""
    R: tl.constexpr = terms.shape[0]
    # Triton cannot index a column in registers; `tl.split` halves an axis of size 2, so three
    # levels of it separate eight columns.
    even, odd = tl.split(tl.reshape(terms, (R, 4, 2)))
    t04, t26 = tl.split(tl.reshape(even, (R, 2, 2)))
    t15, t37 = tl.split(tl.reshape(odd, (R, 2, 2)))
    t0, t4 = tl.split(t04)
    t1, t5 = tl.split(t15)
    t2, t6 = tl.split(t26)
    t3, t7 = tl.split(t37)
    total = total + t0
    total = total + t1
    total = total + t2
    total = total + t3
    total = total + t4
    total = total + t5
    total = total + t6
    return total + t7


@jit
def add_16_in_order(total, terms):
    """Add the columns of terms (R, 16) to total (R,), one after the other."""
    R: tl.constexpr = terms.shape[0]
    low, high = tl.split(tl.permute(tl.reshape(terms, (R, 2, 8)), (0, 2, 1)))
    return add_8_in_order(add_8_in_order(total, low), high)


@jit
def add_in_order(total, terms, C: tl.constexpr):
    """Add the columns of terms (R, C) to total (R,), one after the other; C is 8, 16 or 32."""
    if C == 32:
        R: tl.constexpr = terms.shape[0]
        low, high = tl.split(tl.permute(tl.reshape(terms, (R, 2, 16)), (0, 2, 1)))
        return add_16_in_order(add_16_in_order(total, low), high)
    elif C == 16:
        return add_16_in_order(total, terms)
    else:
        return add_8_in_order(total, terms)


@jit
def add_groups(total, terms, minimum_terms, R: tl.constexpr, C: tl.constexpr, PLAIN: tl.constexpr):
    """Add the terms (R, C) of C groups to total (R,).

    Args:
        PLAIN: the matrix has no minima. Otherwise the term of its minimum is added after the term
            of each group.
    """
    if PLAIN:
        return add_in_order(total, terms, C)
    else:
        # `join` interleaves the two, which is the order of `multiply_quantized_plain`.
        both = tl.reshape(tl.join(terms, minimum_terms), (R, 2 * C))
        return add_in_order(total, both, 2 * C)


@jit
def load_inside(address, inside, EVEN: tl.constexpr):
    """Load the values for which `inside` is true, else 0; with EVEN, all are true."""
    if EVEN:
        return tl.load(address)
    else:
        return tl.load(address, mask=inside, other=0)


@jit
def load_scales(
    scales, g, panel, GROUPS: tl.constexpr, C: tl.constexpr, PAIRS: tl.constexpr,
    Q: tl.constexpr, end, FULL: tl.constexpr,
):  # fmt: skip
    """Load fp32 scales, (C, Q * 16), of C quantization groups of Q panels (blocks of 16 rows).

    Args:
        g: indices of the groups; scales of indices from GROUPS (number of groups) on are 0.
        panel: index of the first panel.
        PAIRS: scales are fp16, passed as 32-bit words with two scales each. Loads below four bytes
            per thread are not asynchronous, so every iteration of the loop would wait for them.
        end: number of panels of the matrix; scales of later ones are 0.
        FULL: `end` is a multiple of Q.
    """
    EVEN: tl.constexpr = GROUPS % C == 0 and FULL
    W: tl.constexpr = 8 if PAIRS else 16  # words of a panel
    word = tl.arange(0, Q * W)
    of_panel = panel + word // W
    address = (of_panel[None, :] * GROUPS + g[:, None]) * W + (word % W)[None, :]
    read = load_inside(scales + address, (g < GROUPS)[:, None] & (of_panel < end)[None, :], EVEN)
    if PAIRS:
        low = (read & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
        high = (read >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        read = tl.reshape(tl.join(low, high), (C, Q * 16)).to(tl.float32)
    return read


@jit
def multiply_few(
    packed, scales, minima, values, value_scales, sums, panel, at,
    K: tl.constexpr, T: tl.constexpr, BITS: tl.constexpr, G: tl.constexpr, PLAIN: tl.constexpr,
    PAIRS: tl.constexpr, EMULATE: tl.constexpr, STAGES: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Multiply T tokens by one panel of 16 rows with dp4a; each iteration multiplies C groups.

    Returns (T, 16) in fp32.

    Args:
        packed: (panels, blocks, 16) int32 words.
        scales: (panels, groups, 16); 32-bit words of two fp16 numbers if PAIRS.
        minima: minima in the form of the scales; ignored if PLAIN.
        values: quantized activations, (tokens, K / 4) int32 words.
        value_scales: scales of the activations, (tokens, groups) fp32.
        sums: sums of the activations by group, (tokens, groups) int32.
        panel: index of the panel.
        at: indices of the tokens, (T,).
    """
    GROUPS: tl.constexpr = K // G
    B: tl.constexpr = G * BITS // 32
    EVEN: tl.constexpr = GROUPS % C == 0
    r = tl.arange(0, 16)
    total = tl.zeros((T * 16,), dtype=tl.float32)
    base = packed + panel.to(tl.int64) * (GROUPS * B * 16)
    row = values + at[:, None] * (K // 4)
    for first in tl.range(0, GROUPS, C, num_stages=STAGES):
        g = first + tl.arange(0, C)
        inside = g < GROUPS
        zero = tl.zeros((T, C, 16), dtype=tl.int32)
        group_sums = zero  # exact
        # A loop over the blocks keeps the sum of a group in one thread, without shuffles.
        for b in tl.static_range(B):
            block = g * B + b
            words = load_inside(base + block[:, None] * 16 + r[None, :], inside[:, None], EVEN)
            words, _ = tl.broadcast(words[None], zero)
            # A 4-bit block has eight columns, two words of activations: the first four columns are
            # the low nibbles, the next four the high nibbles.
            if BITS == 4:
                low = load_inside(row + 2 * block[None], inside[None], EVEN)
                high = load_inside(row + 2 * block[None] + 1, inside[None], EVEN)
                low, _ = tl.broadcast(low[:, :, None], zero)
                high, _ = tl.broadcast(high[:, :, None], zero)
                group_sums = dot4(words & 0x0F0F0F0F, low, group_sums, True, EMULATE)
                group_sums = dot4((words >> 4) & 0x0F0F0F0F, high, group_sums, True, EMULATE)
            else:
                x = load_inside(row + block[None], inside[None], EVEN)
                x, _ = tl.broadcast(x[:, :, None], zero)
                group_sums = dot4(words, x, group_sums, False, EMULATE)
        of_group = at[:, None] * GROUPS + g[None, :]
        group_mask = inside[None, :]
        sx = load_inside(value_scales + of_group, group_mask, EVEN)[:, :, None]
        # The sum of a group corrects the offset of 4-bit integers, or weighs the minimum.
        s = load_inside(sums + of_group, group_mask, EVEN)[:, :, None]
        if BITS == 4 and PLAIN:
            group_sums = group_sums - 8 * s
        sw = load_scales(scales, g, panel, GROUPS, C, PAIRS, 1, panel + 1, True)
        # The two scales are multiplied first, as on the CPU: another order rounds differently.
        # Groups after the last have scale 0 and change no sum.
        terms = group_sums.to(tl.float32) * (sx * sw[None])
        terms = tl.reshape(tl.permute(terms, (0, 2, 1)), (T * 16, C))
        lows = terms
        if not PLAIN:
            low = load_scales(minima, g, panel, GROUPS, C, PAIRS, 1, panel + 1, True)
            low_terms = (s.to(tl.float32) * sx) * low[None]
            lows = tl.reshape(tl.permute(low_terms, (0, 2, 1)), (T * 16, C))
        total = add_groups(total, terms, lows, T * 16, C, PLAIN)
    return tl.reshape(total, (T, 16))


@jit
def multiply_wide_groups(
    packed, scales, minima, values, value_scales, sums, panel, at,
    K: tl.constexpr, T: tl.constexpr, BITS: tl.constexpr, G: tl.constexpr, PLAIN: tl.constexpr,
    EMULATE: tl.constexpr, STAGES: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """Like `multiply_few`, for groups of any width, up to complete rows.

    Each iteration multiplies BB blocks of a group. Scales and minima are passed in their own dtype.
    """
    GROUPS: tl.constexpr = K // G
    B: tl.constexpr = G * BITS // 32
    r = tl.arange(0, 16)
    total = tl.zeros((T, 16), dtype=tl.float32)
    base = packed + panel.to(tl.int64) * (GROUPS * B * 16)
    row = values + at[:, None] * (K // 4)
    for g in tl.range(0, GROUPS):
        dots = tl.zeros((T, BB, 16), dtype=tl.int32)
        for first in tl.range(0, B, BB, num_stages=STAGES):
            b = first + tl.arange(0, BB)
            inside = b < B
            block = g * B + b
            words = tl.load(base + block[:, None] * 16 + r[None, :], mask=inside[:, None], other=0)
            words, _ = tl.broadcast(words[None], dots)
            group_mask = inside[None, :]
            if BITS == 4:
                low = tl.load(row + 2 * block[None, :], mask=group_mask, other=0)
                high = tl.load(row + 2 * block[None, :] + 1, mask=group_mask, other=0)
                low, _ = tl.broadcast(low[:, :, None], dots)
                high, _ = tl.broadcast(high[:, :, None], dots)
                dots = dot4(words & 0x0F0F0F0F, low, dots, True, EMULATE)
                dots = dot4((words >> 4) & 0x0F0F0F0F, high, dots, True, EMULATE)
            else:
                x = tl.load(row + block[None, :], mask=group_mask, other=0)
                x, _ = tl.broadcast(x[:, :, None], dots)
                dots = dot4(words, x, dots, False, EMULATE)
        # Integer sums are exact, so this tree reduction gives the same bits as a sum in order.
        group_sums = tl.sum(dots, 1)  # (T, 16)
        s = tl.load(sums + at * GROUPS + g)[:, None]
        sx = tl.load(value_scales + at * GROUPS + g)[:, None]
        if BITS == 4 and PLAIN:
            group_sums = group_sums - 8 * s
        of_group = (panel * GROUPS + g) * 16 + r
        total = total + group_sums.to(tl.float32) * (
            sx * tl.load(scales + of_group).to(tl.float32)[None]
        )
        if not PLAIN:
            minimum = tl.load(minima + of_group).to(tl.float32)[None]
            total = total + (s.to(tl.float32) * sx) * minimum
    return total


@jit
def unpack_groups(raw, C: tl.constexpr, B: tl.constexpr, BITS: tl.constexpr, PLAIN: tl.constexpr):
    """Return the integers of C groups of B blocks, (C, B * 64) bytes -> (C, 16, columns) int8."""
    if BITS == 4:
        low, high = (raw & 15).to(tl.int8), (raw >> 4).to(tl.int8)
        if PLAIN:
            # Tensor cores multiply signed bytes, so the offset is removed here; dp4a takes unsigned
            # nibbles, and `multiply_few` corrects the sum instead.
            low, high = low - 8, high - 8
        both = tl.reshape(tl.join(low, high), (C, B, 16, 4, 2))
        return tl.reshape(tl.permute(both, (0, 2, 1, 4, 3)), (C, 16, B * 8))
    else:
        signed = tl.reshape(raw.to(tl.int8, bitcast=True), (C, B, 16, 4))
        return tl.reshape(tl.permute(signed, (0, 2, 1, 3)), (C, 16, B * 4))


@jit
def multiply_tiles(
    packed, scales, minima, values, value_scales, sums, panel, at, end,
    K: tl.constexpr, T: tl.constexpr, BITS: tl.constexpr, G: tl.constexpr, PLAIN: tl.constexpr,
    PAIRS: tl.constexpr, STAGES: tl.constexpr, C: tl.constexpr, Q: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Multiply at least 16 tokens by Q panels (16 rows each) on int8 tensor cores.

    Returns (T, 16 * Q). Each iteration multiplies C groups. The args are those of `multiply_few`,
    but `packed` is (panels, blocks, 64) uint8 and `values` is (tokens, K) int8. `end` is the
    number of panels of the matrix; the result is 0 for panels from there on. With FULL there are
    none.
    """
    GROUPS: tl.constexpr = K // G
    B: tl.constexpr = G * BITS // 32
    EVEN: tl.constexpr = GROUPS % C == 0
    R: tl.constexpr = 16 * Q
    k = tl.arange(0, G)
    y = tl.arange(0, B * 64)
    part = tl.arange(0, Q * C)
    total = tl.zeros((R * T,), dtype=tl.float32)
    # In bytes, an offset in a large vocabulary matrix does not fit into 32 bits.
    base = packed + panel.to(tl.int64) * (GROUPS * B * 64)
    for first in tl.range(0, GROUPS, C, num_stages=STAGES):
        g = first + tl.arange(0, C)
        inside = g < GROUPS
        group = first + part % C
        raw = load_inside(
            base + (part // C * GROUPS + group)[:, None] * (B * 64) + y[None, :],
            ((group < GROUPS) & (panel + part // C < end))[:, None],
            EVEN and FULL,
        )
        weights = tl.reshape(unpack_groups(raw, Q * C, B, BITS, PLAIN), (Q, C, 16, G))
        weights = tl.reshape(tl.permute(weights, (1, 0, 2, 3)), (C, R, G))
        column = g[:, None, None] * G + k[None, :, None]
        x = load_inside(values + at[None, None, :] * K + column, inside[:, None, None], EVEN)
        group_sums = tl.dot(weights, x, out_dtype=tl.int32).to(tl.float32)  # (C, R, T), exact
        of_group = at[None, :] * GROUPS + g[:, None]
        sx = load_inside(value_scales + of_group, inside[:, None], EVEN)[:, None, :]
        sw = load_scales(scales, g, panel, GROUPS, C, PAIRS, Q, end, FULL)
        terms = group_sums * (sx * sw[:, :, None])
        terms = tl.reshape(tl.permute(terms, (1, 2, 0)), (R * T, C))
        lows = terms
        if not PLAIN:
            s = load_inside(sums + of_group, inside[:, None], EVEN)[:, None, :].to(tl.float32)
            low = load_scales(minima, g, panel, GROUPS, C, PAIRS, Q, end, FULL)[:, :, None]
            lows = tl.reshape(tl.permute((s * sx) * low, (1, 2, 0)), (R * T, C))
        total = add_groups(total, terms, lows, R * T, C, PLAIN)
    return tl.trans(tl.reshape(total, (R, T)))


@jit
def dequantize(
    packed, scales, minima, out,
    N: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, G: tl.constexpr, PLAIN: tl.constexpr,
    BB: tl.constexpr,
):  # fmt: skip
    """Dequantize BB blocks of one panel of 16 rows into `out`, (N, K), like `unpack_matrix`."""
    BLOCKS: tl.constexpr = K * BITS // 32
    COLUMNS: tl.constexpr = BB * 32 // BITS
    panel = tl.program_id(0).to(tl.int64)
    y = tl.program_id(1) * BB * 64 + tl.arange(0, BB * 64)
    raw = tl.load(packed + panel * (BLOCKS * 64) + y, mask=y < BLOCKS * 64, other=0)
    v = tl.reshape(unpack_groups(raw[None], 1, BB, BITS, PLAIN), (16, COLUMNS)).to(tl.float32)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.arange(0, 16)
    of_group = (panel * (K // G) + column // G)[None, :] * 16 + r[:, None]
    inside = (column < K)[None, :] & (panel * 16 + r < N)[:, None]
    v = v * tl.load(scales + of_group, mask=inside, other=0.0).to(tl.float32)
    if not PLAIN:
        v = v + tl.load(minima + of_group, mask=inside, other=0.0).to(tl.float32)
    address = out + (panel * 16 + r)[:, None] * K + column[None, :]
    tl.store(address, v.to(out.dtype.element_ty), mask=inside)
