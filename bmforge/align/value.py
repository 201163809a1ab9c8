"""PPO's value model: generalized advantage estimation, and the loss of the value model.

A value model is a sequence classifier with one output, like a reward model. Its output at a token
is the value of the state after this token: the expected sum of later rewards.

Sources: Schulman et al., "Proximal policy optimization algorithms" (arXiv 1707.06347), and
"High-dimensional continuous control using generalized advantage estimation" (arXiv 1506.02438).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bmforge.align.rollout_batches import INPUT_NAMES, mask_answers
from bmforge.batch import Batch
from bmforge.device import accumulation_dtype
from bmforge.errors import ConfigError
from bmforge.train import LossAndMetrics
from bmforge.train.metric_sums import MetricKind
from bmforge.value_ranges import check_values

__all__ = [
    "ValueConfig",
    "ValueObjective",
    "estimate_advantages",
    "place_rewards",
    "predict_values",
    "value_loss",
    "whiten_advantages",
]

# Added to the variance of advantages, as in TRL and verl.
_EPSILON = 1e-8


@dataclass(frozen=True, kw_only=True)
class ValueConfig:
    """Options of PPO's value model; with other methods they raise an error.

    Args:
        init_from: initial value model, as a directory, hub id or short name: a reward model, or a
            language model, which gets a new head (if None: the initial policy with a new head).
        lr: peak learning rate of the value model.
        cliprange: maximum difference between a value and its value at the rollout in the clipped
            value loss.
    """

    init_from: str | None = None
    lr: float = 1e-5
    cliprange: float = 0.2

    def check(self, has_effect: bool) -> None:
        """Raise `ConfigError` for a number out of range, or an option without effect."""
        usual = ValueConfig()
        for name, value in vars(self).items():
            if not has_effect and value != getattr(usual, name):
                raise ConfigError(
                    f"value.{name}={value!r} has no effect without rl.advantage=gae. Remove "
                    f"value.{name}, or use --method ppo."
                )
        check_values(self, "value.")


def place_rewards(rewards: Tensor, kl: Tensor, mask: Tensor, beta: float) -> Tensor:
    """Return the reward of every token: its KL penalty, plus the answer's reward at the last token.

    Args:
        rewards: reward of each answer.
        kl: estimate of the KL divergence at each token.
        mask: tokens that the policy has generated.
        beta: coefficient of the KL.

    Shape:
        rewards: (N,); kl, mask: (N, T); returns (N, T), 0 outside of the mask
    """
    positions = torch.arange(mask.shape[1])
    is_last = positions == (positions * mask).argmax(1, keepdim=True)
    table = rewards[:, None] * is_last - beta * kl
    return table.where(mask, 0)


def estimate_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> Tensor:
    """Return generalized advantage estimates; tokens outside of the mask are skipped.

    Padding and tool results within an answer therefore have no effect: the state after a token is
    the state before the next token of the mask.

    Args:
        rewards: reward of each token.
        values: value of the state before each token.
        mask: tokens that the policy has generated.
        gamma: discount factor.
        lam: lambda of generalized advantage estimation, from 0 (one step) to 1 (full returns).

    Shape:
        all (N, T); returns (N, T), 0 outside of the mask
    """
    advantages = torch.zeros_like(values)
    later, next_value = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        is_own = mask[:, t]
        error = rewards[:, t] + gamma * next_value - values[:, t]
        later = torch.where(is_own, error + gamma * lam * later, later)
        next_value = torch.where(is_own, values[:, t], next_value)
        advantages[:, t] = torch.where(is_own, later, 0)
    return advantages


def whiten_advantages(advantages: Tensor, mask: Tensor) -> Tensor:
    """Return advantages with mean 0 and variance 1 over all tokens of the mask.

    The variance has the denominator n - 1, as in TRL and verl; the advantage of a single token
    becomes 0.

    Shape:
        advantages, mask: (N, T); returns (N, T), 0 outside of the mask
    """
    own = advantages[mask]
    if not len(own):
        return torch.zeros_like(advantages)
    centered = advantages - own.mean()
    variance = (centered[mask] ** 2).sum() / max(1, len(own) - 1)
    return (centered * torch.rsqrt(variance + _EPSILON)).where(mask, 0)


def predict_values(model: Any, batch: Batch) -> Tensor | None:
    """Return the value of the state before each token; None on pipeline stages before the last.

    Args:
        model: sequence classifier with one output.
        batch: micro-batch of answers, as in `collate_answers`.

    Shape:
        returns (B, T), in fp32 or wider
    """
    rows, length = batch["input_ids"].shape
    before = (torch.arange(length, device=batch["input_ids"].device) - 1).clamp(min=0)
    inputs = {name: batch[name] for name in INPUT_NAMES}
    logits = model(**inputs, logits_at=before.expand(rows, -1)).logits
    return None if logits is None else logits[..., 0].to(accumulation_dtype(logits.dtype))


def value_loss(
    values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, cliprange: float
) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped value loss of every token, and a bool mask of the clipped tokens.

    Args:
        values: predictions of the value model, with gradient.
        old: predictions at the time of the rollout.
        returns: old values plus advantages, before whitening.
        mask: tokens that the policy has generated.
        cliprange: maximum change of a value.

    Shape:
        all (B, T)
    """
    near = values.clamp(old - cliprange, old + cliprange)
    plain, clipped = (values - returns) ** 2, (near - returns) ** 2
    return (0.5 * torch.maximum(plain, clipped)).where(mask, 0), (clipped > plain) & mask


class ValueObjective:
    """Training objective of the value model: the clipped loss, averaged over tokens.

    Args:
        cliprange: see `ValueConfig`.
    """

    metrics: Mapping[str, MetricKind] = {
        "loss/value_avg": "mean",
        "val/clipfrac_avg": "mean",
        "val/mean": "mean",
    }

    def __init__(self, cliprange: float) -> None:
        self._cliprange = cliprange

    def count(self, batch: Batch) -> int:
        """Return the number of scored tokens."""
        return int(mask_answers(batch["labels"]).sum())

    def __call__(self, model: Any, batch: Batch, num_items: float) -> LossAndMetrics | None:
        """Return the loss of a micro-batch divided by `num_items`, and its metrics."""
        values = predict_values(model, batch)
        if values is None:
            return None
        mask, count = mask_answers(batch["labels"]), mask_answers(batch["labels"]).sum()
        old, returns = (batch[name].to(values.dtype) for name in ("values", "returns"))
        losses, is_clipped = value_loss(values, old, returns, mask, self._cliprange)
        metrics = {
            "loss/value_avg": (losses.detach().sum(), count),
            "val/clipfrac_avg": (is_clipped.sum(), count),
            "val/mean": (values.detach().where(mask, 0).sum(), count),
        }
        return LossAndMetrics(losses.sum() / num_items, metrics)
