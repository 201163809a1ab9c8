"""The tables of a batch's adapters are built when the batch or the adapters change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_request_deltas import PROMPTS, make, stir_

from bmforge.infer import Engine, GenerationConfig, Request
from bmforge.infer.engine.native_adapters import AdapterTables
from bmforge.tune.delta import Lora, use_deltas

NEW = 24


@pytest.fixture
def model() -> Any:
    model = make("llama")
    for number in range(3):
        stir_(Lora(model, ["attn.q", "mlp.down"], name=f"a{number}", rank=4), number)
    use_deltas(model, ())
    return model


def answers(engine: Engine, names: Any, prompts: Any = PROMPTS) -> list[str]:
    """The tokens of every answer with their log probabilities."""
    options = GenerationConfig(max_new_tokens=NEW, eos_token_id=(), logprobs=2)
    pairs = zip(prompts, names, strict=False)
    handles = [engine.submit(Request(prompt, options, delta=name)) for prompt, name in pairs]
    completions = [handle.wait(60)[0] for handle in handles]
    return [f"{completion.ids} {completion.logprobs}" for completion in completions]


def count_tables(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each batch for which tables are built from now on."""
    real, counts = AdapterTables._fill, []

    def fill(self: Any, rows: int, tokens: int) -> None:
        counts.append(rows * tokens)
        real(self, rows, tokens)

    monkeypatch.setattr(AdapterTables, "_fill", fill)
    return counts


def test_steps_with_the_same_batch_share_the_tables(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a0", "a1", None]
    with Engine(model) as engine:
        pairs = zip(PROMPTS, names, strict=False)
        alone = [answers(engine, [name], [prompt]) for prompt, name in pairs]
        counts = count_tables(monkeypatch)
        together = answers(engine, names)
    assert len(counts) < NEW // 2
    assert together == [answer for (answer,) in alone]


def test_a_changed_weight_takes_effect_between_two_requests(model: Any) -> None:
    """Also if the names and the lengths of the batch are those of the step before."""
    names = ["a0", "a1", "a2"]
    with Engine(model) as engine:
        before = answers(engine, names)
        with torch.no_grad():
            engine.call(lambda: use_deltas(model, ["a0", "a1"], {"a0": 3.0}))
        after = answers(engine, names)
        assert after[1:] == before[1:]
        assert after[0] != before[0]
        engine.call(lambda: use_deltas(model, ()))
        assert answers(engine, names) == before
