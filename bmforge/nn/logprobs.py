"""Log-probabilities of labels, computed from hidden states without the full logits.

`linear_logprobs` is used where the loss is not a plain mean of cross-entropies, as in preference
optimization and reinforcement learning. The weight of a token is then known only after the forward
of all tokens, so the gradient cannot be computed in forward (as in `linear_cross_entropy`);
backward recomputes the logits tile by tile.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmforge.device import accumulation_dtype
from bmforge.errors import ConfigError
from bmforge.nn.distillation import HeadInput
from bmforge.nn.losses import check_classes, find_labeled, find_tiling, split_chunks
from bmforge.nn.shard_hooks import VocabCut
from bmforge.nn.tiled_logits import TiledHead, TiledLogits, TiledSoftmax, Tiling

__all__ = ["Derive", "Differentiate", "TiledScores", "linear_logprobs"]

# Function (tile of logits, tokens, first column) that overwrites the tile with its gradient.
Differentiate = Callable[[Tensor, slice, int], None]
# Function (gradient of the scores, *three saved values) -> `Differentiate`.
Derive = Callable[..., Differentiate]


class _Options(NamedTuple):
    """Arguments of `linear_logprobs` that need no gradient."""

    temperature: float
    vocab: VocabCut | None
    with_entropy: bool
    softcap: float | None


class TiledScores(torch.autograd.Function):
    """Base of autograd functions that score tokens; backward recomputes the logits tile by tile.

    The inputs are those of `TiledLoss`: hidden states, weight, bias, three arguments without
    gradient, and then pairs of low-rank factors.
    """

    @staticmethod
    def open_head(inputs: Sequence[Any], vocab: VocabCut | None) -> tuple[TiledHead, Tiling]:
        """Return a head without gradients and its tile sizes; no tile stays in memory."""
        hidden, weight, bias, *added = inputs
        tiling = find_tiling(hidden, weight, vocab)._replace(keeps=False)
        needs = (False,) * (6 + len(added))
        return TiledHead(
            hidden, weight, bias, added, needs, accumulation_dtype(hidden.dtype)
        ), tiling

    @staticmethod
    def keep_(
        ctx: Any, inputs: Sequence[Any], values: Sequence[Tensor], derive: Derive, softcap: Any
    ) -> None:
        """Save the head's inputs and three `values`, which backward passes to `derive`."""
        hidden, weight, bias, *added = inputs
        is_tensor = isinstance(weight, Tensor)  # a quantized weight is a `PackedRows` object
        ctx.rows = None if is_tensor else weight
        ctx.save_for_backward(hidden, weight if is_tensor else None, bias, *values, *added)
        ctx.derive, ctx.softcap = derive, softcap

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *saved = ctx.saved_tensors
        values, added = saved[:3], saved[3:]
        weight = ctx.rows if weight is None else weight
        inputs, wide = (hidden, weight, bias, *added), accumulation_dtype(hidden.dtype)
        differentiate_ = ctx.derive(grads[0].to(wide), *values)
        head = TiledHead(hidden, weight, bias, added, ctx.needs_input_grad, wide)
        logits = TiledLogits(head, ctx.tiling, ctx.softcap)
        # No loss scale here: `grads` already contains it.
        unit = torch.ones((), dtype=wide, device=hidden.device)
        for start, count in split_chunks(hidden.shape[0], ctx.tiling.tokens):
            tokens = slice(start, start + count)
            for first, size in split_chunks(weight.shape[0], ctx.tiling.columns):
                tile = logits.make(tokens, first, size)
                differentiate_(tile, tokens, first)
                head.collect_(logits.narrow(tile, unit), tokens, slice(first, first + size))
            head.finish_tokens_(tokens)
        cast = [
            None if grad is None or tensor is None else grad.to(tensor.dtype)
            for grad, tensor in zip(head.grads, inputs, strict=True)
        ]
        return *cast[:3], None, None, None, *cast[3:]


