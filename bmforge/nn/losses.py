"""Cross-entropy loss computed from hidden states, without the full logits.

The logits of N tokens have N x V elements: 4 GiB in fp32 for 8,192 tokens and a vocabulary of 128k,
and a simple implementation stores them several times. Here the head runs over chunks of tokens (on
a CPU also of columns) in a buffer that is allocated once, and the gradient of a chunk is computed
while its logits are in memory. If a vocabulary is so large that even a few tokens' logits do not
fit, one pass over the columns computes the softmax's sums and a second pass recomputes the logits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmforge.batch import IGNORE_INDEX
from bmforge.device import accumulation_dtype, is_host, reads_without_sync
from bmforge.errors import ShapeError
from bmforge.nn.device_loss import find_loss_kernels, pad_head, run_device_loss
from bmforge.nn.shard_hooks import HeadRows, VocabCut
from bmforge.nn.tiled_logits import TiledHead, TiledLogits, TiledSoftmax, Tiling

__all__ = [
    "TiledLoss",
    "as_number",
    "check_classes",
    "find_labeled",
    "find_tiling",
    "linear_cross_entropy",
    "split_chunks",
]

# Logits per chunk, 256 MiB in fp32: an accelerator needs large matrix products.
_CHUNK_ELEMENTS = 1 << 26
# On a CPU tiles that fit into the cache (16 MiB) are faster; 144 MiB of them are stored at most,
# and 72 MiB if the logits have 16 bits.
# Each pass over the head's weight must serve at least some tokens, or reading the weight dominates.
_HOST_CHUNK_ELEMENTS, _HOST_TILE_ELEMENTS, _FEW_TOKENS, _MANY_TOKENS = 9 << 22, 1 << 22, 200, 2048
# Smallest fraction of tokens without a label that are left out of the head's products. A causal
# model's last position of every row stays below it, so pretraining does not copy its states.
_LEFT_OUT = 1 / 8


class _HeadOptions(NamedTuple):
    """Arguments of `linear_cross_entropy` that describe the head and need no gradient."""

    vocab: VocabCut | None
    softcap: float | None


def find_tiling(hidden: Tensor, weight: HeadRows, vocab: VocabCut | None) -> Tiling:
    """Choose the tile sizes for the given tokens and this rank's vocabulary columns.

    Args:
        hidden: hidden states of the tokens.
        weight: the head's weight; a quantized weight limits the columns per tile (`rows_at_once`).
        vocab: sharding over the vocabulary; all ranks then use the same number of chunks.
    """
    count, columns = max(1, hidden.shape[0]), weight.shape[0]
    # The width of the largest shard, so that all ranks have the same chunks and the same
    # collectives.
    widest = columns if vocab is None else vocab.width
    most = getattr(weight, "rows_at_once", columns)
    if not is_host(hidden.device) or torch.compiler.is_compiling():
        tokens = min(count, max(1, _CHUNK_ELEMENTS // widest))
        return Tiling(tokens, min(columns, most), keeps=True)
    tokens = min(count, _HOST_CHUNK_ELEMENTS // widest)
    keeps = tokens >= min(count, _FEW_TOKENS)
    tokens = tokens if keeps else min(count, _MANY_TOKENS)
    tokens = -(-count // -(-count // tokens))  # chunks of equal length
    return Tiling(tokens, min(columns, most, max(1, _HOST_TILE_ELEMENTS // tokens)), keeps)


def split_chunks(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield start and length of each chunk of `count` items; one empty chunk if `count` is 0.

    With `size` 0 there are no chunks: the columns of a rank whose shard of the vocabulary is empty.
    """
    if size == 0:
        return
    for start in range(0, max(1, count), size):
        yield start, min(size, count - start)


