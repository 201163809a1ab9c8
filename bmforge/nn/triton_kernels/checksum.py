"""Triton kernel for a checksum of a tensor's bytes."""

from bmforge.nn.triton_kernels.language import jit, tl

__all__ = ["hash_words"]


# Without specialization Triton compiles the kernel once, not for every size.
@jit(do_not_specialize=["count", "step", "salt"])
def hash_words(words, sums, count, step, salt, B: tl.constexpr):
    """Store the weighted sum, modulo 2**64, of B of the words 0, step, 2 * step, ...

    Every word has an odd pseudo-random weight, so the change of a single word always changes the
    sum. The weights come from the mixing function of Steele et al., "Fast splittable pseudorandom
    number generators" (2014).

    Args:
        words: integers of any width.
        sums: one int64 per program.
        count: number of words in the sum.
        salt: added to the index of each word, so that tensors have different weights.
    """
    i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    word = tl.load(words + i * step, mask=i < count, other=0).to(tl.int64)
    # 0x9E3779B97F4A7C15 and 0xBF58476D1CE4E5B9 as int64, so that products keep the words' dtype.
    mixed = (i + salt + 1) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    # An odd number has an inverse modulo 2**64, so no difference of a word is multiplied to 0.
    weight = (mixed ^ (mixed >> 27)) | 1
    tl.store(sums + tl.program_id(0), tl.sum(word * weight, 0))
