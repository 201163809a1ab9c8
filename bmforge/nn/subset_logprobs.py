"""Log-probabilities of some tokens of the vocabulary, and of all other tokens as one outcome.

`linear_top_k` returns a model's k most likely tokens, and `linear_subset_logprobs` another model's
log-probabilities of the same tokens, with gradients. Both run over tiles of logits; the columns of
the vocabulary may be sharded over ranks.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmforge.device import accumulation_dtype
from bmforge.nn.distillation import HeadInput
from bmforge.nn.logprobs import Differentiate, TiledScores
from bmforge.nn.losses import find_tiling, split_chunks
from bmforge.nn.shard_hooks import VocabCut
from bmforge.nn.tiled_logits import TiledHead, TiledLogits
from bmforge.nn.top_k_distillation import TopKPredictions

__all__ = ["linear_subset_logprobs", "linear_top_k"]


class _Options(NamedTuple):
    """Arguments of `linear_subset_logprobs` that need no gradient."""

    temperature: float
    vocab: VocabCut | None
    softcap: float | None


@torch.no_grad()
def linear_top_k(
    inputs: HeadInput, count: int, *, temperature: float = 1.0, vocab: VocabCut | None = None
) -> TopKPredictions:
    """Return the most likely tokens at every position, without the full logits or gradients.

    Args:
        inputs: hidden states and the head's weights.
        count: number k of tokens; more than the vocabulary means the whole vocabulary.
        temperature: divisor of the logits (default: 1).
        vocab: sharding of the weight over the vocabulary, see `linear_cross_entropy`.

    Comm: with a sharded vocabulary, an all-reduce of 2 (k + 1) numbers per position and rank.
    """
    hidden, weight, bias, added, softcap = inputs.detach()
    flat = tuple(itertools.chain.from_iterable(added))
    count = min(count, weight.shape[0] if vocab is None else vocab.rows)
    # Without a backward pass no tile is needed twice.
    tiling = find_tiling(hidden, weight, vocab)._replace(keeps=False)
    wide = accumulation_dtype(hidden.dtype)
    head = TiledHead(hidden, weight, bias, flat, (False,) * (6 + len(flat)), wide)
    logits = TiledLogits(head, tiling, softcap)
    parts = []
    for start, rows in split_chunks(hidden.shape[0], tiling.tokens):
        tokens = slice(start, start + rows)
        first = 0 if vocab is None else vocab.first
        best = _Best(count, hidden.new_empty((rows, 0), dtype=wide))
        for column, size in split_chunks(weight.shape[0], tiling.columns):
            best.add_(logits.make(tokens, column, size).div_(temperature), first + column)
        parts.append(best.finish(vocab))
    return TopKPredictions(*(torch.cat(part) for part in zip(*parts, strict=True)))


class _Best:
    """The k largest logits of a chunk of tokens, and the logsumexp of all others.

    Args:
        count: number k of logits.
        empty: tensor (M, 0) with the dtype and device of the logits.
    """

    def __init__(self, count: int, empty: Tensor) -> None:
        self._count, self._values, self._ids = count, empty, empty.long()
        self._rest = torch.logsumexp(empty, -1, keepdim=True)  # -inf

    def add_(self, logits: Tensor, first: int) -> None:
        """Add the tile whose first column is token `first`; overwrite its largest logits."""
        values, ids = logits.topk(min(self._count, logits.shape[1]), -1)
        # The tile's largest logits leave the rest now; those that `_merge` displaces come back to
        # it.
        self._add_rest(logits.scatter_(1, ids, -torch.inf))
        self._merge(values, ids + first)

    def _add_rest(self, logits: Tensor) -> None:
        self._rest = torch.logaddexp(self._rest, torch.logsumexp(logits, -1, keepdim=True))

    def _merge(self, values: Tensor, ids: Tensor) -> None:
        values, ids = torch.cat((self._values, values), 1), torch.cat((self._ids, ids), 1)
        # Stable: of equal logits in two tiles, the one of the earlier tile stays first.
        values, order = values.sort(dim=-1, descending=True, stable=True)
        self._values, self._ids = values[:, : self._count], ids.gather(1, order[:, : self._count])
        self._add_rest(values[:, self._count :])

    def finish(self, vocab: VocabCut | None) -> TopKPredictions:
        """Return the predictions, merged over the ranks of a sharded vocabulary."""
        if vocab is not None:
            self._join_ranks(vocab)
        every = torch.cat((self._values, self._rest), 1)
        log_probs = every - torch.logsumexp(every, -1, keepdim=True)
        return TopKPredictions(self._ids, log_probs[:, :-1], log_probs[:, -1])

    def _join_ranks(self, vocab: VocabCut) -> None:
        """Merge the largest logits of all ranks, which every rank writes into a table of zeros."""
        starts = range(0, vocab.rows, vocab.width)
        counts = [min(self._count, vocab.width, vocab.rows - start) for start in starts]
        shape = len(starts), len(self._values), self._count + 1
        values, ids = self._values.new_zeros(shape), self._ids.new_zeros(shape)
        if vocab.first in starts:  # a rank without columns adds nothing
            slot, width = vocab.first // vocab.width, self._values.shape[1]
            values[slot, :, :width], values[slot, :, -1:] = self._values, self._rest
            ids[slot, :, :width] = self._ids
        # Each rank has filled its own slot, so the sum is an all-gather.
        values, ids = vocab.sum_(values), vocab.sum_(ids)
        self._values, self._ids = self._values[:, :0], self._ids[:, :0]
        self._rest = torch.logsumexp(values[..., -1], 0)[:, None]
        for rank, width in enumerate(counts):
            self._merge(values[rank, :, :width], ids[rank, :, :width])


class _LinearSubsetLogprobs(TiledScores):
    """Autograd function of `linear_subset_logprobs`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Any,
        bias: Tensor | None,
        ids: Tensor,
        options: _Options,
        unused: None,
        *added: Tensor,
    ) -> Tensor:
        inputs = hidden, weight, bias, *added
        head, tiling = TiledScores.open_head(inputs, options.vocab)
        logits = TiledLogits(head, tiling, options.softcap)
        out = hidden.new_empty((hidden.shape[0], ids.shape[1] + 1), dtype=head.wide)
        # Saved for backward, which recomputes tiles but must not repeat the sums over all columns.
        log_mass = torch.empty_like(out[:, :1])
        for start, count in split_chunks(hidden.shape[0], tiling.tokens):
            tokens = slice(start, start + count)
            picked = torch.zeros_like(out[tokens, :-1])
            log_rest = torch.full_like(out[tokens, -1:], -torch.inf)
            for first, size in split_chunks(weight.shape[0], tiling.columns):
                tile = logits.make(tokens, first, size).div_(options.temperature)
                index, is_inside = _find(ids[tokens], tile, first, options.vocab)
                picked += tile.gather(1, index).where(is_inside, 0)
                _exclude_(tile, index, is_inside)
                log_rest = torch.logaddexp(log_rest, torch.logsumexp(tile, -1, keepdim=True))
            if options.vocab is not None:
                picked, log_rest = (
                    options.vocab.sum_(picked),
                    _sum_exponentials(log_rest, options.vocab),
                )
            out[tokens, :-1], out[tokens, -1:] = picked, log_rest
            log_mass[tokens] = torch.logsumexp(out[tokens], -1, keepdim=True)
        out -= log_mass
        ctx.tiling = tiling
        derive = partial(_derive, options)
        TiledScores.keep_(ctx, inputs, (ids, out, log_mass), derive, options.softcap)
        return out


