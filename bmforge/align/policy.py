"""Policy-gradient losses of reinforcement learning, combined from tables of functions.

A `Policy` names one entry of each table; `METHODS` are the published combinations. All functions
work on (B, T) tensors whose mask is 1 on the tokens of answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from bmforge.align.advantages import AdvantageName
from bmforge.errors import ConfigError
from bmforge.value_ranges import check_values

__all__ = [
    "METHODS",
    "Policy",
    "PolicyConfig",
    "PolicyInputs",
    "correct_sampling",
    "count_items",
    "estimate_kl",
    "policy_loss",
]

RatioName = Literal["token", "sequence", "sequence_token", "sequence_sum"]
ClipName = Literal["ppo", "cispo", "none"]
NormalizeName = Literal["sequence", "token", "fixed", "sum"]
EstimatorName = Literal["k1", "k2", "k3"]
CorrectionName = Literal["none", "truncate", "mask"]


@dataclass(kw_only=True)
class PolicyConfig:
    """Options of a policy loss. Fields that are None take the default of the method (`METHODS`).

    Args:
        advantage: estimator of an answer's advantage. "group": reward minus the group mean, divided
            by the group's standard deviation; "batch": divided by the batch's standard deviation;
            "mean": not divided; "leave_one_out": reward minus the mean of the group's other
            answers; "whitened": normalized over all tokens of the batch; "gae": generalized
            advantage estimation for each token, with a value model (if None: the method's default).
        ratio: probability ratio pi/old in the loss. "token": ratio of each token; "sequence": exp
            of the mean log-ratio of the answer (GSPO); "sequence_token": the same value, with
            per-token gradients (GSPO-token); "sequence_sum": exp of the summed log-ratios of the
            answer (if None: sequence for gspo, sequence_sum for rloo, else token).
        clip: form of the policy loss. "ppo": clipped surrogate of PPO; "cispo": policy gradient
            with a clipped weight; "none": policy gradient without clipping (if None: cispo for
            cispo, else ppo).
        clip_low: distance from 1 to the lower clipping bound of the ratio, which is 1 - clip_low;
            for clip "ppo" only (if None: 0.0003 for gspo, else 0.2).
        clip_high: distance from 1 to the upper clipping bound of the ratio, which is 1 + clip_high;
            for clip "cispo", the upper bound itself (if None: 0.28 for dapo, 0.0004 for gspo, 5 for
            cispo, else 0.2).
        clip_dual: upper bound, above 1, of the ratio for negative advantages (dual-clip PPO, arXiv
            1912.09729); for clip "ppo" only (if None: no bound).
        normalize: averaging of the token losses. "sequence": mean over each answer, then over
            answers; "token": mean over all tokens of the step; "fixed": sum over all tokens divided
            by answers x max_new_tokens; "sum": sum over each answer, then mean over answers (if
            None: sequence for grpo, rloo and gspo, fixed for dr_grpo, else token).
        beta: coefficient of the KL divergence to the reference model; 0 uses no reference model (if
            None: 0.05 for rloo and ppo, else 0).
        kl: estimator of the KL divergence: "k1" = log pi - log ref; "k2" = k1^2 / 2; "k3" = ref/pi
            - 1 + k1 (if None: k1 for rloo, reinforce++ and ppo, else k3).
        kl_in: use of the KL divergence: "reward" subtracts it from the reward, "loss" adds it to
            the loss (if None: reward for rloo, reinforce++ and ppo, else loss).
        kl_importance: multiply the KL divergence in the loss by pi/old, so that its gradient is
            that of the reverse KL divergence; called use_bias_correction_kl in TRL (if None: on).
        correction: importance correction if sampler and trained policy differ, by the weight
            old/sampler of each token. "none": no correction; "truncate": weights are limited to
            correction_cap; "mask": tokens with a weight above correction_cap or below 1 /
            correction_cap are left out (if None: none).
        correction_cap: maximum weight of the importance correction, at least 1 (if None: 2).
        entropy_bonus: coefficient of the policy's entropy in the objective (if None: 0).
        gamma: discount factor of later rewards, from 0 to 1, for advantage "gae" (if None: 1).
        lam: lambda of generalized advantage estimation, from 0 (one-step estimates) to 1 (full
            returns), for advantage "gae" (if None: 0.95).
    """

    advantage: AdvantageName | None = None
    ratio: RatioName | None = None
    clip: ClipName | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    clip_dual: float | None = None
    normalize: NormalizeName | None = None
    beta: float | None = None
    kl: EstimatorName | None = None
    kl_in: Literal["loss", "reward"] | None = None
    kl_importance: bool | None = None
    correction: CorrectionName | None = None
    correction_cap: float | None = None
    entropy_bonus: float | None = None
    gamma: float | None = None
    lam: float | None = None

    def resolve(self, method: str) -> Policy:
        """Return the policy loss of a method; options that are set replace the method's defaults.

        Raises:
            ConfigError: the method is unknown, or a number is out of range or has no effect.
        """
        if method not in METHODS:
            raise ConfigError(
                f"unknown method: method={method!r} (supported: {', '.join(METHODS)})."
            )
        parts = {name: value for name, value in vars(self).items() if value is not None}
        policy = Policy(**{**METHODS[method], **parts})
        policy.check()
        for name, (is_idle, reason) in _find_idle(policy).items():
            if is_idle and name in parts:
                raise ConfigError(
                    f"rl.{name}={parts[name]} has no effect with {reason}. Leave rl.{name} out."
                )
        return policy


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Settings of a policy loss: `PolicyConfig` without None; the defaults are those of GRPO."""

    advantage: AdvantageName = "group"
    ratio: RatioName = "token"
    clip: ClipName = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float | None = None
    normalize: NormalizeName = "sequence"
    beta: float = 0.0
    kl: EstimatorName = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    kl_importance: bool = True
    correction: CorrectionName = "none"
    correction_cap: float = 2.0
    entropy_bonus: float = 0.0
    gamma: float = 1.0
    lam: float = 0.95

    def check(self) -> None:
        """Raise `ConfigError` for a number out of range, or a KL option without effect."""
        check_values(self, "rl.")
        wrong = []
        if self.clip == "ppo" and self.clip_low > 1:
            wrong.append(f"rl.clip_low={self.clip_low} must be at most 1")
        if self.clip_dual is not None and (self.clip_dual <= 1 or self.clip != "ppo"):
            wrong.append(f"rl.clip_dual={self.clip_dual} must be above 1 and needs rl.clip=ppo")
        if self.kl_in == "reward" and self.kl != "k1":
            wrong.append(f"rl.kl={self.kl} must be k1 if rl.kl_in=reward")
        for name, usual in (("gamma", 1.0), ("lam", 0.95)):
            value = getattr(self, name)
            if value != usual and self.advantage != "gae":
                wrong.append(f"rl.{name}={value} has no effect without rl.advantage=gae")
        if wrong:
            raise ConfigError(f"{'; '.join(wrong)}.")


def _find_idle(policy: Policy) -> dict[str, tuple[bool, str]]:
    """Return a dict from option to (whether it has no effect, the setting that disables it)."""
    has_kl, clip = policy.beta > 0, f"rl.clip={policy.clip}"
    in_reward = has_kl and policy.kl_in == "reward"
    return {
        "kl": (not has_kl, "rl.beta=0"),
        "kl_in": (not has_kl, "rl.beta=0"),
        "kl_importance": (not has_kl or in_reward, "rl.kl_in=reward" if in_reward else "rl.beta=0"),
        "correction_cap": (policy.correction == "none", "rl.correction=none"),
        "clip_low": (policy.clip != "ppo", clip),
        "clip_high": (policy.clip == "none", clip),
    }


# Published method -> fields that differ from GRPO's.
METHODS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {},  # arXiv 2402.03300
    "dr_grpo": {"advantage": "mean", "normalize": "fixed"},  # 2503.20783
    "dapo": {"clip_high": 0.28, "normalize": "token"},  # 2503.14476
    "rloo": {  # 2402.14740
        **{"advantage": "leave_one_out", "ratio": "sequence_sum"},
        **{"kl": "k1", "kl_in": "reward", "beta": 0.05},
    },
    "gspo": {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},  # 2507.18071
    "cispo": {"clip": "cispo", "clip_high": 5.0, "normalize": "token"},  # 2506.13585
    "reinforce++": {  # 2501.03262
        **{"advantage": "whitened", "normalize": "token", "kl": "k1", "kl_in": "reward"},
    },
    "ppo": {  # 1707.06347, with a value model
        **{"advantage": "gae", "normalize": "token"},
        **{"kl": "k1", "kl_in": "reward", "beta": 0.05},
    },
}


