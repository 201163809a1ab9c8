"""Training objectives of reward models.

An outcome reward model is a sequence classifier with one output, trained on pairs of answers. A
process reward model is a token classifier with two classes, trained on the labels of steps.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.align.losses import reward_loss
from bmforge.align.prefix_sharing import pairs_of
from bmforge.batch import IGNORE_INDEX, Batch
from bmforge.device import accumulation_dtype
from bmforge.train import LossAndMetrics
from bmforge.train.metric_sums import MetricKind

__all__ = ["ProcessRewardObjective", "RewardObjective"]


class RewardObjective:
    """Training objective of reward models: the Bradley-Terry loss of pairs.

    Row 2i of a batch is the chosen and row 2i + 1 the rejected answer of a pair. Batches have
    ``input_ids``, ``attention_mask`` and ``labels``, (2B, T), and ``margin``, (B,). A reward is the
    classifier's output at the last token of `attention_mask`.

    Args:
        center_coefficient: factor on the squared sum of both rewards, which keeps rewards near 0.
    """

    metrics: Mapping[str, MetricKind] = {
        "accuracy": "mean",
        "margin": "mean",
        "mean_reward": "mean",
        "min_reward": "min",
        "max_reward": "max",
    }

    def __init__(self, center_coefficient: float = 0.0) -> None:
        self._center_coefficient = center_coefficient

    def count(self, batch: Batch) -> int:
        """Return the number of pairs in a batch."""
        return int(pairs_of(batch).sum())

    def __call__(self, model: nn.Module, batch: Batch, num_items: float) -> LossAndMetrics | None:
        """Return the loss of a micro-batch divided by the number of pairs, and its metrics."""
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        if logits is None:  # an earlier stage of a pipeline
            return None
        rewards = logits[:, 0].to(accumulation_dtype(logits.dtype))
        is_real = pairs_of(batch)
        chosen, rejected = rewards[::2], rewards[1::2]
        loss = reward_loss(
            chosen, rejected, batch["margin"].to(rewards.dtype), self._center_coefficient
        )
        good, bad = chosen.detach()[is_real], rejected.detach()[is_real]
        count = is_real.sum()
        metrics = {
            "accuracy": ((good > bad).sum(), count),
            "margin": ((good - bad).sum(), count),
            "mean_reward": (good.sum() + bad.sum(), 2 * count),
        }
        if int(count):
            metrics["min_reward"] = min(good.min(), bad.min())
            metrics["max_reward"] = max(good.max(), bad.max())
        return LossAndMetrics(loss.where(is_real, 0).sum() / num_items, metrics)


class ProcessRewardObjective:
    """Training objective of process reward models: the cross-entropy at the ends of steps.

    Batches have ``input_ids``, ``attention_mask`` and ``labels``, (B, T), with the class 1
    (correct) or 0 (wrong) at the last token of each labeled step. The reward of a step is the
    probability of class 1. The loss is the mean over all steps of an optimizer step, as in TRL's
    PRMTrainer.

    Source: Lightman et al., "Let's verify step by step" (arXiv 2305.20050); Uesato et al., "Solving
    math word problems with process- and outcome-based feedback" (arXiv 2211.14275).
    """

    metrics: Mapping[str, MetricKind] = {
        "accuracy": "mean",
        "mean_reward": "mean",
        "mean_reward_right": "mean",
        "mean_reward_wrong": "mean",
    }

    def count(self, batch: Batch) -> int:
        """Return the number of labeled steps in a batch."""
        return int((batch["labels"] != IGNORE_INDEX).sum())

    def __call__(self, model: nn.Module, batch: Batch, num_items: float) -> LossAndMetrics | None:
        """Return the loss of a micro-batch divided by the number of steps, and its metrics."""
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        if logits is None:  # an earlier stage of a pipeline
            return None
        labels = batch["labels"]
        is_end = labels != IGNORE_INDEX
        logits = logits[:, -labels.shape[1] :]  # without the positions of a soft prompt
        logprobs = F.log_softmax(logits.to(accumulation_dtype(logits.dtype)), -1)
        picked = logprobs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        rewards = logprobs.detach()[..., 1].exp()
        is_right = (rewards > 0.5) == (labels == 1)
        metrics = {
            "accuracy": _mean(is_right.to(rewards.dtype), is_end),
            "mean_reward": _mean(rewards, is_end),
            "mean_reward_right": _mean(rewards, labels == 1),
            "mean_reward_wrong": _mean(rewards, labels == 0),
        }
        return LossAndMetrics(-picked.where(is_end, 0).sum() / num_items, metrics)


def _mean(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the values within the mask, and the number of these values."""
    return values.where(mask, 0).sum(), mask.sum()