class _LinearLogprobs(TiledScores):
    """Autograd function of `linear_logprobs`; returns the three scores, (3, M)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Any,
        bias: Tensor | None,
        labels: Tensor,
        options: _Options,
        unused: None,
        *added: Tensor,
    ) -> Tensor:
        inputs = hidden, weight, bias, *added
        head, ctx.tiling = TiledScores.open_head(inputs, options.vocab)
        out, log_mass = _score_tiles(head, labels, options, ctx.tiling)
        derive = partial(_derive, options)
        TiledScores.keep_(ctx, inputs, (labels, log_mass, out[1]), derive, options.softcap)
        return out


def _derive(
    options: _Options, grad: Tensor, labels: Tensor, log_mass: Tensor, entropy: Tensor
) -> Differentiate:
    return _Derivative(labels, grad, log_mass, entropy, options).differentiate_


def _score_tiles(
    head: TiledHead, labels: Tensor, options: _Options, tiling: Tiling
) -> tuple[Tensor, Tensor]:
    """Return the scores of all tokens, (3, M), and the log of each softmax denominator, (M,)."""
    hidden, weight = head.pairs[0]
    out = hidden.new_empty((3, hidden.shape[0]), dtype=head.wide)
    log_mass = torch.empty_like(out[0])
    logits = TiledLogits(head, tiling, options.softcap)
    for start, count in split_chunks(hidden.shape[0], tiling.tokens):
        tokens = slice(start, start + count)
        scores = _TokenScores(labels[tokens], options, head.wide)
        for first, size in split_chunks(weight.shape[0], tiling.columns):
            tile = logits.make(tokens, first, size)
            scores.add_(tile if options.temperature == 1 else tile.div_(options.temperature), first)
        out[:, tokens], log_mass[tokens] = scores.finish_scores()
    return out, log_mass


class _TokenScores(TiledSoftmax):
    """Label log-probability and entropy of a chunk of tokens, computed from tiles of logits."""

    def __init__(self, target: Tensor, options: _Options, wide: torch.dtype) -> None:
        super().__init__(target, options.vocab, wide)
        self._with_entropy = options.with_entropy
        # Sum of exp(z - top) (z - top) over the logits z, with the running maximum `top`.
        self._moment = torch.zeros_like(self._mass)

    def add_(self, logits: Tensor, first: int) -> None:
        """Accumulate the tile whose first column is `first`; overwrite it with exponentials."""
        before, mass = self._top, self._mass
        shifted = logits.clone() if self._with_entropy else None
        super().add_(logits, first)
        if shifted is not None:
            shifted.sub_(self._top).mul_(logits).masked_fill_(logits == 0, 0)  # 0 * -inf is NaN
            self._moment = self._rescale(before, mass, self._top) + shifted.sum(-1, keepdim=True)

    def _rescale(self, before: Tensor, mass: Tensor, top: Tensor) -> Tensor:
        """Return ``sum exp(z - top) (z - top)``, rescaled from the maximum `before` to `top`."""
        return (before - top).exp_() * (self._moment + mass * (before - top))

    def finish_scores(self) -> tuple[Tensor, Tensor]:
        """Return the scores of `linear_logprobs` and the log of the softmax denominator, (M,)."""
        if self._vocab is not None:
            top = self._vocab.max_(self._top.clone())
            # Sums of exponentials can be added over ranks only if all ranks refer to the same
            # maximum.
            moment = self._rescale(self._top, self._mass, top)
            sums = torch.stack((self._mass * (self._top - top).exp_(), moment, self._picked))
            self._mass, self._moment, self._picked = self._vocab.sum_(sums).unbind()
            self._top = top
        log_mass = self._mass.log() + self._top
        # H = log Z - sum p z, with z relative to the maximum, which cancels.
        entropy = self._mass.log() - self._moment / self._mass
        is_best = (self._picked >= self._top).to(log_mass.dtype)
        scores = torch.stack((self._picked - log_mass, entropy, is_best))
        return scores.where(self._kept, 0)[..., 0], log_mass[:, 0]


class _Derivative:
    """Computes the gradient of the logits of all tokens, tile by tile.

    With p the softmax, y the label, g and e the gradients of log-probability and entropy H:
    dL/dz_j = (g 1[j = y] - p_j (g + e (log p_j + H))) / temperature.
    """

    def __init__(
        self, labels: Tensor, grad: Tensor, log_mass: Tensor, entropy: Tensor, options: _Options
    ) -> None:
        self._labels, self._options, self._log_mass = labels, options, log_mass
        self._grad = (grad[0] / options.temperature)[:, None]
        has_entropy = options.with_entropy and bool(grad[1].any())
        self._entropy_grad = (grad[1] / options.temperature)[:, None] if has_entropy else None
        self._entropy = entropy

    def differentiate_(self, tile: Tensor, tokens: slice, first: int) -> None:
        """Overwrite a tile of logits with the gradient of the loss."""
        vocab, labels = self._options.vocab, self._labels[tokens]
        softmax = TiledSoftmax(labels, vocab, tile.dtype)
        # A loss of an ignored token may have a NaN gradient: select, do not multiply.
        grad = self._grad[tokens].where(softmax.is_kept, 0)
        tile.div_(self._options.temperature).sub_(self._log_mass[tokens, None])
        if self._entropy_grad is None:
            tile.exp_().mul_(-grad)
        else:
            of_entropy = self._entropy_grad[tokens].where(softmax.is_kept, 0)
            # The smallest log-probabilities may be -inf, whose product with p = 0 is NaN.
            weight = tile.clamp(min=torch.finfo(tile.dtype).min / 4)
            weight.add_(self._entropy[tokens, None]).mul_(of_entropy).add_(grad)
            tile.exp_().mul_(weight.neg_())
        index, is_inside = softmax.find(tile, first)
        tile.scatter_add_(1, index, grad.where(is_inside, 0))


def linear_logprobs(
    inputs: HeadInput,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    vocab: VocabCut | None = None,
    with_entropy: bool = False,
) -> Tensor:
    """Return the log-probability of every label, without the full logits.

    Args:
        inputs: hidden states and the head's weights, as `LMHead` passes them to a `Measure`.
        labels: token ids; -100 ignores a position, whose scores are 0.
        temperature: divisor of the logits (default: 1).
        vocab: sharding of the weight over the vocabulary, see `linear_cross_entropy`.
        with_entropy: also compute the entropy of every position, at the cost of one more pass
            over each tile (default: off, which returns 0).

    Returns:
        log-probability, entropy in nats, and 1 if the label has the largest logit (else 0); the
        first two have gradients

    Shape:
        labels: (M,); returns (3, M) in fp32 or wider

    Raises:
        ConfigError: the temperature is not above 0.
        ShapeError: a label is neither -100 nor a row of the head.

    Memory: one tile of logits (16 MiB on a CPU), and in backward one fp32 gradient the size of the
    weight.
    """
    if not temperature > 0:
        raise ConfigError(f"temperature={temperature} must be above 0.")
    if vocab is None:
        check_classes(labels, inputs.weight.shape[0])
    labeled, count = find_labeled(labels), labels.shape[0]
    if labeled is not None:
        inputs, labels = inputs.select(labeled), labels[labeled]
    hidden, weight, bias, added, softcap = inputs if torch.is_grad_enabled() else inputs.detach()
    options = _Options(temperature, vocab, with_entropy, softcap)
    flat = itertools.chain.from_iterable(added)
    scores = _LinearLogprobs.apply(hidden, weight, bias, labels, options, None, *flat)
    return scores if labeled is None else scores.new_zeros(3, count).index_copy(1, labeled, scores)
