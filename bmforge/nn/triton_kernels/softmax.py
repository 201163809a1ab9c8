"""Triton kernel for the softmax cross-entropy of rows of logits and its gradient."""

from bmforge.nn.triton_kernels.language import jit, tl

__all__ = ["cross_entropy_rows"]


# Without specialization Triton does not compile the kernel again for every vocabulary.
@jit(do_not_specialize=["columns"])
def cross_entropy_rows(
    logits, labels, losses, factor, columns, stride,
    IGNORED: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_GRADIENT: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Compute the loss of one row and overwrite its logits with their gradient.

    The first pass computes the maximum and the sum of the exponentials together (Milakov and
    Gimelshein, "Online normalizer calculation for softmax", 2018), the second one the gradient.

    Args:
        logits: (rows, columns); `stride` is the distance of two rows in elements.
        labels: (rows,) int64; the loss and the gradient of a row with the label IGNORED are 0.
        losses: (rows,) fp32.
        factor: factor of the gradient, one fp32 number; not read unless HAS_FACTOR.
    """
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    base = logits + row * stride
    # The smallest number, not -inf: logits may be -inf, and -inf - -inf is NaN.
    top = tl.full((B,), -3.4028234663852886e38, tl.float32)
    mass = tl.zeros((B,), tl.float32)
    for first in tl.range(0, columns, B, num_stages=2):
        column = first + tl.arange(0, B)
        x = tl.load(base + column, mask=column < columns, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, x)
        mass = mass * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
    highest = tl.max(top, 0)
    total = tl.sum(mass * tl.exp(top - highest), 0)
    is_kept = label != IGNORED
    picked = tl.load(base + tl.where(is_kept, label, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(is_kept, tl.log(total) + highest - picked, 0.0))
    if HAS_GRADIENT:
        scale = tl.where(is_kept, 1.0, 0.0)
        if HAS_FACTOR:
            scale = scale * tl.load(factor)
        for first in tl.range(0, columns, B, num_stages=2):
            column = first + tl.arange(0, B)
            inside = column < columns
            x = tl.load(base + column, mask=inside, other=-float("inf")).to(tl.float32)
            p = tl.exp(x - highest) / total - tl.where(column == label, 1.0, 0.0)
            # A row without a label is 0, even if its logits are not finite.
            p = tl.where(is_kept, p * scale, 0.0)
            tl.store(base + column, p.to(logits.dtype.element_ty), mask=inside)
