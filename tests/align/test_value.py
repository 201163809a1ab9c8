"""Generalized advantage estimation and the value loss, against plain loops over numbers."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from bmforge.align.rollout_batches import RolloutAnswer, collate_answers
from bmforge.align.value import (
    ValueObjective,
    estimate_advantages,
    place_rewards,
    predict_values,
    value_loss,
    whiten_advantages,
)
from bmforge.models import GPT2, GPT2Config, Llama, LlamaConfig, Model
from bmforge.tune.delta import SoftPrompt


def plain_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """The definition: the sum over later errors, each weighted by (gamma lam)^distance."""
    later = [*values[1:], 0.0]
    errors = [r + gamma * n - v for r, n, v in zip(rewards, later, values, strict=True)]
    return [
        sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, len(errors)))
        for t in range(len(errors))
    ]


def draw_rows(seed: int, lengths: list[int]) -> list[tuple[list[float], list[float], float]]:
    """KL, values and reward of answers with some lengths."""
    draw = random.Random(seed)
    return [
        (
            [draw.gauss(0, 0.1) for _ in range(n)],
            [draw.gauss(0, 1) for _ in range(n)],
            draw.gauss(0, 2),
        )
        for n in lengths
    ]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    gaps=st.integers(0, 3),
    gamma=st.sampled_from([1.0, 0.99, 0.5, 0.0]),
    lam=st.sampled_from([1.0, 0.95, 0.3, 0.0]),
)
def test_advantages_are_those_of_plain_loops_whatever_lies_between_tokens(
    seed: int, lengths: list[int], gaps: int, gamma: float, lam: float
) -> None:
    """Padding, and other texts between the tokens of an answer, change nothing."""
    rows, draw, beta = draw_rows(seed, lengths), random.Random(seed + 1), 0.3
    width = max(lengths) + gaps
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    kl, values = torch.randn(2, len(rows), width, dtype=torch.float64).unbind()
    places = [sorted(draw.sample(range(width), len(row[0]))) for row in rows]
    for n, (row_kl, row_values, _) in enumerate(rows):
        mask[n, places[n]] = True
        kl[n, places[n]] = torch.tensor(row_kl, dtype=torch.float64)
        values[n, places[n]] = torch.tensor(row_values, dtype=torch.float64)
    scores = torch.tensor([row[2] for row in rows], dtype=torch.float64)
    rewards = place_rewards(scores, kl, mask, beta)
    found = estimate_advantages(rewards, values, mask, gamma, lam)
    expected = []
    for row_kl, row_values, reward in rows:
        each = [-beta * value for value in row_kl]
        each[-1] += reward
        expected.append(plain_gae(each, row_values, gamma, lam))
    for n, row in enumerate(expected):
        assert found[n, places[n]].tolist() == pytest.approx(row, rel=1e-11, abs=1e-12)
        assert not found[n][~mask[n]].any()
    flat = [value for row in expected for value in row]
    spread = statistics.stdev(flat) if len(flat) > 1 else 0.0
    white = whiten_advantages(found, mask)
    for n, row in enumerate(expected):
        wanted = [(v - statistics.fmean(flat)) / math.sqrt(spread**2 + 1e-8) for v in row]
        assert white[n, places[n]].tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-9)
    assert not white[~mask].any()


def test_an_empty_mask_and_a_single_token_are_defined() -> None:
    ones = torch.ones(1, 2, dtype=torch.float64)
    assert whiten_advantages(ones, torch.zeros(1, 2, dtype=torch.bool)).tolist() == [[0, 0]]
    assert whiten_advantages(ones, torch.tensor([[True, False]])).tolist() == [[0, 0]]


@settings(max_examples=60, deadline=None)
@given(
    value=st.floats(-3, 3),
    old=st.floats(-3, 3),
    target=st.floats(-3, 3),
    clip=st.sampled_from([0.1, 0.2, 0.5]),
)
def test_the_clipped_loss_and_its_gradient_are_those_of_numbers(
    value: float, old: float, target: float, clip: float
) -> None:
    """The larger of both errors; the gradient is 0 where the clipped one is the larger."""
    near = min(max(value, old - clip), old + clip)
    plain, clipped = (value - target) ** 2, (near - target) ** 2
    if abs(plain - clipped) < 1e-9 and abs(value - old) > clip:
        return  # the gradient is not defined
    variable = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    others = (torch.tensor([[x]], dtype=torch.float64) for x in (old, target))
    loss, is_clipped = value_loss(variable, *others, torch.ones(1, 1, dtype=torch.bool), clip)
    loss.sum().backward()
    assert loss.item() == pytest.approx(max(plain, clipped) / 2, abs=1e-12)
    assert is_clipped.item() == (clipped > plain)
    slope = 0.0 if clipped > plain else value - target
    if not math.isclose(abs(value - old), clip):
        assert variable.grad is not None
        assert variable.grad.item() == pytest.approx(slope, abs=1e-9)


def make_model(family: type[Model]) -> Any:
    """A value model with random weights in float64."""
    sizes: dict[str, Any] = {"vocab_size": 30, "hidden_size": 16, "num_layers": 2, "num_heads": 2}
    more = {"head": "sequence_classification", "num_labels": 1, "max_seq_len": 16}
    config: Any = LlamaConfig if family is Llama else GPT2Config
    kinds = {"intermediate_size": 24, "num_kv_heads": 2} if family is Llama else {"dropout": 0.0}
    return family.from_config(config(**sizes, **more, **kinds, init_std=0.3), seed=1).double()


def make_answers(seed: int) -> list[RolloutAnswer]:
    """Answers of different lengths, one with a tool result, one left out."""
    draw = random.Random(seed)
    answers = []
    for number, (prompt, length) in enumerate([(3, 4), (2, 6), (4, 1), (1, 3)]):
        ids = [[draw.randrange(1, 30) for _ in range(n)] for n in (prompt, length)]
        answer = RolloutAnswer(number, *ids, "", [0.0] * length, "stop")
        answer.advantage = [0.0] * length
        answer.values = [draw.gauss(0, 1) for _ in range(length)]
        answer.returns = [draw.gauss(0, 1) for _ in range(length)]
        answers.append(answer)
    answers[1].is_written = [True, True, False, False, True, True]
    answers[3].is_masked = True
    return answers


@pytest.mark.parametrize("family", [Llama, GPT2])
def test_loss_and_gradient_of_the_value_model_are_those_of_single_rows(
    family: type[Model],
) -> None:
    """In one, two or four micro-batches; each row alone, its states by hand."""
    answers, clip = make_answers(0), 0.2
    reference = make_model(family)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for answer in answers:
        if answer.is_masked:
            continue
        ids = torch.tensor([[*answer.prompt_ids, *answer.ids]])
        for t, own in enumerate(answer.mask):
            if not own:
                continue
            before = ids[:, : len(answer.prompt_ids) + t]  # the state before this token
            value = reference(before).logits[0, 0]
            near = value.clamp(answer.values[t] - clip, answer.values[t] + clip)
            target = answer.returns[t]
            total = total + 0.5 * torch.maximum((value - target) ** 2, (near - target) ** 2)
            count += 1
    (total / count).backward()
    objective, names = ValueObjective(clip), ("values", "returns")
    for size in (1, 2, 4):
        model = make_model(family)
        batches = [collate_answers(answers[n : n + size], names) for n in range(0, 4, size)]
        assert sum(objective.count(batch) for batch in batches) == count
        losses = [objective(model, batch, count).loss for batch in batches]  # type: ignore[union-attr]
        sum(losses).backward()  # type: ignore[union-attr]
        mean = float(sum(losses).detach())  # type: ignore[union-attr]
        assert mean == pytest.approx(float(total.detach() / count), rel=1e-10)
        for (name, ours), theirs in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-8, atol=1e-12, msg=name)


def test_soft_prompts_keep_the_positions_of_values() -> None:
    model, batch = make_model(Llama), collate_answers(make_answers(1))
    prompt = SoftPrompt(model, length=3).init_(seed=5)
    values = predict_values(model, batch)
    assert values is not None
    rows = prompt.held[0].part.weight.detach()
    prompt.detach()
    count = len(batch["input_ids"])
    x = torch.cat((rows.expand(count, -1, -1), model.embed(batch["input_ids"])), 1)
    at = torch.arange(3, x.shape[1] - 1).expand(count, -1)
    want = model(inputs_embeds=x, logits_at=at).logits[..., 0]
    is_token = batch["attention_mask"][:, 1:].bool()
    torch.testing.assert_close(values[:, 1:][is_token], want[is_token], rtol=1e-12, atol=1e-14)


def test_values_do_not_depend_on_the_padding() -> None:
    model, answers = make_model(Llama), make_answers(3)
    whole = predict_values(model, collate_answers(answers))
    assert whole is not None
    for row, answer in zip(whole, answers, strict=True):
        alone = predict_values(model, collate_answers([answer]))
        assert alone is not None
        torch.testing.assert_close(row[: alone.shape[1]], alone[0], rtol=1e-12, atol=1e-14)
