"""Policy losses and advantages against plain implementations, token by token."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from bmforge.align.advantages import compute_advantages, discount_kl, weigh_rewards
from bmforge.align.policy import (
    METHODS,
    Policy,
    PolicyConfig,
    PolicyInputs,
    count_items,
    estimate_kl,
    policy_loss,
)
from bmforge.errors import ConfigError

LENGTHS, WIDTH, MAX_TOKENS = (5, 1, 0, 7, 3), 8, 9


def _plain_log_ratio(level: str, logs: dict[int, Tensor], t: int) -> Any:
    mean = sum(logs.values()) / len(logs)
    if level == "token":
        return logs[t]
    if level == "sequence":
        return mean
    return (
        sum(logs.values())
        if level == "sequence_sum"
        else mean.detach() + logs[t] - logs[t].detach()
    )


def _plain_loss(inputs: PolicyInputs, config: Policy) -> Tensor:
    """The mean loss of a step by the formulas of the papers, with Python loops over scalars."""
    answers = []
    for row in range(len(inputs.mask)):
        places = [t for t in range(WIDTH) if inputs.mask[row, t]]
        if not places:
            continue
        old = inputs.logprobs.detach() if inputs.old is None else inputs.old
        logs = {t: inputs.logprobs[row, t] - old[row, t] for t in places}
        losses = []
        for t in places:
            advantage = float(inputs.advantages[row, t])
            ratio = _plain_log_ratio(config.ratio, logs, t)
            ratio = torch.as_tensor(ratio).exp()
            if config.clip == "cispo":
                weight = min(float(ratio.detach()), config.clip_high)
                loss = -weight * advantage * inputs.logprobs[row, t]
            elif config.clip == "none":
                loss = -ratio * advantage
            else:
                clipped = min(max(float(ratio.detach()), 1 - config.clip_low), 1 + config.clip_high)
                free = ratio
                if config.clip_dual is not None and advantage < 0 and ratio > config.clip_dual:
                    free = torch.tensor(config.clip_dual, dtype=torch.float64)
                is_clipped = clipped * advantage < float(free.detach()) * advantage
                loss = -clipped * advantage if is_clipped else -free * advantage
                loss = torch.as_tensor(loss, dtype=torch.float64)
            if config.correction != "none":
                weight = math.exp(float(old[row, t] - inputs.sampler[row, t]))
                cap = config.correction_cap
                if config.correction == "truncate":
                    weight = min(weight, cap)
                elif not 1 / cap <= weight <= cap:
                    weight = 0.0
                loss = loss * weight
            if config.beta and config.kl_in == "loss":
                gap = inputs.logprobs[row, t] - inputs.reference[row, t]
                kl = {"k1": gap, "k2": gap * gap / 2, "k3": (-gap).exp() - 1 + gap}[config.kl]
                loss = loss + config.beta * kl * (logs[t].exp() if config.kl_importance else 1)
            losses.append(loss - config.entropy_bonus * inputs.entropy[row, t])
        answers.append(losses)
    flat = [loss for losses in answers for loss in losses]
    if config.normalize == "sequence":
        return sum(sum(losses) / len(losses) for losses in answers) / len(answers)
    if config.normalize == "token":
        return sum(flat) / len(flat)
    if config.ratio == "sequence_sum":
        flat = [losses[0] * 0 + sum(losses) / len(losses) for losses in answers]
    return sum(flat) / len(answers) / (MAX_TOKENS if config.normalize == "fixed" else 1)


def _inputs(seed: int, on_policy: bool = False) -> PolicyInputs:
    generator = torch.Generator().manual_seed(seed)

    def draw(scale: float = 1.0) -> Tensor:
        return torch.randn(len(LENGTHS), WIDTH, generator=generator, dtype=torch.float64) * scale

    mask = torch.stack([(torch.arange(WIDTH) < n).double() for n in LENGTHS])
    logprobs = (draw() - 3) * mask
    old = None if on_policy else (logprobs + draw(0.5)) * mask
    sampler = (logprobs + draw(0.8)) * mask
    return PolicyInputs(
        logprobs.requires_grad_(True),
        mask,
        draw(),
        old,
        (logprobs.detach() + draw(0.4)) * mask,
        sampler,
        draw().abs(),
    )


def _compare(config: Policy, inputs: PolicyInputs) -> None:
    config.check()
    loss, _ = policy_loss(inputs, config, MAX_TOKENS)
    loss = loss / count_items(inputs.mask, config)
    wanted = _plain_loss(inputs, config)
    torch.testing.assert_close(loss, wanted, rtol=1e-11, atol=1e-12)
    found = torch.autograd.grad(loss, inputs.logprobs)[0]
    expected = torch.autograd.grad(wanted, inputs.logprobs)[0]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_methods_have_loss_and_gradient_of_the_formulas(name: str, on_policy: bool) -> None:
    for seed in range(3):
        fields: dict[str, Any] = dict(METHODS[name])
        _compare(Policy(**fields), _inputs(seed, on_policy))
        if name != "rloo":
            fields |= {"beta": 0.3, "kl": "k3", "kl_in": "loss"}
            _compare(Policy(**fields), _inputs(seed, on_policy))


_PARTS = {
    "ratio": ("token", "sequence", "sequence_token", "sequence_sum"),
    "clip": ("ppo", "cispo", "none"),
    "normalize": ("sequence", "token", "fixed", "sum"),
    "correction": ("none", "truncate", "mask"),
}
_COMBINATIONS = [dict(zip(_PARTS, v, strict=True)) for v in itertools.product(*_PARTS.values())]


@pytest.mark.parametrize("number", range(0, len(_COMBINATIONS), 11))
def test_parts_combine(number: int) -> None:
    fields = _COMBINATIONS[number]
    if fields["ratio"] == "sequence_sum" and fields["normalize"] in ("fixed", "sum"):
        fields = {**fields, "normalize": "sequence"}
    config = Policy(
        **fields,
        clip_dual=3.0 if fields["clip"] == "ppo" else None,
        beta=0.2,
        kl=("k1", "k2", "k3")[number % 3],
        kl_importance=bool(number % 2),
        entropy_bonus=0.01,
    )
    _compare(config, _inputs(number))


def test_a_dual_clip_below_the_upper_bound_bounds_the_loss() -> None:
    """arXiv 1912.09729, equation 5: with a negative advantage the loss is at most clip_dual."""
    ratio = torch.tensor([[0.5, 0.9, 1.05, 1.15, 1.3, 4.0]], dtype=torch.float64)
    logprobs = ratio.log().requires_grad_(True)
    ones = torch.ones_like(ratio)
    inputs = PolicyInputs(logprobs, ones, -ones, torch.zeros_like(ratio))
    loss, _ = policy_loss(inputs, Policy(clip_dual=1.1, normalize="token"), MAX_TOKENS)
    assert float(loss.detach()) == pytest.approx(0.8 + 0.9 + 1.05 + 3 * 1.1, rel=1e-12)
    gradient = torch.autograd.grad(loss, logprobs)[0]
    assert gradient[0].tolist() == pytest.approx([0, 0.9, 1.05, 0, 0, 0], abs=1e-12)


def test_the_first_update_has_the_ratio_one_and_clips_nothing() -> None:
    inputs = _inputs(0, on_policy=True)
    for name in METHODS:
        config = Policy(**METHODS[name])
        _, sums = policy_loss(inputs, config, MAX_TOKENS)
        assert all(float(sums[key]) == 0 for key in ("clip_low", "clip_high", "clip_region"))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_of_two_tokens_has_the_analytic_value_and_gradient(kind: str) -> None:
    """A policy over two tokens: the expectation over both is KL(p || q) and its gradient."""
    logits = torch.tensor([0.3, -0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.2, 0.4], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    p = logprobs.exp().detach()
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    wanted = torch.autograd.grad(exact, logits, retain_graph=True)[0]
    estimate = estimate_kl(logprobs, reference, kind)
    if kind != "k2":  # k1 and k3 have no bias
        torch.testing.assert_close((p * estimate).sum(), exact.detach(), rtol=1e-12, atol=0)
        assert float((p * estimate.detach()).sum()) > 0
    # On-policy, k2's gradient is the reverse KL's; k1's and k3's are with the weight pi/old.
    weight = 1.0 if kind == "k2" else (logprobs - logprobs.detach()).exp()
    found = torch.autograd.grad((p * estimate * weight).sum(), logits, retain_graph=True)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    if kind == "k1":  # without the weight its gradient vanishes
        plain = torch.autograd.grad((p * estimate).sum(), logits)[0]
        torch.testing.assert_close(plain, torch.zeros_like(plain), rtol=0, atol=1e-12)


def _plain_advantage(groups: list[list[float | None]], name: str) -> list[list[float]]:
    everything = [r for group in groups for r in group if r is not None]
    out = []
    for group in groups:
        known = [r for r in group if r is not None]
        row = []
        for reward in group:
            if reward is None or len(set(known)) == 1:
                row.append(0.0)
            elif name == "leave_one_out":
                row.append(reward - (sum(known) - reward) / (len(known) - 1))
            else:
                centered = reward - statistics.fmean(known)
                spread = {"group": known, "batch": everything, "mean": None}[name]
                row.append(centered if spread is None else centered / (_stdev(spread) + 1e-4))
        out.append(row)
    return out


def _stdev(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


GROUPS: list[list[float | None]] = [
    [1.0, 0.0, 0.5, 0.25],
    [0.1, 0.1, 0.1, 0.1],  # equal: their mean is not 0.1 in binary
    [None, 2.0, None, -1.0],
    [None, 3.0, None, None],
    [None, None, None, None],
]


@pytest.mark.parametrize("name", ["group", "batch", "mean", "leave_one_out"])
def test_advantages_are_those_of_the_formulas(name: Any) -> None:
    rewards = torch.tensor([[math.nan if r is None else r for r in g] for g in GROUPS])
    found = compute_advantages(rewards, name)
    wanted = torch.tensor(_plain_advantage(GROUPS, name), dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
    assert found[[1, 3, 4]].abs().max() == 0


def test_one_answer_per_prompt_is_refused_where_it_gives_no_advantage() -> None:
    one = torch.tensor([[1.0], [0.0]])
    for name in ("group", "mean", "leave_one_out"):
        with pytest.raises(ConfigError, match="num_generations=1"):
            compute_advantages(one, name)  # type: ignore[arg-type]
    assert compute_advantages(one, "batch").abs().min() > 0


def test_rewards_are_weighed_and_none_is_left_out() -> None:
    nan = math.nan
    rewards = torch.tensor([[[1.0, nan, nan]], [[2.0, 4.0, nan]]])
    total = weigh_rewards(rewards, torch.tensor([1.0, 0.5]))
    assert total[0, :2].tolist() == [2.0, 2.0]
    assert math.isnan(total[0, 2])


def test_kl_to_come_is_subtracted_and_padding_changes_nothing() -> None:
    rewards = torch.tensor([1.0, -0.5, math.nan], dtype=torch.float64)
    kl = torch.tensor([[0.1, 0.2, 0.3], [0.4, 9.0, 9.0], [1.0, 1.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]])
    returns = [1 - 0.5 * 0.6, 1 - 0.5 * 0.5, 1 - 0.5 * 0.3, -0.5 - 0.5 * 0.4]
    mean, spread = statistics.fmean(returns), statistics.stdev(returns)
    white = [(r - mean) / (spread + 1e-4) for r in returns]
    wanted = torch.tensor([white[:3], [white[3], 0, 0], [0, 0, 0]], dtype=torch.float64)
    found = discount_kl(rewards, kl, mask, 0.5)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    pad = torch.nn.functional.pad
    wide = discount_kl(rewards, pad(kl, (0, 4), value=7.0), pad(mask, (0, 4)), 0.5)
    torch.testing.assert_close(wide[:, :3], found, rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"clip_low": 1.5}, "clip_low=1.5"),
        ({"clip_dual": 0.5}, "clip_dual=0.5"),
        ({"kl_in": "reward", "kl": "k3", "beta": 0.1}, "kl=k3"),
        ({"beta": -1.0}, "beta=-1.0"),
    ],
)
def test_numbers_out_of_range_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Policy(**fields).check()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kl": "k2"}, "kl=k2 has no effect with rl.beta=0"),
        ({"kl_in": "loss"}, "kl_in=loss has no effect with rl.beta=0"),
        ({"kl_importance": False}, "kl_importance=False has no effect with rl.beta=0"),
        (
            {"beta": 0.1, "kl": "k1", "kl_in": "reward", "kl_importance": True},
            "kl_importance=True has no effect with rl.kl_in=reward",
        ),
        ({"correction_cap": 3.0}, "correction_cap=3.0 has no effect with rl.correction=none"),
        ({"clip": "cispo", "clip_low": 0.1}, "clip_low=0.1 has no effect with rl.clip=cispo"),
        ({"clip": "none", "clip_high": 0.1}, "clip_high=0.1 has no effect with rl.clip=none"),
    ],
)
def test_options_without_effect_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PolicyConfig(**fields).resolve("grpo")


def test_given_parts_replace_those_of_the_method() -> None:
    policy = PolicyConfig(clip_high=0.2, beta=0.1).resolve("dapo")
    assert policy == Policy(normalize="token", clip_high=0.2, beta=0.1)
    with pytest.raises(ConfigError, match="method='trpo'"):
        PolicyConfig().resolve("trpo")
