"""A small model that guesses: answers stay what they are, and come in fewer steps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from test_requests import PROMPTS, ask, drawn, greedy, make, opened, say

from bmforge.errors import ConfigError
from bmforge.infer import Engine, EngineConfig, Request, RequestsConfig
from bmforge.infer.engine.packed_step import PackedStep
from bmforge.infer.engine.speculate import DRAFT_PLACEHOLDER, DraftSpeculator, NgramSpeculator

NEW = 30


def small(**more: Any) -> Any:
    return make("llama", num_layers=1, **more)


def requests() -> list[Request]:
    made = [Request(prompt, greedy(max_new_tokens=NEW)) for prompt in PROMPTS]
    twice = drawn(3, max_new_tokens=NEW, num_return_sequences=2)
    return [*made, Request(PROMPTS[1], twice), Request(PROMPTS[2], drawn(5, max_new_tokens=NEW))]


@pytest.mark.parametrize("use_speculation", [False, True])
@pytest.mark.parametrize("pages", [1024, 160])
def test_answers_stay_what_they_are(use_speculation: bool, pages: int) -> None:
    """With a draft that is right, one that is wrong, and pages that run out."""
    model = make("llama")
    options = {"total_tokens": pages, "max_num_batched_tokens": 40}
    with opened(model, **options) as engine:
        want = [say(found) for found in ask(engine, requests())]
    for draft in (make("llama"), small(), make("gpt2")):
        with opened(model, **options, draft=draft, use_speculation=use_speculation) as engine:
            assert [say(found) for found in ask(engine, requests())] == want
            assert [say(found) for found in ask(engine, requests())] == want  # by prefixes


def count_steps(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    seen: list[int] = []
    run = PackedStep.run

    def count(self: PackedStep, rows: Any, *given: Any) -> Any:
        if self.model is model:
            seen.append(len(rows))
        return run(self, rows, *given)

    monkeypatch.setattr(PackedStep, "run", count)
    return seen


def test_a_draft_that_is_right_saves_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model itself as its draft is always right; it costs as much, so it pays only here."""
    from bmforge.infer.engine import jobs

    monkeypatch.setattr(jobs, "_weigh", lambda model: 1.0 if model is large else 0.1)
    large, draft = make("llama"), make("llama")
    seen = count_steps(large, monkeypatch)
    with opened(large, draft=draft) as engine:
        ask(engine, [Request(PROMPTS[1], greedy(max_new_tokens=41))])
    assert len(seen) == 1 + 40 // 5


def test_a_draft_that_is_wrong_pauses() -> None:
    ahead = DraftSpeculator(0.1)
    for length in range(10, 14):
        assert ahead.propose([1] * length) == [DRAFT_PLACEHOLDER] * 4
        ahead.record_acceptance(length, 4, 1)
    assert ahead.propose([1] * 14) == []
    assert ahead.propose([1] * (13 + 64)) == [DRAFT_PLACEHOLDER] * 4
    costly = DraftSpeculator(0.9)
    for length in range(10, 14):
        costly.record_acceptance(length, 4, 3)
    assert costly.propose([1] * 14) == []


def test_what_was_there_before_comes_first() -> None:
    ahead = DraftSpeculator(0.1, NgramSpeculator())
    assert ahead.propose([1, 2, 3, 4, 5, 1, 2, 3])[:2] == [4, 5]
    assert ahead.propose([1, 2, 3, 4, 5, 1, 2, 3, 9]) == [DRAFT_PLACEHOLDER] * 4
    assert ahead.fork().propose([7, 8]) == [DRAFT_PLACEHOLDER] * 4


def test_another_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="vocab_size=96"):
        opened(make("llama"), draft=make("llama", vocab_size=96))
    with pytest.raises(ConfigError, match=r"the draft model \(T5\)"):
        opened(make("llama"), draft=make("t5"))


def test_a_module_whose_draft_is_refused_stays_as_it_was() -> None:
    """Nothing has been moved away from it, where a budget would have its blocks come and go."""
    model = make("llama", num_layers=8)
    want = model(input_ids=torch.tensor([PROMPTS[4]])).logits
    config = EngineConfig(max_tokens=128, requests=RequestsConfig(draft=make("llama")))
    with pytest.raises(ConfigError, match="too small") as caught:
        Engine(copy.deepcopy(model), device_budget_bytes=1 << 20, config=config)
    enough = int(str(caught.value).split("too small: ")[1].split()[0])
    with Engine(copy.deepcopy(model), device_budget_bytes=enough, config=config) as engine:
        assert engine.plan.moving
    refused = RequestsConfig(draft=make("llama", vocab_size=96))
    with pytest.raises(ConfigError, match="vocab_size=96"):
        Engine(
            model,
            device_budget_bytes=enough,
            config=EngineConfig(max_tokens=128, requests=refused),
        )
    assert torch.equal(model(input_ids=torch.tensor([PROMPTS[4]])).logits, want)


def test_a_draft_from_a_directory_within_the_budget(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path / "large")
    small().save_pretrained(tmp_path / "small")
    config = EngineConfig(max_tokens=128, requests=RequestsConfig(draft=tmp_path / "small"))
    plain = EngineConfig(max_tokens=128)
    with (
        Engine(tmp_path / "large", device_budget_bytes=200 << 20, config=config) as engine,
        Engine(tmp_path / "large", device_budget_bytes=200 << 20, config=plain) as other,
    ):
        assert engine.plan.budget_bytes == other.plan.budget_bytes
        assert engine.plan.adapter_bytes > sum(p.nbytes for p in small().parameters())
        assert engine.plan.smallest_bytes - other.plan.smallest_bytes == engine.plan.adapter_bytes
        asked = [Request(PROMPTS[1], greedy(max_new_tokens=NEW))]
        assert say(ask(engine, asked)[0]) == say(ask(other, asked)[0])
    with pytest.raises(ConfigError, match="the draft model needs"):
        Engine(tmp_path / "large", device_budget_bytes=1000, config=config)
