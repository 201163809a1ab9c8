"""Training objective of reward models, which are sequence classifiers with one output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from bmforge.align.losses import reward_loss
from bmforge.batch import IGNORE_INDEX, Batch
from bmforge.train import LossAndMetrics
from bmforge.train.metric_sums import MetricKind

__all__ = ["RewardObjective"]


class RewardObjective:
    """Training objective of reward models: the Bradley-Terry loss of pairs.

    Row 2i of a batch is the chosen and row 2i + 1 the rejected answer of a pair. Batches have
    ``input_ids``, ``attention_mask`` and ``labels``, (2B, T), and ``margin``, (B,). A reward is the
    classifier's output at the last token of `attention_mask`.

    Args:
        center_coefficient: factor of the squared sum of both rewards, which keeps them near 0.
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
        return int((batch["labels"][::2] != IGNORE_INDEX).any(1).sum())

    def prepare(self, model: nn.Module, micro_batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return the micro-batches unchanged."""
        return micro_batches

    def __call__(self, model: nn.Module, batch: Batch, num_items: float) -> LossAndMetrics | None:
        """Return the loss of a micro-batch divided by the number of pairs, and its metrics."""
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        if logits is None:  # an earlier stage of a pipeline
            return None
        rewards = logits[:, 0].float() if logits.itemsize < 4 else logits[:, 0]
        is_real = (batch["labels"][::2] != IGNORE_INDEX).any(1)
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