class TiledLoss(torch.autograd.Function):
    """Base class of losses whose gradients are computed in forward, tile by tile.

    The inputs are hidden states, weight, bias, three arguments without gradient, and then pairs
    (a, b) of low-rank factors, whose products ``a @ b.T`` are added to the logits.
    """

    @staticmethod
    def keep_(ctx: Any, head: TiledHead, scale: Tensor, inputs: Sequence[Tensor | None]) -> None:
        """Save the gradients of `inputs` for backward, which multiplies them by `scale`."""
        like = head.pairs[0][0]
        # fp16 gradients were scaled when they were rounded; see `TiledLogits.narrow`.
        left = torch.ones_like(scale) if like.dtype == torch.float16 else scale
        ctx.save_for_backward(*head.grads, left)
        ctx.dtypes = [like.dtype if tensor is None else tensor.dtype for tensor in inputs]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *sums, scale = ctx.saved_tensors
        factor = grads[0] * scale
        scaled = [_scale_(g, factor, dtype) for g, dtype in zip(sums, ctx.dtypes, strict=True)]
        return *scaled[:3], None, None, None, *scaled[3:]


class _LinearCrossEntropy(TiledLoss):
    """Autograd function of the cross-entropy summed over tokens, times `scale`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: HeadRows,
        bias: Tensor | None,
        labels: Tensor,
        scale: Tensor,
        options: _HeadOptions,
        *added: Tensor,
    ) -> Tensor:
        vocab, softcap = options
        inputs = hidden, weight, bias, *added
        columns, tiling = weight.shape[0], find_tiling(hidden, weight, vocab)
        kernels = find_loss_kernels(hidden, weight) if options == (None, None) else None
        if kernels is not None:
            weight, bias, added = pad_head(weight, bias, added)  # type: ignore[arg-type]
        head = TiledHead(hidden, weight, bias, added, ctx.needs_input_grad, scale.dtype)
        if kernels is not None:
            pairs = split_chunks(hidden.shape[0], tiling.tokens)
            chunks = [slice(start, start + count) for start, count in pairs]
            total = run_device_loss(kernels, head, labels, scale, columns, chunks)
            TiledLoss.keep_(ctx, head, scale, inputs)
            return total * scale
        if softcap is not None:
            # The derivative of the cap is stored for one tile only, so every tile is recomputed.
            tiling = tiling._replace(keeps=False)
        logits = TiledLogits(head, tiling, softcap)
        total = torch.zeros_like(scale)
        for start, count in split_chunks(hidden.shape[0], tiling.tokens):
            tokens = slice(start, start + count)
            softmax = TiledSoftmax(labels[tokens], vocab, scale.dtype)
            for first, size in split_chunks(columns, tiling.columns):
                softmax.add_(logits.make(tokens, first, size), first)
            # The gradient needs the sums over all columns (and ranks), so it is a second loop over
            # the tiles.
            total += softmax.finish()
            if not head.needs_gradients:
                continue
            for first, size in split_chunks(columns, tiling.columns):
                tile = logits.reload(tokens, first, size)
                softmax.differentiate_(tile, first, is_exponential=logits.keeps_exponentials)
                head.collect_(logits.narrow(tile, scale), tokens, slice(first, first + size))
            head.finish_tokens_(tokens)
        TiledLoss.keep_(ctx, head, scale, inputs)
        return total * scale


def _scale_(gradient: Tensor | None, factor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Scale a gradient in the dtype of `factor`, to avoid fp16 underflow and overflow.

    A gradient that has this dtype is scaled in place, so a second backward through the same
    graph raises torch's error for in-place changes.
    """
    return None if gradient is None else gradient.to(factor.dtype).mul_(factor).to(dtype)


