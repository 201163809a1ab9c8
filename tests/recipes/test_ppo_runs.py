"""`bmforge train rl --method ppo`: learning, resuming, layouts and refusals of the value model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_rl_runs import make_config, place, recipe_of, weights, write_model

from bmforge.align.policy import PolicyConfig
from bmforge.align.rollout_config import RolloutConfig
from bmforge.align.value import ValueConfig
from bmforge.errors import ConfigError
from bmforge.models import T5, AutoModel, Llama, T5Config
from bmforge.parallel import Layout, OffloadConfig
from bmforge.recipes.adapters import AdapterConfig
from bmforge.recipes.value_model import check_value, describe_value_model
from bmforge.testing import run_distributed
from bmforge.train import read_metrics
from bmforge.train.checkpoint.checkpointer import find_checkpoints
from bmforge.train.checkpoint.format import read_manifest
from bmforge.train.checkpoint.read import ChunkReader

__all__ = ["place"]

VALUE = ValueConfig(lr=3e-3)
ENCODER: dict[str, Any] = {"vocab_size": 23, "hidden_size": 16, "num_layers": 1, "num_heads": 2}


def make_ppo(place: Path, name: str, steps: int, **changes: Any) -> Any:
    return make_config(place, name, steps, **{"method": "ppo", "value": VALUE, **changes})


def value_hashes(run_dir: Path) -> dict[str, Any]:
    """Chunks of the value model and its optimizer in the newest checkpoint, with file hashes."""
    manifest = read_manifest(find_checkpoints(run_dir / "checkpoints")[0])
    assert any(name.startswith("model/value_model.") for name in manifest["tensors"])
    assert any(name.startswith("optim/value_model.") for name in manifest["tensors"])
    return {name: file["sha256"] for name, file in manifest["files"].items()}


def test_ppo_learns_and_the_value_model_predicts_the_reward(place: Path) -> None:
    result = recipe_of(place).run(make_ppo(place, "ppo", 14))
    rows = read_metrics(place / "ppo" / "metrics.jsonl")
    rewards = [row["reward"] for row in rows]
    assert sum(rewards[:2]) / 2 < 0.6 < 0.8 < sum(rewards[-2:]) / 2
    errors = [row["loss/value_avg"] for row in rows]
    assert sum(errors[-3:]) < 0.5 * sum(errors[:3])
    assert rows[0]["clip_ratio/region_mean"] == 0.0  # the ratio of the first update is 1
    assert rows[0]["kl"] == 0.0  # the policy is its own reference
    exported: Any = AutoModel.from_pretrained(place / "ppo" / "export")
    assert isinstance(exported, Llama)
    assert exported.config.head == "language_model"
    for name, tensor in weights(exported).items():
        assert torch.equal(tensor, weights(result.model)[name])


def test_a_step_without_scored_answers_changes_nothing(place: Path, tmp_path: Path) -> None:
    """All answers are truncated after one token and left out of both losses."""
    rollout = RolloutConfig(num_generations=4, max_new_tokens=1, mask_truncated_completions=True)
    result = recipe_of(place).run(
        make_ppo(place, str(tmp_path / "run"), 2, rollout=rollout, export=False)
    )
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [(row["loss"], row["grad_norm"]) for row in rows] == [(0.0, 0.0)] * 2
    initial = weights(AutoModel.from_pretrained(place / "model"))
    for name, tensor in weights(result.model).items():
        assert torch.equal(tensor, initial[name])


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (
            "whole",
            {
                "rollout": RolloutConfig(
                    num_generations=4, max_new_tokens=5, num_iterations=2, steps_per_generation=2
                )
            },
        ),
        pytest.param(
            "lora", {"adapter": AdapterConfig(kind="lora", rank=2)}, marks=pytest.mark.long
        ),
    ],
)
def test_a_stopped_run_goes_on_bit_for_bit(place: Path, name: str, changes: Any) -> None:
    run = recipe_of(place).run
    run(make_ppo(place, f"ppo-{name}-one", 5, export=False, **changes))
    for steps in (2, 3, 5):
        run(make_ppo(place, f"ppo-{name}-parts", steps, export=False, **changes))
    runs = [place / f"ppo-{name}-{kind}" for kind in ("one", "parts")]
    assert value_hashes(runs[0]) == value_hashes(runs[1])
    rows = [read_metrics(folder / "metrics.jsonl") for folder in runs]
    for row, other in zip(*rows, strict=True):
        for key in ("loss", "reward", "grad_norm", "loss/value_avg", "val/grad_norm"):
            assert row[key] == other[key], key


def _run_sharded(place: Path, name: str, layout: Layout) -> None:
    recipe_of(place).run(make_ppo(place, name, 3, layout=layout))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("zero", Layout(zero=3)),
        pytest.param("tp", Layout(tp=2), marks=pytest.mark.long),
        pytest.param("sp", Layout(tp=2, sequence_parallel=True), marks=pytest.mark.long),
    ],
)
def test_layouts_train_both_models_as_one_process(place: Path, name: str, layout: Layout) -> None:
    recipe_of(place).run(make_ppo(place, f"ppo-alone-{name}", 3))
    run_distributed(_run_sharded, 2, place, f"ppo-{name}", layout)
    runs = [place / f"ppo-{kind}" for kind in (f"alone-{name}", name)]
    for row, other in zip(*(read_metrics(run / "metrics.jsonl") for run in runs), strict=True):
        assert other["reward"] == row["reward"]
        for key in ("grad_norm", "loss/value_avg", "val/grad_norm"):
            assert other[key] == pytest.approx(row[key], rel=1e-4), key
    first = [json.loads((run / "completions.jsonl").read_text().splitlines()[0]) for run in runs]
    assert first[0]["completion"] == first[1]["completion"]


def test_the_value_model_starts_from_a_reward_model(place: Path) -> None:
    config = Llama.config_class.from_pretrained(place / "model")
    changed: Any = config.replace(head="sequence_classification", num_labels=1)
    reward = Llama.from_config(changed, seed=5)
    reward.save_pretrained(place / "reward")
    value = ValueConfig(lr=0.0, init_from=str(place / "reward"))
    recipe_of(place).run(make_ppo(place, "ppo-from", 1, value=value, export=False))
    manifest = read_manifest(find_checkpoints(place / "ppo-from" / "checkpoints")[0])
    with ChunkReader(find_checkpoints(place / "ppo-from" / "checkpoints")[0], manifest) as reader:
        for name, tensor in weights(reward).items():
            saved = f"model/value_model.{name}"
            assert torch.equal(reader.read(saved, reader.whole_box(saved)), tensor), name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "grpo"}, "value.lr=0.003 has no effect"),
        ({"layout": Layout(pp=2)}, "layout.pp=2 does not work with a value model"),
        ({"layout": Layout(cp=2)}, "layout.cp=2 does not work with a value model"),
        ({"offload": OffloadConfig(fraction=1.0)}, "offload does not work with a value model"),
        ({"value": ValueConfig(cliprange=0.0)}, "value.cliprange=0.0 must be above 0"),
        ({"rl": PolicyConfig(lam=1.5)}, "rl.lam=1.5 must be from 0 to 1"),
        ({"method": "grpo", "rl": PolicyConfig(lam=0.5)}, "rl.lam=0.5 has no effect"),
    ],
)
def test_wrong_options_are_refused_by_name(place: Path, changes: Any, words: str) -> None:
    config = make_ppo(place, "never", 1, **changes)
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        check_value(config, config.rl.resolve(config.method))


def test_a_value_model_needs_weights_and_the_policys_vocabulary(place: Path) -> None:
    T5.from_config(T5Config(**ENCODER)).save_pretrained(place / "t5")
    starts = [("gpt2-small", "has no weights"), (str(place / "t5"), "is a T5")]
    for start, words in (*starts, ("other", "vocab_size=24")):
        name = start if start != "other" else str(write_model(place / "other", more="i"))
        config = make_ppo(place, "never", 1, value=ValueConfig(init_from=name))
        with pytest.raises(ConfigError, match=words):
            describe_value_model(config)
