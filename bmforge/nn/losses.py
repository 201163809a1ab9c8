"""Cross-entropy straight from hidden states: the full logits never exist.

The head of a language model makes N x V logits; for 8,192 tokens and a vocabulary of 128k that is 4
GiB in fp32, several times over in a plain implementation. Here the tokens go through in chunks, and
each chunk's gradient is taken while its logits are at hand, so nothing is kept and nothing is
recomputed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bmforge.batch import IGNORE_INDEX
from bmforge.device import reads_are_free, wide_dtype
from bmforge.errors import ShapeError
from bmforge.nn.cuts import VocabCut

__all__ = ["check_classes", "linear_cross_entropy"]

# Logits in flight: 2^26 elements, 256 MiB in fp32. Every chunk reads the whole head three times, so
# fewer are faster: 1,024 tokens of GPT-2's vocabulary take 1.4 times as long in chunks of 2^24.
_CHUNK_ELEMENTS = 1 << 26


def _chunks(count: int, rows: int) -> Iterator[tuple[int, int]]:
    """Yield where every chunk of `count` tokens begins and how long it is; one at least."""
    for start in range(0, max(1, count), rows):
        yield start, min(rows, count - start)


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of token losses times `scale`; its gradients are made in forward, by chunks."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        scale: Tensor,
        vocab: VocabCut | None,
        *added: Tensor,
    ) -> Tensor:
        # Of the widest part, so that all processes take equally many chunks.
        width = weight.shape[0] if vocab is None else vocab.width
        rows = max(1, _CHUNK_ELEMENTS // width)
        wide, is_fp16 = scale.dtype, hidden.dtype == torch.float16
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        more = _Added(added, ctx.needs_input_grad[6:], wide)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.empty_like(weight, dtype=wide) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if need_bias and bias is not None else None
        # The same memory for every chunk: fresh pages cost a tenth of the product that fills them.
        shape = min(rows, hidden.shape[0]), weight.shape[0]
        buffer = hidden.new_empty(shape)
        wide_buffer = buffer if hidden.dtype == wide else hidden.new_empty(shape, dtype=wide)
        for start, _ in _chunks(hidden.shape[0], rows):
            piece = hidden[start : start + rows]
            grad = torch.mm(piece, weight.t(), out=buffer[: piece.shape[0]])
            if bias is not None:
                grad += bias
            tokens = slice(start, start + rows)
            more.add_to_(grad, tokens)
            logits = wide_buffer[: piece.shape[0]].copy_(grad)
            total += _softmax_loss_(logits, labels[start : start + rows], vocab)
            if not any(ctx.needs_input_grad):
                continue
            # fp16 takes the scale here, while the values are wide: most of them are far below its
            # smallest number, and a loss scale must reach them in time.
            torch.mul(logits, scale, out=grad) if is_fp16 else grad.copy_(logits)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[start : start + rows])
            if grad_weight is not None:
                _add_product_(grad_weight, grad.t(), piece, first=start == 0)
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=wide)
            more.collect_(grad, tokens)
        left = torch.ones_like(scale) if is_fp16 else scale
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias, *more.grads, left)
        ctx.dtypes = hidden.dtype, weight.dtype, hidden.dtype if bias is None else bias.dtype
        ctx.dtypes += tuple(tensor.dtype for tensor in added)
        return total * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *sums, scale = ctx.saved_tensors
        factor = grads[0] * scale
        found = [_scale_(g, factor, dtype) for g, dtype in zip(sums, ctx.dtypes, strict=True)]
        return *found[:3], None, None, None, *found[3:]


class _Added:
    """Pairs of narrower hidden states and rows, whose products are added to the logits.

    Args:
        tensors: states (M, R) and rows (V, R) by turns.
        needs: which of them want a gradient.
        wide: what gradients of rows are summed in.
    """

    def __init__(self, tensors: Sequence[Tensor], needs: Sequence[bool], wide: torch.dtype) -> None:
        self.pairs = list(zip(tensors[::2], tensors[1::2], strict=True))
        self.grads: list[Tensor | None] = [
            torch.zeros_like(tensor, dtype=wide if number % 2 else tensor.dtype) if need else None
            for number, (tensor, need) in enumerate(zip(tensors, needs, strict=True))
        ]

    def add_to_(self, logits: Tensor, tokens: slice) -> None:
        for low, rows in self.pairs:
            logits.addmm_(low[tokens], rows.t())

    def collect_(self, grad: Tensor, tokens: slice) -> None:
        """Take the gradients of some tokens, from that of their logits."""
        for number, (low, rows) in enumerate(self.pairs):
            grad_low, grad_rows = self.grads[2 * number : 2 * number + 2]
            if grad_low is not None:
                torch.mm(grad, rows, out=grad_low[tokens])
            if grad_rows is not None:
                _add_product_(grad_rows, grad.t(), low[tokens], first=False)


def _softmax_loss_(logits: Tensor, target: Tensor, vocab: VocabCut | None) -> Tensor:
    """Return the summed loss and turn `logits` into its gradient.

    In place and with one exponential: on a CPU `torch.logsumexp` costs as much as the product that
    made the logits. Where other processes have other columns, the maximum, the mass and the
    target's logit are found together, two small collectives.
    """
    kept = (target != IGNORE_INDEX)[:, None]
    index, here = target[:, None].where(kept, 0), kept
    if vocab is not None:
        index = index - vocab.first
        here = kept & (index >= 0) & (index < logits.shape[1])
        index = index.where(here, 0)
    top = logits.amax(-1, keepdim=True)
    top = top if vocab is None else vocab.max_(top)
    picked = logits.gather(1, index)
    mass = logits.sub_(top).exp_().sum(-1, keepdim=True)
    if vocab is not None:
        mass, picked = vocab.sum_(torch.stack((mass, picked * here))).unbind()
    loss = ((mass.log() + top - picked) * kept).sum()
    logits.mul_(kept / mass).scatter_add_(1, index, -here.to(logits.dtype))
    return loss


def _add_product_(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """``total += left @ right``, summed in `total`'s wider dtype; the `first` chunk overwrites."""
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, beta=0 if first else 1, out=total)
    elif first:
        total.copy_(left @ right)
    else:
        total += left @ right