class PolicyInputs(NamedTuple):
    """Tensors of a micro-batch of answers; optional ones may be None.

    Args:
        logprobs: log-probabilities of the trained policy, with gradient.
        mask: 1 on the answer tokens that contribute to the loss.
        advantages: advantage of each token.
        old: log-probabilities at the beginning of the update; if None, detached `logprobs`.
        reference: log-probabilities of the reference model.
        sampler: log-probabilities of the policy that generated the answers.
        entropy: entropy at each token.

    Shape:
        all (B, T)
    """

    logprobs: Tensor
    mask: Tensor
    advantages: Tensor
    old: Tensor | None = None
    reference: Tensor | None = None
    sampler: Tensor | None = None
    entropy: Tensor | None = None


def _mean_of_answer(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of each row over its mask, (B, 1); 0 for an empty mask."""
    return (values * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


def _mean_in_value(log_ratio: Tensor, mask: Tensor) -> Tensor:
    mean = _mean_of_answer(log_ratio, mask).detach()
    return mean + log_ratio - log_ratio.detach()


# Name of a ratio -> function (log-ratio of tokens, mask) -> log-ratio.
RATIOS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda log_ratio, mask: log_ratio,
    "sequence": lambda log_ratio, mask: _mean_of_answer(log_ratio, mask).expand_as(log_ratio),
    "sequence_token": _mean_in_value,
    "sequence_sum": lambda log_ratio, mask: (
        (log_ratio * mask).sum(1, keepdim=True).expand_as(log_ratio)
    ),
}


def _clip_ppo(ratio: Tensor, inputs: PolicyInputs, config: Policy) -> Tensor:
    """Return PPO's clipped surrogate loss of every token."""
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    gain = torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)
    if config.clip_dual is not None:
        least = config.clip_dual * inputs.advantages
        gain = torch.where(inputs.advantages < 0, torch.maximum(gain, least), gain)
    return -gain