def _derive(
    options: _Options, grad: Tensor, ids: Tensor, out: Tensor, log_mass: Tensor
) -> Differentiate:
    return _Derivative(ids, grad / options.temperature, out, log_mass, options).differentiate_


class _Derivative:
    """Computes the gradient of the logits of all tokens, tile by tile.

    With S the subset, p the softmax, r the probability of all tokens outside S, and g_k and g_r the
    gradients of the log-probabilities: dL/dz_j = g_j - p_j G for j in S, and (g_r / r - G) p_j
    otherwise, both divided by the temperature, where G = g_r + sum of g_k. The quotient p_j / r is
    computed as a softmax over the tokens outside S, which is accurate for any r.
    """

    def __init__(
        self, ids: Tensor, grad: Tensor, out: Tensor, log_mass: Tensor, options: _Options
    ) -> None:
        self._ids, self._options = ids, options
        change = grad - grad.sum(1, keepdim=True) * out.exp()
        self._of_subset, self._of_rest = change[:, :-1], change[:, -1:]
        log_others = out[:, -1:] + log_mass
        # If the subset is the whole vocabulary, -inf - -inf would be NaN.
        self._log_rest = log_others.masked_fill(log_others == -torch.inf, 0)

    def differentiate_(self, tile: Tensor, tokens: slice, first: int) -> None:
        """Overwrite a tile of logits with the gradient of the loss."""
        index, is_inside = _find(self._ids[tokens], tile, first, self._options.vocab)
        tile.div_(self._options.temperature)
        _exclude_(tile, index, is_inside)
        tile.sub_(self._log_rest[tokens]).exp_().mul_(self._of_rest[tokens])
        tile.scatter_add_(1, index, self._of_subset[tokens].where(is_inside, 0))


