"""Training objective of reinforcement learning, and the log-probabilities that it needs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bmforge.align.policy import Policy, PolicyInputs, count_items, policy_loss
from bmforge.align.reference import base_adapters
from bmforge.align.rollout_batches import INPUT_NAMES, mask_answers
from bmforge.align.scoring import TokenScores, score_tokens
from bmforge.align.value_training import VALUE_METRICS, ValueTrainer
from bmforge.batch import Batch
from bmforge.errors import ConfigError
from bmforge.parallel import reshard_
from bmforge.records import find_parallel_record
from bmforge.surgery import eval_mode
from bmforge.train.metric_sums import MetricKind, MetricValue
from bmforge.train.objective import LossAndMetrics
from bmforge.tune.delta import list_deltas
from bmforge.tune.delta.selection import choosing_deltas

__all__ = ["PolicyObjective", "PolicyScores", "Reference", "open_reference"]

# Function that returns the reference model's log-probabilities of the labels, (B, T).
Reference = Callable[[Mapping[str, Any], Tensor, float], Tensor]
# Function that returns, for each row, the log-probabilities of all tokens except the first.
RowScorer = Callable[[Sequence[Sequence[int]]], Sequence[Sequence[float]]]
_EXACT = "exact"


def _score(
    model: Any, batch: Batch, temperature: float, with_entropy: bool = False
) -> TokenScores | None:
    inputs = {name: batch[name] for name in INPUT_NAMES}
    return score_tokens(
        model, inputs, batch["labels"], temperature=temperature, with_entropy=with_entropy
    )


def _score_whole(model: Any, batch: Batch, temperature: float) -> Tensor:
    """Return a batch's log-probabilities on every pipeline stage.

    Call this function outside of training steps: then every stage receives the outputs of the last
    stage, and the log-probabilities are never None.
    """
    scores = _score(model, batch, temperature)
    assert scores is not None
    return scores.logprobs


def _score_exactly(score_rows: RowScorer, micro_batches: Sequence[Batch]) -> list[Tensor]:
    """Return the labels' log-probabilities by `score_rows`: fp64, (B, T) for each micro-batch."""
    rows = [
        ids[: int(length)].tolist()
        for batch in micro_batches
        for ids, length in zip(batch["input_ids"], batch["attention_mask"].sum(1), strict=True)
    ]
    values = iter(score_rows(rows))
    scored = []
    for batch in micro_batches:
        exact = torch.zeros_like(batch["labels"], dtype=torch.float64)
        for row in exact:
            logprobs = torch.tensor(next(values), dtype=torch.float64)
            row[1 : 1 + len(logprobs)] = logprobs
        scored.append(exact.where(mask_answers(batch["labels"]), 0))
    return scored


class PolicyObjective:
    """Training objective of reinforcement learning: the policy loss of a micro-batch.

    Args:
        policy: settings of the policy loss.
        temperature: temperature of the rollouts, which divides the logits of all policies.
        max_tokens: maximum length of an answer in tokens.
        rollout_metrics: names of the rollout's metrics, and a function that returns their current
            values.
        score_rows: function that computes the log-probabilities of token ids with the sampling
            kernels; if None, torch's log-probabilities are used.

    Attributes:
        companion: trainer of the value model, set before the first step; None without a value
            model.
    """

    companion: ValueTrainer | None = None

    def __init__(
        self,
        policy: Policy,
        temperature: float,
        max_tokens: int,
        rollout_metrics: tuple[Sequence[str], Callable[[], Mapping[str, float]]] = ((), dict),
        score_rows: RowScorer | None = None,
    ) -> None:
        self._score_rows = score_rows
        self._policy, self._temperature, self._max_tokens = policy, temperature, max_tokens
        names, self._rollout_metrics = rollout_metrics
        means = (*names, *_NAMES.values(), *VALUE_METRICS)
        self._metrics: dict[str, MetricKind] = dict.fromkeys(means, "mean")
        self._metrics |= _EXTREMES

    @property
    def metrics(self) -> Mapping[str, MetricKind]:
        """Dict from metric to its kind, including metrics that reward functions have logged."""
        return {**dict.fromkeys(self._rollout_metrics(), "mean"), **self._metrics}

    def count(self, batch: Batch) -> int:
        """Return the number of scored answers or tokens, as the policy's normalization requires."""
        return count_items(mask_answers(batch["labels"]), self._policy)

    def prepare(self, model: Any, micro_batches: Sequence[Batch]) -> Sequence[Batch]:
        """Train the value model, and add log-probabilities to the micro-batches if necessary.

        With `score_rows`, the added log-probabilities are those of the sampling kernels.
        """
        if self.companion is not None:
            self.companion.train_step(micro_batches)
        if self._score_rows is None:
            return micro_batches
        exact = _score_exactly(self._score_rows, micro_batches)
        return [{**b, _EXACT: values} for b, values in zip(micro_batches, exact, strict=True)]

    def __call__(self, model: Any, batch: Batch, num_items: float) -> LossAndMetrics | None:
        """Return the loss divided by `num_items`, with metrics under TRL's names."""
        scores = _score(model, batch, self._temperature, with_entropy=True)
        if scores is None:  # a pipeline stage before the last
            return None
        logprobs = scores.logprobs
        if _EXACT in batch:  # use the value of the sampling kernels, and torch's gradient
            logprobs = batch[_EXACT].to(logprobs.dtype) + (logprobs - logprobs.detach())
        mask = mask_answers(batch["labels"])
        policies = {
            name: batch[name].to(scores.logprobs.dtype)
            for name in ("old", "reference", "sampler")
            if name in batch
        }
        inputs = PolicyInputs(
            logprobs, mask, batch["advantages"], entropy=scores.entropy, **policies
        )
        loss, sums = policy_loss(inputs, self._policy, self._max_tokens)
        sums["entropy"] = (scores.entropy.detach() * mask).sum()
        count = mask.sum()
        metrics: dict[str, MetricValue] = {_NAMES[name]: (sums[name], count) for name in sums}
        metrics |= _compare_sampler(inputs)
        value_metrics = {} if self.companion is None else self.companion.metrics
        for name, value in {**self._rollout_metrics(), **value_metrics}.items():
            metrics[name] = (value, 1.0)
        return LossAndMetrics(loss / num_items, metrics)


