"""Preference and reward losses of degenerate batches against plain implementations in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_preference_losses import (
    METHODS,
    PAIRS,
    VOCAB,
    make_batch,
    make_model,
    objective_of,
    options_of,
    plain_loss,
    row_sums,
    run_objective,
)
from torch import Tensor, nn

from bmforge.align.distillation import DistillationObjective
from bmforge.align.losses import MethodOptions, PairScores, log_ratio, odds_ratio, preference_loss
from bmforge.align.preferences import PairObjective
from bmforge.align.reward import RewardObjective
from bmforge.models import Llama, LlamaConfig, init_weights_
from bmforge.testing import assert_close

INF = math.inf


def empty(batch: dict[str, Tensor], *rows: int) -> dict[str, Tensor]:
    batch["labels"][list(rows)] = -100
    return batch


def equal(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    for name in ("input_ids", "labels"):
        batch[name][1] = batch[name][0]
    return batch


def at_the_start(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The only label of a chosen answer is the first token of its row, which has no score."""
    batch["labels"][0] = -100
    batch["labels"][0, 0] = batch["input_ids"][0, 0]
    return batch


def short(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Answers of one token."""
    for row in batch["labels"]:
        row[int((row != -100).nonzero()[0]) + 1 :] = -100
    return batch


CASES = {
    "one pair": lambda: make_batch(1),
    "equal answers": lambda: equal(make_batch(2)),
    "rejected without labels": lambda: empty(make_batch(3), 1),
    "chosen without labels": lambda: empty(make_batch(3), 0),
    "one answer left": lambda: empty(make_batch(2), 0, 2, 3),
    "label at the start": lambda: at_the_start(make_batch(2)),
    "one token": lambda: short(make_batch(2)),
    "padding": lambda: empty(make_batch(3), 2, 3, 4, 5),
}


def probabilities(name: str, sums: Tensor, lengths: Tensor, ref: Tensor) -> PairScores:
    parts = [t for both in (sums, ref, lengths.clamp(min=1)) for t in (both[::2], both[1::2])]
    return PairScores(*parts)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name: str, case: str) -> None:
    """Values are those of plain numbers, gradients those of all logits; an empty text has P = 1."""
    model, reference, batch = make_model(), make_model(2), CASES[case]()
    got = run_objective(objective_of(name, reference), model, [batch])
    assert all(bool(t.isfinite().all()) for t in got.values())
    model.zero_grad()
    sums, lengths = row_sums(model, batch)
    with torch.no_grad():
        ref = row_sums(reference, batch)[0]
    options, parts = options_of(name), probabilities(name, sums, lengths, ref)
    loss = preference_loss(name, parts, options)
    loss = loss - options.nll_weight * parts.chosen / parts.chosen_length
    is_real = (batch["labels"] != -100).view(-1, 2, batch["labels"].shape[1]).any(2).any(1)
    loss[is_real].mean().backward()
    want = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_close(got, {"loss": loss[is_real].mean().detach(), **want})
    for number in is_real.nonzero()[:, 0].tolist():
        values = [t[number].item() for t in parts]
        if name == "orpo" and 0 in values[:2]:
            continue  # the odds of probability 1 are infinite; the loss uses the largest number
        plain = plain_loss(
            name, dict(zip(("w", "l", "rw", "rl", "nw", "nl"), values, strict=True)), options
        )
        plain -= options.nll_weight * values[0] / values[4]
        assert loss[number].item() == pytest.approx(plain, rel=1e-9)


@pytest.mark.parametrize("name", [*PAIRS, "kto"])
def test_no_pair(name: str) -> None:
    """A micro-batch without pairs, as on a rank of a short last batch: loss and gradients are 0."""
    model, reference = make_model(), make_model(2)
    marks = {"is_good": torch.tensor([1, 0])} if name == "kto" else {}
    batch = empty(make_batch(2, **marks), *range(4))
    objective = objective_of(name, reference)
    assert objective.count(batch) == 0
    (ready,) = objective.prepare(model, [batch])
    result = objective(model, ready, 3)
    result.loss.backward()
    assert result.loss.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    full = make_batch(4, **({"is_good": torch.tensor([1, 0, 0, 1])} if marks else {}))
    want = run_objective(objective, model, [full])
    assert_close(run_objective(objective, model, [full, batch]), want)


def test_kto_of_one_answer_and_of_answers_without_labels() -> None:
    """One answer; an answer without labels is padding, and its mismatched row counts nothing."""
    model, reference = make_model(), make_model(2)
    for rows, marks in ((1, [1]), (1, [0]), (3, [1, 0, 1])):
        batch = make_batch(rows, is_good=torch.tensor(marks))
        objective = objective_of("kto", reference)
        want = run_objective(objective, model, [batch])
        sums, ref = row_sums(model, batch)[0].detach(), row_sums(reference, batch)[0].detach()
        h, z = (sums - ref)[::2], max(0.0, float((sums - ref)[1::2].mean()))
        signs = torch.tensor(marks).double() * 2 - 1
        assert_close(want["loss"], (1 - torch.sigmoid(0.1 * signs * (h - z))).mean())
        more = make_batch(rows + 1, is_good=torch.tensor([*marks, 1]))
        assert_close(run_objective(objective, model, [empty(more, 2 * rows)]), want)


def make_reward_model() -> Llama:
    sizes: dict[str, Any] = {"hidden_size": 20, "intermediate_size": 27, "num_layers": 2}
    sizes |= {"head": "sequence_classification", "num_labels": 1, "max_seq_len": 16}
    config = LlamaConfig(vocab_size=VOCAB, num_heads=2, num_kv_heads=1, **sizes)
    model = Llama.from_config(config, dtype=torch.float64)
    init_weights_(model, seed=3)
    return model


@pytest.mark.parametrize("case", CASES)
def test_rewards(case: str) -> None:
    """Bradley-Terry with margins of 0 and above, from rewards at the last tokens."""
    model, batch = make_reward_model(), CASES[case]()
    count = len(batch["labels"]) // 2
    batch["attention_mask"] = (batch["input_ids"] != 0).long()
    batch["margin"] = torch.arange(count).double() / 2
    got = run_objective(RewardObjective(0.01), model, [batch])
    model.zero_grad()
    rewards = []
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        rewards.append(model(input_ids=ids[None, : int(mask.sum())]).logits[0, 0])
    real = [n for n in range(count) if bool((batch["labels"][2 * n : 2 * n + 2] != -100).any())]
    losses = [
        torch.log1p(torch.exp(rewards[2 * n + 1] - rewards[2 * n] + n / 2))
        + 0.01 * (rewards[2 * n] + rewards[2 * n + 1]) ** 2
        for n in real
    ]
    loss = torch.stack(losses).mean()
    loss.backward()
    want = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_close(got, {"loss": loss.detach(), **want})


def exclude(model: Any, *tokens: int) -> Any:
    """Give a head's bias -inf for some tokens."""
    bias = torch.linspace(-1, 1, VOCAB).double()
    bias[list(tokens)] = -INF
    model.lm_head.bias = nn.Parameter(bias)
    return model


@pytest.mark.parametrize("name", METHODS)
def test_excluded_tokens(name: str) -> None:
    """Logits of -inf, also of an answer's token: 0 / 0 is 1, from all logits in plain torch."""
    model, reference = (exclude(make_model(seed), 0, 5, 6) for seed in (1, 2))
    marks = {"is_good": torch.tensor([1, 0, 1])} if name == "kto" else {}
    batch, more = make_batch(3, **marks), make_batch(3, **marks)
    for each in (batch, more):
        each["input_ids"].masked_fill_(torch.isin(each["input_ids"], torch.tensor([5, 6])), 7)
        each["labels"] = each["input_ids"].where(each["labels"] != -100, -100)
    if METHODS[name].needs_reference:  # without one, an impossible answer has an infinite loss
        batch["labels"][0, 3] = batch["input_ids"][0, 3] = 5
    got = run_objective(objective_of(name, reference), model, [batch])
    assert all(bool(t.isfinite().all()) for n, t in got.items() if n != "lm_head.bias")
    model.zero_grad()
    sums, lengths = row_sums(model, batch)
    with torch.no_grad():
        ref = row_sums(reference, batch)[0]
    both = (sums == -INF) & (ref == -INF)
    assert int(both.sum()) == METHODS[name].needs_reference
    sums, ref = sums.masked_fill(both, 0), ref.masked_fill(both, 0)
    options = options_of(name)
    if name == "kto":
        h, z = (sums - ref)[::2], (sums - ref)[1::2].mean().clamp(min=0).detach()
        signs = batch["is_good"].double() * 2 - 1
        loss = (1 - torch.sigmoid(0.1 * signs * (h - z))).mean()
    else:
        loss = preference_loss(name, probabilities(name, sums, lengths, ref), options)
        loss = (loss - options.nll_weight * sums[::2] / lengths[::2]).mean()
    loss.backward()
    want = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_close(got, {"loss": loss.detach(), **want})


@pytest.mark.parametrize("name", PAIRS)
def test_answers_that_one_model_excludes(name: str) -> None:
    """An impossible chosen answer has an infinite or the largest loss, a rejected one the least."""
    losses = []
    for chosen, rejected in ((-INF, -3.0), (-2.0, -3.0), (-2.0, -INF)):
        values = torch.tensor([[chosen], [rejected], [-2.5], [-2.0], [2], [3]]).double()
        sums = [v.requires_grad_() for v in values[:2]]
        loss = preference_loss(name, PairScores(*sums, *values[2:]), options_of(name))
        losses.append(loss.item())
        if name != "ipo":  # whose optimum is a finite margin
            loss.backward()
            assert not any(bool(v.grad is not None and v.grad.isnan()) for v in sums)
    assert losses[0] == INF
    assert losses[2] == (INF if name == "ipo" else 0)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_top_tokens_of_a_teacher_that_excludes_the_others(beta: float) -> None:
    """The student's probability of all other tokens, of which the teacher's is 0, counts."""
    student, teacher, batch = make_model(), exclude(make_model(2), 5, 6), make_batch(3)
    if beta == 1:  # an infinite divergence unless the student excludes them too
        exclude(student, 5, 6)
    objective = DistillationObjective(teacher, beta, 0.7, top_k=VOCAB - 2)
    got = run_objective(objective, student, [batch])
    student.zero_grad()
    is_scored = batch["labels"][:, 1:] != -100
    own, other = (
        (m(input_ids=batch["input_ids"]).logits[:, :-1][is_scored] / 0.7).softmax(-1)
        for m in (student, teacher)
    )
    others = torch.tensor([5, 6])
    p, q = (
        torch.cat((x[:, :5], x[:, 7:], x[:, others].sum(1, keepdim=True)), 1) for x in (own, other)
    )
    q = q.detach()

    def kl(a: Tensor, b: Tensor) -> Tensor:
        ratio = torch.where(a > 0, a, 1.0).log() - torch.where(a > 0, b, 1.0).log()
        return (a * ratio).sum(-1)

    if beta in (0, 1):
        loss = kl(q, p) if beta == 0 else kl(p, q)
    else:
        mixture = beta * q + (1 - beta) * p
        loss = beta * kl(q, mixture) + (1 - beta) * kl(p, mixture)
    loss.mean().backward()
    want = {n: w.grad for n, w in student.named_parameters() if w.grad is not None}
    assert_close(got, {"loss": loss.mean().detach(), **want})


def test_ratio_of_zeros() -> None:
    """0 / 0 is 1 without a gradient; one zero gives an infinity."""
    p = torch.tensor([-INF, -INF, -1.0, -2.0]).double().requires_grad_()
    q = torch.tensor([-INF, -1.0, -INF, -0.5]).double()
    ratio = log_ratio(p, q)
    assert ratio.tolist() == [0.0, -INF, INF, -1.5]
    ratio[[0, 3]].sum().backward()
    assert p.grad is not None
    assert p.grad.tolist() == [0.0, 0.0, 0.0, 1.0]


def test_odds_of_certain_answers_in_fp32() -> None:
    """An answer whose probability rounds to 1 in fp32 gives a finite ORPO loss and gradient."""
    chosen = torch.tensor([0.0, -0.5]).requires_grad_()
    rejected = torch.tensor([-0.7, 0.0]).requires_grad_()
    one = torch.ones(2)
    scores = PairScores(chosen, rejected, 0 * one, 0 * one, one, one)
    loss = preference_loss("orpo", scores, MethodOptions(beta=0.1)).sum()
    loss.backward()
    assert odds_ratio(scores).isfinite().all()
    assert loss.isfinite()
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert chosen.grad.isfinite().all()
    assert rejected.grad.isfinite().all()
    objective = PairObjective("orpo", options_of("orpo"))
    assert objective.metrics["log_odds_ratio"] == "mean"