def _find(ids: Tensor, tile: Tensor, first: int, vocab: VocabCut | None) -> tuple[Tensor, Tensor]:
    """Return the column of each token id in a tile (0 outside), and a mask of ids in the tile."""
    index = ids - (first if vocab is None else first + vocab.first)
    is_inside = (index >= 0) & (index < tile.shape[1])
    return index.where(is_inside, 0), is_inside


def _exclude_(tile: Tensor, index: Tensor, is_inside: Tensor) -> None:
    """Set the logits of the subset to -inf; adding 0 does not change column 0."""
    removed = torch.zeros_like(index, dtype=tile.dtype).masked_fill_(is_inside, -torch.inf)
    tile.scatter_add_(1, index, removed)


def _sum_exponentials(logs: Tensor, vocab: VocabCut) -> Tensor:
    """Return the logsumexp of a number over the ranks."""
    top = vocab.max_(logs.clone())
    # If no rank has another token, -inf - -inf would be NaN.
    top = top.masked_fill(top == -torch.inf, 0)
    return vocab.sum_((logs - top).exp()).log() + top


def linear_subset_logprobs(
    inputs: HeadInput, ids: Tensor, *, temperature: float = 1.0, vocab: VocabCut | None = None
) -> Tensor:
    """Return the log-probabilities of k tokens per position and of all other tokens together.

    Args:
        inputs: hidden states and the head's weights, as `LMHead` passes them to a `Measure`.
        ids: distinct token ids of each position.
        temperature: divisor of the logits (default: 1).
        vocab: sharding of the weight over the vocabulary, see `linear_cross_entropy`.

    Returns:
        log-probabilities with gradients; the last column is that of all other tokens together, -inf
        if there are none

    Shape:
        ids: (M, k); returns (M, k + 1) in fp32 or wider

    Memory: one tile of logits; in backward also one fp32 gradient the size of the weight.
    """
    hidden, weight, bias, added, softcap = inputs if torch.is_grad_enabled() else inputs.detach()
    options = _Options(temperature, vocab, softcap)
    flat = itertools.chain.from_iterable(added)
    result: Tensor = _LinearSubsetLogprobs.apply(hidden, weight, bias, ids, options, None, *flat)
    return result