def linear_cross_entropy(
    hidden: Tensor,
    weight: HeadRows,
    labels: Tensor,
    bias: Tensor | None = None,
    num_items: float | Tensor | None = None,
    vocab: VocabCut | None = None,
    added: Sequence[tuple[Tensor, Tensor]] = (),
    softcap: float | None = None,
) -> Tensor:
    """Return the cross-entropy of ``hidden @ weight.T + bias``, without the full logits.

    Args:
        hidden: last hidden states.
        weight: the head's weight, or quantized rows without gradient.
        labels: target class of every row; -100 ignores the row. On a CPU, no logits of ignored
            rows are computed if they are more than an eighth.
        bias: the head's bias.
        num_items: divisor of the summed loss; None means the number of labels (the mean; 0
            without labels). A trainer passes the number of labels of the global batch, divided by
            the loss scale if it trains in fp16, so that the gradient is scaled here.
        vocab: sharding of `weight` over the vocabulary. All its ranks pass the same hidden
            states and labels; the gradient of `hidden` is partial and must be summed over them.
        added: pairs (a, b) of low-rank factors; ``a @ b.T`` is added to the logits.
        softcap: cap of the logits; see `TiledLogits`.

    Shape:
        hidden: (M, D); weight: (V, D); labels: (M,); bias: (V,); added: (M, R) and (V, R);
        returns a scalar in fp32 or wider

    Raises:
        ShapeError: a label is neither -100 nor a class (checked only if reading the labels
            needs no device synchronization).

    Memory: one chunk of logits (on a CPU 144 MiB, or 72 MiB in 16 bits), and one fp32 gradient the
    size of `weight`.
    Source: computing the gradient in forward is the idea of Liger Kernel (Hsu et al. 2024).
    """
    if vocab is None:
        check_classes(labels, weight.shape[0])
    if hidden.is_cpu and torch.is_autocast_enabled("cpu") and isinstance(weight, Tensor):
        # The products below have preallocated outputs, which autocast does not convert.
        hidden = hidden.to(weight.dtype)
        added = [(low.to(weight.dtype), rows.to(weight.dtype)) for low, rows in added]
    if not torch.is_grad_enabled():
        # ctx.needs_input_grad ignores `torch.no_grad`, so detach to skip the gradients.
        hidden, weight = hidden.detach(), weight.detach()
        bias = None if bias is None else bias.detach()
        added = [(low.detach(), rows.detach()) for low, rows in added]
    if num_items is None:
        num_items = (labels != IGNORE_INDEX).sum().clamp(min=1)
    labeled = find_labeled(labels)
    if labeled is not None:
        hidden, labels = hidden.index_select(0, labeled), labels[labeled]
        added = [(low.index_select(0, labeled), rows) for low, rows in added]
    wide = accumulation_dtype(hidden.dtype)
    scale = 1.0 / as_number(num_items, hidden.device, wide)
    flat = itertools.chain.from_iterable(added)
    options = _HeadOptions(vocab, softcap)
    return _LinearCrossEntropy.apply(hidden, weight, bias, labels, scale, options, *flat)


def as_number(number: float | Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a number as a 0-dim tensor on the device, without waiting for the device."""
    if isinstance(number, Tensor):
        return number.to(device, dtype)
    return torch.full((), number, dtype=dtype, device=device)


def find_labeled(labels: Tensor) -> Tensor | None:
    """Return the indices of the tokens with a label, or None to compute the loss of all tokens.

    In fine-tuning, the prompts have no labels, and their logits would be computed for nothing. None
    is returned if few tokens have no label, or if reading the labels needs a device sync.

    Shape:
        labels: (M,); returns (N,), ascending
    """
    if not reads_without_sync(labels):
        return None
    labeled = (labels != IGNORE_INDEX).nonzero()[:, 0]
    return labeled if labels.shape[0] - labeled.shape[0] > labels.shape[0] * _LEFT_OUT else None


def check_classes(labels: Tensor, count: int) -> None:
    """Raise `ShapeError` for labels outside `count` classes, unless that needs a device sync."""
    if not reads_without_sync(labels):
        return
    targets = labels[labels != IGNORE_INDEX]
    if targets.numel() and (int(targets.min()) < 0 or int(targets.max()) >= count):
        raise ShapeError(
            f"labels are out of range: {int(targets.min())} to {int(targets.max())} (allowed: 0 to "
            f"{count - 1}, for {count} classes). Use {IGNORE_INDEX} for tokens without a label."
        )