def _clip_weight(ratio: Tensor, inputs: PolicyInputs, config: Policy) -> Tensor:
    """Return CISPO's loss of every token: a policy gradient weighted by the clipped ratio."""
    return -ratio.clamp(max=config.clip_high).detach() * inputs.advantages * inputs.logprobs


def _weigh_plainly(ratio: Tensor, inputs: PolicyInputs, config: Policy) -> Tensor:
    return -ratio * inputs.advantages


CLIPS: Mapping[str, Callable[[Tensor, PolicyInputs, Policy], Tensor]] = {
    "ppo": _clip_ppo,
    "cispo": _clip_weight,
    "none": _weigh_plainly,
}
ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: log_ratio,
    "k2": lambda log_ratio: log_ratio**2 / 2,
    "k3": lambda log_ratio: torch.expm1(-log_ratio) + log_ratio,
}


def estimate_kl(logprobs: Tensor, reference: Tensor, kind: str) -> Tensor:
    """Return an estimate of KL(policy || reference) at every sampled token.

    Source: Schulman, "Approximating KL divergence" (2020).
    """
    return ESTIMATORS[kind](logprobs - reference)


def correct_sampling(old: Tensor, sampler: Tensor, config: Policy) -> Tensor:
    """Return the importance weight old/sampler of every token, detached, truncated or masked."""
    weight = (old - sampler).exp().detach()
    if config.correction == "truncate":
        return weight.clamp(max=config.correction_cap)
    is_near = (weight <= config.correction_cap) & (weight >= 1 / config.correction_cap)
    return weight * is_near


def _spread(mask: Tensor, config: Policy, max_tokens: int) -> Tensor:
    """Return the weight of each token in the summed loss, before division by `count_items`."""
    if config.normalize == "sequence":
        return mask / mask.sum(1, keepdim=True).clamp(min=1)
    if config.normalize == "fixed":
        return mask / max_tokens
    return mask


def count_items(mask: Tensor, config: Policy) -> int:
    """Return the divisor of a micro-batch's loss: the number of scored tokens or answers."""
    if config.normalize == "token":
        return int(mask.sum())
    return int((mask.sum(1) > 0).sum())


def policy_loss(
    inputs: PolicyInputs, config: Policy, max_tokens: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the summed loss of a micro-batch, to be divided by the step's `count_items`.

    Args:
        inputs: tensors of the answers.
        config: settings of the policy loss.
        max_tokens: maximum length of an answer, for the fixed normalization.

    Returns:
        the loss, and a dict of detached sums over tokens, for metrics: the number of tokens whose
        ratio was clipped, at each bound and in total, and the KL divergence
    """
    mask = inputs.mask.to(inputs.logprobs.dtype)
    inputs = inputs._replace(advantages=inputs.advantages.to(inputs.logprobs.dtype))
    old = inputs.logprobs.detach() if inputs.old is None else inputs.old
    log_ratio = (inputs.logprobs - old) * mask
    ratio = RATIOS[config.ratio](log_ratio, mask).exp()
    loss = CLIPS[config.clip](ratio, inputs, config)
    if config.ratio == "sequence_sum" and config.normalize != "sequence":
        # The loss of an answer is added once, not once per token.
        loss = loss / mask.sum(1, keepdim=True).clamp(min=1)
    if inputs.sampler is not None and config.correction != "none":
        loss = loss * correct_sampling(old, inputs.sampler, config)
    sums = _count_clipped(ratio.detach(), inputs, config, mask)
    if inputs.reference is not None:
        kl = estimate_kl(inputs.logprobs, inputs.reference, config.kl)
        sums["kl"] = (kl.detach() * mask).sum()
        if config.kl_in == "loss":
            weight = (inputs.logprobs - old).exp() if config.kl_importance else 1.0
            loss = loss + config.beta * kl * weight
    if config.entropy_bonus and inputs.entropy is not None:
        loss = loss - config.entropy_bonus * inputs.entropy
    return (loss * _spread(mask, config, max_tokens)).sum(), sums


def _count_clipped(
    ratio: Tensor, inputs: PolicyInputs, config: Policy, mask: Tensor
) -> dict[str, Tensor]:
    """Return a dict with the numbers of tokens whose ratio is clipped at either bound."""
    is_low = (ratio < 1 - config.clip_low) & (inputs.advantages < 0)
    is_high = (ratio > 1 + config.clip_high) & (inputs.advantages > 0)
    if config.clip != "ppo":
        is_low = torch.zeros_like(is_high)
        is_high = ratio > config.clip_high if config.clip == "cispo" else is_low
    low, high = (is_low * mask).sum(), (is_high * mask).sum()
    return {"clip_low": low, "clip_high": high, "clip_region": low + high}
