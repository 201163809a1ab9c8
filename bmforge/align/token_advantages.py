"""Advantages that differ between an answer's tokens, in PPO and in REINFORCE++."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bmforge.align.advantages import discount_kl
from bmforge.align.policy import Policy
from bmforge.align.rollout_batches import RolloutAnswer
from bmforge.align.value import estimate_advantages, place_rewards, whiten_advantages

__all__ = ["set_token_advantages"]

# Answer index -> values of the answer's tokens.
TokenTable = Mapping[int, Sequence[float]]


def set_token_advantages(
    answers: Sequence[RolloutAnswer],
    rewards: Tensor,
    scores: Mapping[str, TokenTable],
    policy: Policy,
) -> None:
    """Set the advantages of all tokens and, with a value model, its training targets.

    Args:
        answers: all answers of the rollout.
        rewards: reward of each answer; NaN if the answer is excluded from the loss.
        scores: dict with ``kl`` and ``values`` of each token, if the policy uses them.
        policy: settings of the policy loss.
    """
    mask = _tabulate({n: answer.mask for n, answer in enumerate(answers)}, answers).bool()
    kl = _tabulate(scores["kl"] if policy.kl_in == "reward" and policy.beta else {}, answers)
    if policy.advantage == "gae":
        values, mask = _tabulate(scores["values"], answers), mask & ~rewards.isnan()[:, None]
        token_rewards = place_rewards(rewards.nan_to_num(nan=0.0), kl, mask, policy.beta)
        gae = estimate_advantages(token_rewards, values, mask, policy.gamma, policy.lam)
        for answer, row in zip(answers, (gae + values).tolist(), strict=True):
            answer.returns = row[: len(answer.ids)]
        advantages = whiten_advantages(gae, mask)
    else:
        advantages = discount_kl(rewards, kl, mask, policy.beta)
    for answer, row in zip(answers, advantages.tolist(), strict=True):
        answer.advantage = row[: len(answer.ids)]


def _tabulate(rows: TokenTable, answers: Sequence[RolloutAnswer]) -> Tensor:
    """Return the values of all answers' tokens as a tensor (N, T), padded with 0 on the right."""
    table = torch.zeros(len(answers), max(len(a.ids) for a in answers), dtype=torch.float64)
    for number, row in rows.items():
        table[number, : len(row)] = torch.tensor(row, dtype=torch.float64)
    return table
