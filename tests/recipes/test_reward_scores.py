"""A reward model scores an answer as transformers' classifier scores the whole text."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from test_rl_runs import write_model

from bmforge.errors import ConfigError
from bmforge.models import Llama, LlamaConfig
from bmforge.recipes.reward_scores import RewardModel, open_reward_model
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