_DIFFERENCE, _RATIO = "sampling/sampling_logp_difference", "sampling/importance_sampling_ratio"
# Name of a sum over tokens -> TRL's name of the mean.
_NAMES = {
    "clip_low": "clip_ratio/low_mean",
    "clip_high": "clip_ratio/high_mean",
    "clip_region": "clip_ratio/region_mean",
    "kl": "kl",
    "entropy": "entropy",
    "difference": f"{_DIFFERENCE}/mean",
    "weight": f"{_RATIO}/mean",
}
_EXTREMES: Mapping[str, MetricKind] = {
    f"{_DIFFERENCE}/max": "max",
    f"{_RATIO}/min": "min",
    f"{_RATIO}/max": "max",
}


@torch.no_grad()
def _compare_sampler(inputs: PolicyInputs) -> dict[str, MetricValue]:
    """Return metrics that compare the log-probabilities of the sampler and of the policy."""
    mask = inputs.mask.bool()
    if inputs.sampler is None or not bool(mask.any()):
        return {}
    old = inputs.logprobs.detach() if inputs.old is None else inputs.old
    gap = (old - inputs.sampler)[mask]
    count, ratio = float(len(gap)), gap.exp()
    return {
        f"{_DIFFERENCE}/mean": (gap.abs().sum(), count),
        f"{_DIFFERENCE}/max": gap.abs().max(),
        f"{_RATIO}/mean": (ratio.sum(), count),
        f"{_RATIO}/min": ratio.min(),
        f"{_RATIO}/max": ratio.max(),
    }


class PolicyScores:
    """Computes old and reference log-probabilities and values of answers; implements `Scores`.

    Args:
        model: trained model.
        temperature: temperature of the rollouts.
        with_old: True to compute the log-probabilities of the trained policy before the update.
        reference: reference policy, if any.
        is_exact: use the log-probabilities of the sampling kernels as the old ones.
        value: trainer of the value model, if any.
    """

    def __init__(
        self,
        model: Any,
        temperature: float,
        with_old: bool,
        reference: Reference | None,
        is_exact: bool = False,
        value: ValueTrainer | None = None,
    ) -> None:
        self._model, self._temperature, self._with_old = model, temperature, with_old
        self._reference, self._is_exact, self._value = reference, is_exact, value

    @torch.no_grad()
    def score(self, batch: Batch) -> Mapping[str, Tensor]:
        """Return the scores that the run uses: ``old``, ``reference``, ``values``, (B, T) each."""
        device = next(self._model.parameters()).device
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        scores: dict[str, Tensor] = {}
        with eval_mode(self._model):
            if self._with_old and self._is_exact:
                scores["old"] = batch["sampler"]
            elif self._with_old:
                scores["old"] = _score_whole(self._model, batch, self._temperature).double()
        if self._reference is not None:
            inputs = {name: batch[name] for name in INPUT_NAMES}
            reference = self._reference(inputs, batch["labels"], self._temperature)
            scores["reference"] = reference.double()
        if self._value is not None:
            scores["values"] = self._value.score(batch).double()
        return scores


def open_reference(
    model: Any, trains_base: bool, make_copy: Callable[[], Any] | None = None
) -> Reference:
    """Return the initial policy as reference: the model without its adapter, or a frozen copy.

    Args:
        model: trained model with its initial weights.
        trains_base: True if modules that are not part of an adapter are trained.
        make_copy: function that builds a second model with the initial weights, in the layout of
            the policy; if None, an unsharded model is copied, and a sharded model raises an error.

    Raises:
        ConfigError: the model is sharded, and `make_copy` is None.
    """
    if list_deltas(model) and not trains_base:
        return _reference_of(model, lambda: choosing_deltas(model, base_adapters(model)))
    if make_copy is None:
        record = find_parallel_record(model)
        is_sharded = any(type(p.data) is not Tensor for p in model.parameters())
        if is_sharded or (record is not None and record.mesh and record.mesh.size() > 1):
            raise ConfigError(
                "make_copy=None is not supported for a sharded model. Pass a function that "
                "builds a second model with the same layout."
            )
        make_copy = partial(copy.deepcopy, model)
    frozen = make_copy().requires_grad_(False)
    score = _reference_of(frozen, nullcontext)

    def reference(inputs: Mapping[str, Any], labels: Tensor, temperature: float) -> Tensor:
        logprobs = score(inputs, labels, temperature)
        reshard_(frozen)  # without a backward pass, gathered weights are not freed
        return logprobs

    return reference


def _reference_of(model: Any, opening: Callable[[], AbstractContextManager[Any]]) -> Reference:
    def reference(inputs: Mapping[str, Any], labels: Tensor, temperature: float) -> Tensor:
        with torch.no_grad(), eval_mode(model), opening():
            return _score_whole(model, {**inputs, "labels": labels}, temperature)

    return reference
