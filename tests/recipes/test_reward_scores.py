"""A reward model scores an answer as transformers' classifier scores the whole text."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from test_rl_runs import write_model

from bmforge.align.rollout_config import RolloutConfig
from bmforge.errors import ConfigError
from bmforge.models import Llama, LlamaConfig
from bmforge.recipes.inputs.prompt_rows import PromptConfig
from bmforge.recipes.registry import find_recipe
from bmforge.recipes.reward_scores import RewardModel, open_reward_model
from bmforge.recipes.rollout_run import default_training
from bmforge.tokenizers import AutoTokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("reward") / "model", num_kv_heads=4)
    sizes = LlamaConfig.from_pretrained(folder)
    head = sizes.replace(head="sequence_classification", num_labels=1)
    Llama.from_config(head, seed=4).save_pretrained(folder, overwrite=True)
    return folder


def test_rewards_are_those_of_transformers_at_the_last_token(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pairs = [("1+2=", "3"), ("abc", "0123456789"), ("a", ""), *[("12", "ab" * n) for n in range(9)]]
    model = open_reward_model(str(folder))
    assert isinstance(model, RewardModel)
    batch = {"prompts": [p for p, _ in pairs], "completions": [c for _, c in pairs]}
    found = model.score(batch, 1.0)
    for reward, (prompt, completion) in zip(found, pairs, strict=True):
        ids = [*tokenizer.encode(prompt), *tokenizer.encode(completion), tokenizer.eos_id]
        with torch.no_grad():
            expected = theirs(torch.tensor([ids])).logits[0, 0]
        assert reward == pytest.approx(float(expected), abs=2e-6)


@pytest.mark.parametrize("head", ["sequence_classification", "token_classification"])
def test_fields_and_results_of_tools_change_no_reward(
    folder: Path, tmp_path: Path, head: str
) -> None:
    """Fields that the policy's run ignores, and for steps also the messages of tools."""
    shutil.copytree(folder, tmp_path / "model")
    sizes = LlamaConfig.from_pretrained(folder)
    labels = 1 if head == "sequence_classification" else 2
    Llama.from_config(sizes.replace(head=head, num_labels=labels), seed=4).save_pretrained(
        tmp_path / "model", overwrite=True
    )
    model = open_reward_model(str(tmp_path / "model"))
    prompt = {"role": "user", "content": "1+2="}
    answer, result = {"role": "assistant", "content": "3"}, {"role": "tool", "content": "9"}
    plain = model.score({"prompts": [[prompt]], "completions": [[answer]]}, 1.0)
    named = {**prompt, "id": 3, "name": "bob", "meta": {"a": 1}}
    assert model.score({"prompts": [[named]], "completions": [[answer]]}, 1.0) == plain
    turns = [{"role": "assistant", "content": ""}, result, answer]
    found = model.score({"prompts": [[prompt]], "completions": [turns]}, 1.0)
    assert (found == plain) == (labels == 2)


def test_a_language_model_is_refused(tmp_path: Path) -> None:
    place = write_model(tmp_path / "language")
    with pytest.raises(ConfigError, match="num_labels=1"):
        open_reward_model(str(place))


TEMPLATE = (
    "{{ tools | length if tools else '' }}{{ 'h' if thinks else '' }}"
    "{% for m in messages %}{{ m.content }}{{ '</s>' if m.role == 'assistant' }}{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]


def with_template(folder: Path, target: Path, head: str, labels: int, source: str) -> Any:
    """A copy of the model's folder with another head and a chat template; returns the model."""
    shutil.copytree(folder, target)
    sizes = LlamaConfig.from_pretrained(folder).replace(head=head, num_labels=labels)
    model = Llama.from_config(sizes, seed=4)
    model.save_pretrained(target, overwrite=True)
    (target / "chat_template.jinja").write_text(source)
    return model.eval()


@pytest.mark.parametrize("head", ["sequence_classification", "token_classification"])
def test_tools_and_variables_of_the_prompt_are_rendered(
    folder: Path, tmp_path: Path, head: str
) -> None:
    """The answers of a run with tools in its data are scored after the tools, as in training."""
    place, labels = tmp_path / "reward", 1 if head == "sequence_classification" else 2
    model = with_template(folder, place, head, labels, TEMPLATE)
    lines = [
        {"prompt": [{"role": "user", "content": "1+2="}], "tools": TOOLS},
        {"prompt": [{"role": "user", "content": "3+="}], "chat_template_kwargs": {"thinks": True}},
    ]
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with_template(folder, tmp_path / "policy", "language_model", 2, TEMPLATE)
    recipe = find_recipe("rl", str(tmp_path / "policy"), None, None)
    config = recipe.config(
        run_dir=tmp_path / "run",
        data=PromptConfig(paths=(str(data),), seq_len=8, global_batch_size=4, micro_batch_size=4),
        train=dataclasses.replace(default_training(), steps=1),
        rollout=RolloutConfig(num_generations=2, max_new_tokens=5),
        reward=(f"dir:{place}",),
        export=False,
    )
    recipe.run(config)
    table = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").open()]
    assert len(table) == 4
    tokenizer = AutoTokenizer.from_pretrained(place)
    for row in table:
        user = row["prompt"][0]["content"]
        before = "2" if user == "1+2=" else "h"
        end = [tokenizer.eos_id] if labels == 1 else tokenizer.encode("\n")
        ids = [*tokenizer.encode(before + user), *tokenizer.encode(row["completion"]), *end]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0]
        wanted = logits[0] if labels == 1 else logits[-1].softmax(-1)[1]
        assert row["reward"] == pytest.approx(float(wanted), abs=2e-6)


def test_a_template_without_tools_scores_without_them_and_says_so(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = TEMPLATE.partition("}}")[2]
    with_template(folder, tmp_path / "reward", "sequence_classification", 1, source)
    model = open_reward_model(str(tmp_path / "reward"))
    user, answer = {"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}
    batch = {"prompts": [[user]] * 2, "completions": [[answer]] * 2}
    plain = model.score(batch, 1.0)
    assert model.score({**batch, "template_options": [{"tools": TOOLS}] * 2}, 1.0) == plain
    assert caplog.text.count("does not use tools") == 1
