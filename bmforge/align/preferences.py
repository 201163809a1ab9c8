"""Training objectives of preference optimization, for pairs and for rated single answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.align.losses import (
    METHODS,
    MethodOptions,
    PairScores,
    kto_loss,
    log_ratio,
    odds_ratio,
    preference_loss,
)
from bmforge.align.prefix_sharing import (
    chosen_rows,
    is_shared,
    model_inputs,
    pairs_of,
    sum_answers,
)
from bmforge.align.reference import Reference, score_rows
from bmforge.align.scoring import TokenScores, score_tokens
from bmforge.batch import IGNORE_INDEX, Batch
from bmforge.parallel import ROW_AXES, mesh_of, sum_over_axes
from bmforge.train import LossAndMetrics
from bmforge.train.metric_sums import MetricKind

__all__ = ["PairObjective", "UnpairedObjective"]

_SHARED: dict[str, MetricKind] = {
    "mean_token_accuracy": "mean",
    "entropy": "mean",
    "num_tokens": "sum",
}
_REWARDS: dict[str, MetricKind] = {
    "rewards/chosen": "mean",
    "rewards/rejected": "mean",
    "rewards/accuracies": "mean",
    "rewards/margins": "mean",
    "logps/chosen": "mean",
    "logps/rejected": "mean",
}
_REFERENCE, _KL = "reference_logps", "kl"
# Weights of a good and of a bad answer in KTO's margin.
_MARGIN_WEIGHTS = ("good_weight", "bad_weight")


class PairObjective:
    """Training objective for pairs of answers (DPO and similar methods).

    Row 2i of a batch is the chosen and row 2i + 1 the rejected answer of pair i. Batches have
    ``input_ids`` and ``labels``, (2B, T), with labels on the tokens of the answers; a pair without
    labels is padding. ``reference_logps``, (2B,), are computed if they are missing. In batches of
    `prefix_sharing`, both answers of a pair are in one row.

    Args:
        method: name of the method, a key of `METHODS`.
        options: coefficients of the loss.
        reference: reference model; None if the method needs no reference, or if all batches contain
            its log-probabilities.
        nll_on_prompt: True if the negative log-likelihood includes the prompt, as in TRL's ORPO.
    """

    def __init__(
        self,
        method: str,
        options: MethodOptions,
        reference: Reference | None = None,
        nll_on_prompt: bool = False,
    ) -> None:
        self._method, self._options = method, options
        self.reference, self._nll_on_prompt = reference, nll_on_prompt
        self.metrics: Mapping[str, MetricKind] = {**_REWARDS, **_SHARED}
        if options.nll_weight:
            self.metrics = {**self.metrics, "nll_loss": "mean"}
        if method == "orpo":
            self.metrics = {**self.metrics, "log_odds_ratio": "mean", "log_odds_chosen": "mean"}

    def count(self, batch: Batch) -> int:
        """Return the number of pairs in a batch."""
        return int(pairs_of(batch).sum())

    @property
    def _compares(self) -> bool:
        return METHODS[self._method].needs_reference

    def prepare(self, model: nn.Module, micro_batches: Sequence[Batch]) -> Sequence[Batch]:
        """Add the reference model's log-probabilities to the micro-batches."""
        if not self._compares:
            return micro_batches
        return [_with_reference(self.reference, model, batch) for batch in micro_batches]

    def __call__(self, model: nn.Module, batch: Batch, num_items: float) -> LossAndMetrics | None:
        """Return the loss of a micro-batch divided by the number of pairs, and its metrics."""
        labels, is_real = batch["labels"], pairs_of(batch)
        targets = self._targets(batch)
        scores = score_tokens(model, model_inputs(batch), targets, with_entropy=True)
        if scores is None:
            return None
        is_answer = (labels != IGNORE_INDEX) & _has_score(labels)
        sums = sum_answers(scores.logprobs.where(is_answer, 0), batch)
        # A placeholder that keeps the losses of padding pairs finite.
        sums = sums.where(is_real.repeat_interleave(2), -1.0)
        lengths = sum_answers(is_answer.long(), batch).clamp(min=1)
        reference = batch.get(_REFERENCE, torch.zeros_like(sums)).to(sums.dtype)
        pairs = PairScores(
            *(part for both in (sums, reference, lengths) for part in (both[::2], both[1::2]))
        )
        loss, metrics = self._measure(pairs, is_real)
        if self._options.nll_weight:
            nll = _nll_of_chosen(scores, targets if self._nll_on_prompt else labels, batch)
            loss = loss + self._options.nll_weight * nll
            metrics["nll_loss"] = _mean(nll, is_real)
        metrics |= _token_metrics(scores, is_answer)
        return LossAndMetrics(loss.where(is_real, 0).sum() / num_items, metrics)

    def _targets(self, batch: Batch) -> Tensor:
        """Return the labels to score: answer tokens and, with `nll_on_prompt`, chosen prompts."""
        labels = batch["labels"]
        if not (self._nll_on_prompt and self._options.nll_weight):
            return labels
        width = torch.arange(labels.shape[1], device=labels.device)
        is_label = labels != IGNORE_INDEX
        if is_shared(batch):
            is_label = chosen_rows(is_label, batch)
            is_chosen = is_label.any(1, keepdim=True)
        else:
            rows = torch.arange(labels.shape[0], device=labels.device)
            is_chosen = ((rows % 2 == 0) & is_label.any(1))[:, None]
        last = (is_label * width).amax(1, keepdim=True)
        return torch.where(is_chosen & (width <= last), batch["input_ids"], labels)

    def _measure(self, pairs: PairScores, is_real: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss of every pair, and metrics of the implicit rewards."""
        loss = preference_loss(self._method, pairs, self._options)
        if self._method in ("simpo", "orpo"):
            chosen, rejected = pairs.means()
        else:
            chosen, rejected = pairs.ratios()
        good, bad = (self._options.beta * side.detach() for side in (chosen, rejected))
        metrics = {
            "rewards/chosen": _mean(good, is_real),
            "rewards/rejected": _mean(bad, is_real),
            "rewards/accuracies": _mean((good > bad).to(good.dtype), is_real),
            "rewards/margins": _mean(log_ratio(good, bad), is_real),
            "logps/chosen": _mean(pairs.chosen, is_real),
            "logps/rejected": _mean(pairs.rejected, is_real),
        }
        if self._method == "orpo":
            odds = odds_ratio(pairs)
            metrics["log_odds_ratio"] = _mean(F.logsigmoid(odds), is_real)
            metrics["log_odds_chosen"] = _mean(odds, is_real)
        return loss, metrics


class UnpairedObjective:
    """Training objective of KTO, for answers rated good or bad.

    Row 2i is answer i; row 2i + 1 has the same prompt with the answer to another prompt. The KL
    divergence z of policy and reference is estimated from the rows 2i + 1, as the mean log-ratio
    over the whole optimizer step, clamped to at least 0. So z does not depend on the division of
    the step into micro-batches. Batches have ``is_good``, (B,), and the tensors described in
    `PairObjective`.

    Args:
        options: coefficients of the loss.
        reference: reference model; None if all batches contain its log-probabilities.
    """

    def __init__(self, options: MethodOptions, reference: Reference | None = None) -> None:
        self._options, self.reference = options, reference
        rewards = {name: kind for name, kind in _REWARDS.items() if "accuracies" not in name}
        self.metrics: Mapping[str, MetricKind] = {**rewards, "kl": "mean", **_SHARED}

    def count(self, batch: Batch) -> int:
        """Return the number of answers in a batch."""
        return int(_answers_of(batch).sum())

    def prepare(self, model: nn.Module, micro_batches: Sequence[Batch]) -> Sequence[Batch]:
        """Add reference log-probabilities and statistics of the whole step to the micro-batches.

        The statistics are KTO's KL estimate z, and the factors on the rewards of good and of bad
        answers in the metric ``rewards/margins`` (see `_margin`).

        Comm: an all-reduce of three numbers.
        """
        mesh, added = mesh_of(model), []
        sums = torch.zeros(3, dtype=torch.float64, device=micro_batches[0]["labels"].device)
        for batch in micro_batches:
            batch = _with_reference(self.reference, model, batch)
            other = {name: batch[name][1::2] for name in ("input_ids", "labels", _REFERENCE)}
            ratio = log_ratio(score_rows(model, other).double(), other[_REFERENCE].double())
            is_real = _answers_of(batch)
            counts = is_real.sum().double(), (is_real & batch["is_good"].bool()).sum().double()
            sums += torch.stack((ratio.where(is_real, 0).sum(), *counts))
            added.append(batch)
        total, count, good = sum_over_axes(sums, mesh, *ROW_AXES)
        kl = (total / count.clamp(min=1)).clamp(min=0)
        # 0 without answers of both kinds: there is no margin then.
        weights = [count / n if min(good, count - good) else 0 * n for n in (good, count - good)]
        numbers = {_KL: kl, **dict(zip(_MARGIN_WEIGHTS, weights, strict=True))}
        return [{**batch, **numbers} for batch in added]

    def __call__(self, model: nn.Module, batch: Batch, num_items: float) -> LossAndMetrics | None:
        """Return the loss of a micro-batch divided by the number of answers, and its metrics."""
        labels, is_real = batch["labels"][::2], _answers_of(batch)
        ids = batch["input_ids"][::2]
        scores = score_tokens(model, {"input_ids": ids}, labels, with_entropy=True)
        if scores is None:
            return None
        logps = scores.logprobs.sum(1)
        ratio = log_ratio(logps, batch[_REFERENCE][::2].to(logps.dtype))
        is_good, kl = batch["is_good"].bool(), batch[_KL].to(logps.dtype)
        loss = kto_loss(ratio, is_good, kl, self._options)
        reward = self._options.beta * ratio.detach()
        metrics: dict[str, Any] = {"kl": (kl, 1.0)}
        for name, marked in (("chosen", is_good), ("rejected", ~is_good)):
            metrics[f"rewards/{name}"] = _mean(reward, is_real & marked)
            metrics[f"logps/{name}"] = _mean(logps, is_real & marked)
        metrics["rewards/margins"] = _margin(reward, is_good, is_real, batch)
        is_answer = (labels != IGNORE_INDEX) & _has_score(labels)
        metrics |= _token_metrics(scores, is_answer)
        return LossAndMetrics(loss.where(is_real, 0).sum() / num_items, metrics)


def _with_reference(reference: Reference | None, model: nn.Module, batch: Batch) -> Batch:
    """Add the reference model's log-probabilities to a batch."""
    if _REFERENCE in batch:
        return batch
    assert reference is not None
    return {**batch, _REFERENCE: reference(model, batch)}


def _answers_of(batch: Batch) -> Tensor:
    """Return a mask (B,) of the rated answers, in rows 2i, that have labels; others are padding."""
    return (batch["labels"][::2] != IGNORE_INDEX).any(1)


def _has_score(labels: Tensor) -> Tensor:
    """Return a mask (1, T) of the positions that are scored: all but the first."""
    return (torch.arange(labels.shape[1], device=labels.device) > 0)[None]


def _mean(values: Tensor, is_real: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the values over non-padding pairs, and the number of these pairs."""
    return values.detach().where(is_real, 0).sum(), is_real.sum()


def _margin(
    reward: Tensor, is_good: Tensor, is_real: Tensor, batch: Batch
) -> tuple[Tensor, Tensor]:
    """Return a micro-batch's contribution to the metric of KTO's margin, and its weight.

    The margin is the mean reward of good answers minus that of bad answers, over the optimizer
    step, as in TRL. The factors on their rewards are in the batch (`UnpairedObjective.prepare`).
    """
    good, bad = (batch[name].to(reward.dtype) for name in _MARGIN_WEIGHTS)
    total, count = _mean(torch.where(is_good, good * reward, -bad * reward), is_real)
    return total, count * (good > 0)


def _nll_of_chosen(scores: TokenScores, targets: Tensor, batch: Batch) -> Tensor:
    """Return the mean negative log-likelihood per token of every chosen answer, (B,)."""
    is_scored = chosen_rows((targets != IGNORE_INDEX) & _has_score(targets), batch)
    sums = chosen_rows(scores.logprobs, batch).where(is_scored, 0).sum(1)
    return -sums / is_scored.sum(1).clamp(min=1)


def _token_metrics(scores: TokenScores, is_answer: Tensor) -> dict[str, Any]:
    """Return token metrics of the answers: accuracy, entropy and count."""
    count = is_answer.sum()
    return {
        "mean_token_accuracy": (scores.is_best.where(is_answer, 0).sum(), count),
        "entropy": (scores.entropy.detach().where(is_answer, 0).sum(), count),
        "num_tokens": count,
    }
