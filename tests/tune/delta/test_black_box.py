"""A prompt found by scores alone: better than the start, within its subspace, the same twice."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
import torch

from bmforge.errors import ConfigError, MissingDependencyError
from bmforge.models import GPT2, GPT2Config
from bmforge.tune.delta import list_deltas
from bmforge.tune.delta.black_box import BlackBoxConfig, tune_black_box

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 2,
    "max_seq_len": 16,
}
IDS = torch.arange(12).view(2, 6)
SMALL = BlackBoxConfig(evaluations=60, dims=6, sigma=2.0, seed=1)


def gpt2() -> GPT2:
    """A model in which a prompt can do something."""
    model = GPT2.from_config(GPT2Config(**SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10)
    return model


def minus_loss(model: Any) -> float:
    return -float(model(IDS, labels=IDS).loss)


def test_scores_alone_find_a_better_prompt() -> None:
    model = gpt2().train()
    kept = {n: t.clone() for n, t in model.state_dict().items()}
    seen: list[bool] = []

    def score(one: Any) -> float:
        seen.append(one.training or torch.is_grad_enabled())
        return minus_loss(one)

    prompt = tune_black_box(model, score, length=3, config=SMALL)
    assert not any(seen)
    assert len(seen) == len(prompt.scores) <= 60
    assert max(prompt.scores) > prompt.scores[0] + 0.05
    assert minus_loss(model.eval()) == pytest.approx(max(prompt.scores), abs=1e-6)
    assert not any(p.requires_grad for p in prompt.parameters())
    left = {n: t for n, t in model.state_dict().items() if "prompt" not in n}
    assert all(torch.equal(left[n], t) for n, t in kept.items())
    again = tune_black_box(gpt2(), minus_loss, length=3, config=SMALL)
    assert again.scores == prompt.scores
    assert torch.equal(again.held[0].part.weight, prompt.held[0].part.weight)


def test_the_search_is_that_of_cma() -> None:
    """A score of the rows' first column: the library alone, on the same function, finds it."""
    import cma

    model = gpt2()
    rows: list[Any] = []

    def score(one: Any) -> float:
        rows.append(one.embed.prompt.weight.clone().double())
        return -float((rows[-1] - 1).square().sum())

    config = BlackBoxConfig(evaluations=50, dims=4, seed=3)
    prompt = tune_black_box(model, score, length=2, config=config)
    rng = np.random.default_rng(3)
    ways = rng.standard_normal((32, 4)) * (float(model.embed.weight.std()) / math.sqrt(4))
    options = {"verbose": -9, "seed": np.nan, "randn": lambda *s: rng.standard_normal(s)}
    strategy = cma.CMAEvolutionStrategy(np.zeros(4), 1.0, options)
    start, wanted = rows[0].flatten().numpy(), [prompt.scores[0]]
    while len(wanted) + strategy.popsize <= 50:
        points = strategy.ask()
        found = [-float(((start + ways @ p - 1) ** 2).sum()) for p in points]
        strategy.tell(points, [-one for one in found])
        wanted += found
    assert prompt.scores == pytest.approx(wanted, rel=1e-3)


def test_what_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt2()
    names = list(model.state_dict())
    with pytest.raises(ConfigError, match="NaN"):
        tune_black_box(model, lambda _: math.nan, length=2, config=SMALL)
    assert list(model.state_dict()) == names
    assert not list_deltas(model)
    for wrong in ({"evaluations": 1}, {"dims": 0}, {"sigma": 0.0}, {"population": 1}):
        with pytest.raises(ConfigError):
            BlackBoxConfig(**wrong)
    monkeypatch.setitem(sys.modules, "cma", None)
    with pytest.raises(MissingDependencyError, match=r"\[tune\]"):
        tune_black_box(model, minus_loss, length=2, config=SMALL)
    assert not list_deltas(model)