def _scale_(gradient: Tensor | None, factor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Scale in the wide dtype, so that fp16 neither under- nor overflows; in place if it is wide.

    A second backward through the same graph therefore raises torch's error about in-place changes.
    """
    return None if gradient is None else gradient.to(factor.dtype).mul_(factor).to(dtype)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    num_items: float | Tensor | None = None,
    vocab: VocabCut | None = None,
    added: Sequence[tuple[Tensor, Tensor]] = (),
) -> Tensor:
    """Cross-entropy of ``hidden @ weight.T + bias`` against `labels`, without the full logits.

    Args:
        hidden: last hidden states.
        weight: the head's weight.
        labels: class of every row; rows with -100 count nothing.
        bias: the head's bias.
        num_items: what the sum is divided by; None divides by the number of labels (their mean; 0
            when there is none). A trainer passes the number of labels in the whole global batch,
            divided by the loss scale when it trains in fp16, so that the scaled gradient is made
            here.
        vocab: how the rows of `weight` are divided over processes, all of which call this with the
            same hidden states and labels; the gradient of `hidden` is this process's part of it.
        added: narrower hidden states and rows, whose products are added to the logits.

    Shape:
        hidden: (M, D); weight: (V, D); labels: (M,); bias: (V,); added: (M, R) and (V, R);
        returns a scalar in fp32 or wider

    Raises:
        ShapeError: a label is neither -100 nor a class, where looking costs no waiting.

    Memory: one chunk of logits, and one gradient the size of `weight` in fp32.
    Source: the idea of taking the gradient in forward is Liger Kernel's (Hsu et al. 2024).
    """
    if vocab is None:
        check_classes(labels, weight.shape[0])
    if not torch.is_grad_enabled():
        # torch tells a function what could want a gradient, not that none is being recorded.
        hidden, weight = hidden.detach(), weight.detach()
        bias = None if bias is None else bias.detach()
        added = [(low.detach(), rows.detach()) for low, rows in added]
    if num_items is None:
        num_items = (labels != IGNORE_INDEX).sum().clamp(min=1)
    wide = wide_dtype(hidden.dtype)
    scale = 1.0 / torch.as_tensor(num_items, dtype=wide, device=hidden.device)
    flat = itertools.chain.from_iterable(added)
    return _LinearCrossEntropy.apply(hidden, weight, bias, labels, scale, vocab, *flat)


def check_classes(labels: Tensor, count: int) -> None:
    """Raise `ShapeError` for labels outside of `count` classes, where looking costs no waiting."""
    if not reads_are_free(labels):
        return
    given = labels[labels != IGNORE_INDEX]
    if given.numel() and (int(given.min()) < 0 or int(given.max()) >= count):
        raise ShapeError(
            f"labels go from {int(given.min())} to {int(given.max())}; the head has {count} "
            f"classes, from 0 on. Mark what is not to be predicted with {IGNORE_INDEX}."
        )
