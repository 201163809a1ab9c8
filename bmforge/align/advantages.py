"""Computes the advantages of answers from their rewards, with one function per method.

Rewards are (P, G): P prompts with G answers each; NaN marks an answer without a reward. Such an
answer is ignored in means and deviations, and its advantage is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from bmforge.errors import ConfigError

__all__ = [
    "ADVANTAGES",
    "AdvantageName",
    "check_group_size",
    "compute_advantages",
    "discount_kl",
    "weigh_rewards",
]

AdvantageName = Literal["group", "batch", "mean", "leave_one_out", "whitened", "gae"]

# Added to standard deviations, as in TRL and verl.
_EPSILON = 1e-4


def weigh_rewards(rewards: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each answer's rewards; NaN if no function returned a reward.

    Shape:
        rewards: (F, P, G); weights: (F,); returns (P, G)
    """
    total = (rewards * weights[:, None, None]).nansum(0)
    return total.masked_fill(rewards.isnan().all(0), torch.nan)


def check_group_size(name: AdvantageName, size: int) -> None:
    """Raise `ConfigError` if a method compares answers to a prompt, but each prompt has only one.

    Args:
        name: method that computes advantages.
        size: number of answers per prompt.
    """
    if size == 1 and name not in ("batch", "whitened", "gae"):
        raise ConfigError(
            "rollout.num_generations=1 gives every answer the advantage 0 with "
            f"rl.advantage={name!r}, which compares the answers to one prompt. Generate at "
            "least 2 answers per prompt, or use --method reinforce++."
        )


def compute_advantages(rewards: Tensor, name: AdvantageName) -> Tensor:
    """Return the advantage of every answer, in fp64; 0 for answers without a reward.

    Args:
        rewards: rewards of the answers.
        name: key of `ADVANTAGES`; gae and whitened are not supported, because they have one
            advantage per token (`align.token_advantages`).

    Shape:
        rewards: (P, G) -> (P, G)

    Raises:
        ConfigError: the method compares answers to the same prompt, but there is only one per
            prompt.
    """
    check_group_size(name, rewards.shape[1])
    return ADVANTAGES[name](rewards.double()).nan_to_num(nan=0.0)


def _center(rewards: Tensor) -> Tensor:
    """Subtract each group's mean; groups with equal rewards become exactly 0."""
    count = (~rewards.isnan()).sum(1, keepdim=True)
    mean = rewards.nansum(1, keepdim=True) / count
    centered = rewards - mean
    filled_low, filled_high = rewards.nan_to_num(torch.inf), rewards.nan_to_num(-torch.inf)
    is_equal = filled_low.amin(1, keepdim=True) >= filled_high.amax(1, keepdim=True)
    return torch.where(is_equal & ~rewards.isnan(), 0.0, centered)


def _deviation(values: Tensor, dim: int | None = None) -> Tensor:
    """Return the sample standard deviation (n - 1), or 0 for fewer than two values."""
    is_scored = ~values.isnan()
    dims = tuple(range(values.dim())) if dim is None else (dim,)
    count = is_scored.sum(dims, keepdim=True)
    mean = values.nansum(dims, keepdim=True) / count
    squares = ((values - mean) ** 2).nansum(dims, keepdim=True)
    return (squares / (count - 1).clamp(min=1)).sqrt()


def _by_group(rewards: Tensor) -> Tensor:
    """Return (reward - group mean) / group deviation (GRPO, arXiv 2402.03300)."""
    return _center(rewards) / (_deviation(rewards, 1) + _EPSILON)


def _by_batch(rewards: Tensor) -> Tensor:
    """Return (reward - group mean) / batch deviation (Lite PPO, arXiv 2508.08221)."""
    centered = _center(rewards) if rewards.shape[1] > 1 else rewards - rewards.nanmean()
    return centered / (_deviation(rewards) + _EPSILON)


def _leave_one_out(rewards: Tensor) -> Tensor:
    """Return the reward minus the mean of the group's other answers (RLOO, arXiv 2402.14740)."""
    count = (~rewards.isnan()).sum(1, keepdim=True)
    return _center(rewards) * count / (count - 1).clamp(min=1)


# Name -> function from rewards to advantages, (P, G); NaN stays NaN.
ADVANTAGES: Mapping[AdvantageName, Callable[[Tensor], Tensor]] = {
    "group": _by_group,
    "batch": _by_batch,
    "mean": _center,  # Dr. GRPO, arXiv 2503.20783
    "leave_one_out": _leave_one_out,
}


def discount_kl(rewards: Tensor, kl: Tensor, mask: Tensor, beta: float) -> Tensor:
    """Return REINFORCE++'s token advantages: reward minus the sum of later KL terms, whitened.

    The mean and the deviation are those of all tokens, as in OpenRLHF and verl (arXiv 2501.03262).

    Args:
        rewards: reward of each answer; NaN for an answer without a reward.
        kl: estimate of the KL divergence of every token (k1).
        mask: tokens of the answers.
        beta: coefficient of the KL.

    Shape:
        rewards: (N,); kl, mask: (N, T); returns (N, T) in fp64, 0 outside of the mask
    """
    kl = kl.double() * mask
    to_come = kl.flip(1).cumsum(1).flip(1)
    returns = rewards.double()[:, None] - beta * to_come
    returns = returns.masked_fill(~mask.bool(), torch.nan)
    flat = _center(returns.reshape(1, -1))
    return (flat / (_deviation(flat, 1) + _EPSILON)).view_as(returns).nan_to_num(nan=0.0)
