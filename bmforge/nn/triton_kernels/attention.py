"""Triton kernels for decode attention over the pages of a KV cache.

The tokens of a sequence are divided over several programs (Dao et al., "Flash-Decoding", 2023):
`attend_pages` computes a partial softmax of some pages, `join_parts` combines the results.
"""

from bmforge.nn.triton_kernels.language import jit, tl

__all__ = ["attend_pages", "join_parts"]


# Without specialization Triton does not compile the kernel again for widths that 16 divides.
@jit(do_not_specialize=["width"])
def attend_pages(
    query, keys, values, key_scales, value_scales, tables, ends, part, stats, out, scale, width,
    K: tl.constexpr, GROUP: tl.constexpr, BR: tl.constexpr, H: tl.constexpr, BH: tl.constexpr,
    PART: tl.constexpr, WINDOW: tl.constexpr, IS_INT8: tl.constexpr, S: tl.constexpr,
    STAGES: tl.constexpr, IS_ONE: tl.constexpr,
):  # fmt: skip
    """Compute the attention of one token's queries, for one KV head, to PART tokens of its pages.

    Each iteration processes S tokens.

    Args:
        query: (rows, K * GROUP, H).
        keys: (pages, K, 16, H); `values` has the same shape.
        key_scales: (pages, K, 16) if IS_INT8, else not read; `value_scales` has the same shape.
        tables: page indices of each sequence, (rows, width) int32.
        ends: number of tokens that each query attends to, (rows,) int32.
        part: unnormalized result, (rows, K, parts, BR, H) fp32.
        stats: maximum and sum of the weights, (rows, K, parts, BR, 2) fp32.
        out: result, (rows, K * GROUP, H); only written if IS_ONE, instead of `part` and `stats`.
        IS_ONE: there is one part.
    """
    row, head, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    end = tl.load(ends + row)
    near = 0
    if WINDOW > 0:
        near = tl.maximum(end - WINDOW, 0)
    r, h, s = tl.arange(0, BR), tl.arange(0, BH), tl.arange(0, S)
    in_head = h < H
    address = (row * K * GROUP + head * GROUP + r)[:, None] * H + h[None, :]
    q = tl.load(query + address, mask=(r < GROUP)[:, None] & in_head[None, :], other=0.0)
    most = tl.full((BR,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BR,), dtype=tl.float32)
    mixed = tl.zeros((BR, BH), dtype=tl.float32)
    last = tl.minimum((number + 1) * PART, end)
    # Blocks of S tokens before the window are skipped; `shown` masks the rest of the first block.
    for first in tl.range(tl.maximum(number * PART, near // S * S), last, S, num_stages=STAGES):
        at = first + s
        shown = (at < last) & (at >= near)
        # Page indices are widened because the number of elements of a large cache exceeds 32 bits.
        page = tl.load(tables + row * width + at // 16, mask=shown, other=0).to(tl.int64)
        slot = (page * K + head) * 16 + at % 16
        k = tl.load(
            keys + slot[None, :] * H + h[:, None], mask=shown[None, :] & in_head[:, None], other=0
        ).to(q.dtype)
        # The default, TF32, would round fp32 queries and keys to 10 bits of mantissa.
        score = tl.dot(q, k, input_precision="ieee") * scale
        if IS_INT8:  # integers up to 127 are exact in every dtype; the scale follows the product
            score = score * tl.load(key_scales + slot, mask=shown, other=0.0)[None, :]
        score = tl.where(shown[None, :], score, float("-inf"))
        raised = tl.maximum(most, tl.max(score, 1))
        # If no token was shown yet, the maximum is -inf, and -inf - -inf would be NaN.
        shift = tl.where(raised == float("-inf"), 0.0, raised)
        weight = tl.exp(score - shift[:, None])
        fade = tl.exp(most - shift)
        total = total * fade + tl.sum(weight, 1)
        if IS_INT8:
            # After the sum above, because the values' scales do not belong to the softmax's
            # denominator.
            weight = weight * tl.load(value_scales + slot, mask=shown, other=0.0)[None, :]
        v = tl.load(
            values + slot[:, None] * H + h[None, :], mask=shown[:, None] & in_head[None, :], other=0
        ).to(q.dtype)
        added = tl.dot(weight.to(q.dtype), v, input_precision="ieee")
        mixed = mixed * fade[:, None] + added
        most = raised
    if IS_ONE:
        result = (mixed / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + address, result, mask=(r < GROUP)[:, None] & in_head[None, :])
    else:
        at_part = ((row * K + head) * tl.num_programs(2) + number) * BR + r
        tl.store(part + at_part[:, None] * H + h[None, :], mixed, mask=in_head[None, :])
        tl.store(stats + at_part * 2, most)
        tl.store(stats + at_part * 2 + 1, total)


@jit(do_not_specialize=["parts"])
def join_parts(
    part, stats, out, parts,
    K: tl.constexpr, GROUP: tl.constexpr, BR: tl.constexpr, H: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Combine the results `part` and `stats` of `attend_pages` to `out`, (rows, K * GROUP, H)."""
    row, head = tl.program_id(0), tl.program_id(1)
    r, h = tl.arange(0, BR), tl.arange(0, BH)
    in_head = h < H
    most = tl.full((BR,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BR,), dtype=tl.float32)
    mixed = tl.zeros((BR, BH), dtype=tl.float32)
    for number in range(parts):
        at_part = ((row * K + head) * parts + number) * BR + r
        other = tl.load(stats + at_part * 2)
        raised = tl.maximum(most, other)
        shift = tl.where(raised == float("-inf"), 0.0, raised)
        # A part after the end of its sequence has maximum -inf, and so the weight 0.
        fade, weight = tl.exp(most - shift), tl.exp(other - shift)
        added = tl.load(part + at_part[:, None] * H + h[None, :], mask=in_head[None, :], other=0.0)
        mixed = mixed * fade[:, None] + added * weight[:, None]
        total = total * fade + tl.load(stats + at_part * 2 + 1) * weight
        most = raised
    address = out + (row * K * GROUP + head * GROUP + r)[:, None] * H + h[None, :]
    inside = (r < GROUP)[:, None] & in_head[None, :]
    tl.store(address, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)
