"""Reward files written for TRL: its further arguments, factories and forms of data sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_rl_runs import make_config, place, recipe_of  # noqa: F401

from bmforge.align.rewards import open_rewards
from bmforge.data.sources.prompts import read_prompts
from bmforge.errors import DataError
from bmforge.train import read_metrics

# As TRL's documentation shows them: progress of the run, further columns, metrics, factories.
FILE = """
def progress(completions, trainer_state, log_extra=None, log_metric=None, **kwargs):
    share = trainer_state.global_step / trainer_state.max_steps
    digits = [sum(c.isdigit() for c in text) for text in completions]
    log_extra("digits", digits)
    log_metric("digits/share", share)
    log_metric("digits/share", share + 1)
    return [number + share for number in digits]

async def plain(prompts, completions):
    return [float(len(prompt) < len(text)) for prompt, text in zip(prompts, completions)]

def limit(longest):
    def reward(completion_ids, **kwargs):
        return [-1.0 if len(ids) > longest else 0.0 for ids in completion_ids]
    return reward

short = limit(3)

def wrong(completions, log_extra, **kwargs):
    log_extra("few", [1])
    return [0.0] * len(completions)
"""
BATCH: dict[str, Any] = {
    "prompts": ["a", "ab"],
    "completions": ["12x", "y"],
    "completion_ids": [[1, 2, 3, 4], [5]],
    "answer": ["3", "4"],
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rewards") / "rewards.py"
    file.write_text(FILE)
    return file


@pytest.mark.parametrize("in_process", [True, False])
def test_further_arguments_of_trl(file: Path, in_process: bool) -> None:
    """By file in a process, and as objects: the same rewards and logged values."""
    scope: dict[str, Any] = {}
    exec(FILE, scope)
    names = ("progress", "plain", "short", "wrong")
    rewards = open_rewards([scope[n] if in_process else f"{file}:{n}" for n in names])
    try:
        state = {"global_step": 3, "max_steps": 4}
        scored, logged = rewards.score_and_log(BATCH, state)
    finally:
        rewards.close()
    first, second, third, last = scored.values()
    assert first == [2.75, 0.75]
    assert second == [1.0, 0.0]
    assert third == [-1.0, 0.0]
    assert last == [None, None]
    assert list(rewards.failures.values()) == [0, 0, 0, 1]
    assert logged.columns == {"digits": [2, 0]}
    assert logged.metrics == {"digits/share": 1.25}


def test_logged_values_are_in_the_run(place: Path, file: Path) -> None:  # noqa: F811
    """Two steps per rollout: the state counts the steps before the rollout."""
    config = make_config(place, "logs", 4, reward=(f"{file}:progress",))
    config.rollout.num_iterations = 2
    recipe_of(place).run(config)
    lines = (place / "logs" / "completions.jsonl").read_text().splitlines()
    table = [json.loads(line) for line in lines]
    assert {row["step"] for row in table} == {1, 3}
    for row in table:
        digits = sum(c.isdigit() for c in row["completion"])
        assert row["logged"] == {"digits": digits}
        assert row["reward"] == pytest.approx(digits + (row["step"] - 1) / 4)
    shares = [row["digits/share"] for row in read_metrics(place / "logs" / "metrics.jsonl")]
    assert shares == pytest.approx([0.5, 0.5, 1.0, 1.0])


@pytest.mark.parametrize("form", ["text", "messages", "tools", "verl"])
def test_forms_of_prompts(form: str, tmp_path: Path) -> None:
    """TRL's prompt-only forms and verl's keep their columns for the reward functions."""
    message = [{"role": "user", "content": "1+2="}]
    record: dict[str, Any] = {"prompt": message, "solution": "3"}
    if form == "text":
        record["prompt"] = "1+2="
    if form == "tools":
        record["tools"] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    if form == "verl":
        record = {"prompt": message, "data_source": "x", "reward_model": {"ground_truth": "3"}}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(record))
    (prompt,) = read_prompts(tmp_path / "prompts.jsonl")
    assert prompt.content == record["prompt"]
    column = "ground_truth" if form == "verl" else "solution"
    assert prompt.columns[column] == "3"
    assert (prompt.tools is not None) == (form == "tools")


@pytest.mark.parametrize("name", ["trainer_state", "log_extra", "completion_ids"])
def test_columns_with_names_of_arguments_are_refused(name: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "a", name: 1}))
    with pytest.raises(DataError, match=name):
        read_prompts(file)
