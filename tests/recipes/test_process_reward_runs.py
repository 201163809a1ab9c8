"""Runs of `bmforge train reward --supervision process`, their exports, and the rewards."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import settings, wait_for_all
from test_preferences_run import SIZES, SmallReward
from test_rl_runs import make_config as make_rl
from test_rl_runs import place, recipe_of, write_model  # noqa: F401
from test_sft import CHATML, write_letters

from bmforge.cli import main
from bmforge.errors import ConfigError
from bmforge.models import Llama, LlamaConfig, init_weights_
from bmforge.parallel import Layout
from bmforge.recipes.adapters import AdapterConfig
from bmforge.recipes.preferences import PairData
from bmforge.recipes.reward import train_reward
from bmforge.recipes.reward_scores import ProcessRewardModel, open_reward_model, open_reward_sources
from bmforge.testing import run_distributed
from bmforge.tokenizers import AutoTokenizer
from bmforge.train import read_metrics

PROCESS = {"supervision": "process", "step_separator": "ab"}


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """A base model with its tokenizer, and answers whose steps are right if they say "yes"."""
    letters = write_letters(tmp_path / "letters", chat_template=CHATML)
    model = Llama.from_config(LlamaConfig(**SIZES))
    init_weights_(model, seed=0)
    model.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(letters).save_pretrained(tmp_path / "base")
    rows = []
    for number in range(12):
        labels = [bool(number >> bit & 1) for bit in range(1 + number % 3)]
        steps = [("yes " if label else "no ") + "cdef"[n] for n, label in enumerate(labels)]
        prompt: Any = "abcd"[number % 4]
        if number % 2:
            prompt = [{"role": "user", "content": prompt}]
        rows.append({"prompt": prompt, "completions": steps, "labels": labels})
    (tmp_path / "steps.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def make_config(start: Path, name: str, steps: int, **changes: Any) -> Any:
    file = str(start / "steps.jsonl")
    data = PairData(
        paths=(file,), validation=(file,), seq_len=64, global_batch_size=6, micro_batch_size=2
    )
    train = settings(steps, lr=3e-3, disable_dropout=True)
    base: dict[str, Any] = {"run_dir": start / name, "init_from": str(start / "base")}
    return SmallReward(**base, data=data, train=train, **{**PROCESS, **changes})


def run(config: Any) -> list[dict[str, Any]]:
    train_reward(config)
    wait_for_all()
    return read_metrics(config.run_dir / "metrics.jsonl")


def figures(config: Any) -> list[list[float]]:
    names = ("loss", "grad_norm", "accuracy", "mean_reward")
    return [[row[name] for name in names] for row in run(config)]


def test_steps_are_learned_and_the_export_is_a_token_classifier(start: Path) -> None:
    """Right steps get the larger reward; transformers opens the export with equal rewards."""
    transformers = pytest.importorskip("transformers")
    rows = run(make_config(start, "run", 30))
    assert rows[-1]["accuracy"] == 1.0
    assert rows[-1]["val_mean_reward_right"] > 0.8 > 0.2 > rows[-1]["val_mean_reward_wrong"]
    export = start / "run" / "export"
    theirs = transformers.AutoModelForTokenClassification.from_pretrained(export).eval()
    tokenizer = AutoTokenizer.from_pretrained(export)
    steps, prompt, mark = ["yes c", "no d", "yes e"], "ab", tokenizer.encode("ab")
    ids, ends = [*tokenizer.prompt_prefix, *tokenizer.encode(prompt)], []
    for step in steps:
        ids += [*tokenizer.encode(step), *mark]
        ends.append(len(ids) - 1)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0, ends].softmax(-1)[:, 1]
    a, b, c = expected.tolist()
    wanted = {"min": min(a, b, c), "product": a * b * c, "mean": (a + b + c) / 3, "last": c}
    batch = {"prompts": [prompt] * 2, "completions": ["abab".join(steps), "yes c"]}
    for name, value in wanted.items():
        model = open_reward_model(str(export), name)  # type: ignore[arg-type]
        assert isinstance(model, ProcessRewardModel)
        assert model.score(batch, 1.0)[0] == pytest.approx(value, abs=2e-6)


@pytest.mark.parametrize("changes", [{}, {"adapter": AdapterConfig(kind="lora", rank=2)}])
def test_resumes_bit_for_bit(start: Path, changes: dict[str, Any]) -> None:
    whole = figures(make_config(start, "whole", 6, **changes))
    config = make_config(start, "parts", 3, **changes)
    run(config)
    assert (
        figures(dataclasses.replace(config, train=settings(6, lr=3e-3, disable_dropout=True)))
        == whole
    )


def test_adapters_keep_the_head_and_the_separator(start: Path) -> None:
    """An adapter directory, its merged model and its quantized model give nearly equal rewards."""
    run(make_config(start, "run", 8, adapter=AdapterConfig(kind="lora", rank=2)))
    export, merged, small = start / "run" / "export", start / "merged", start / "small"
    assert main(["merge", str(export), "--out", str(merged)]) == 0
    assert main(["quantize", str(merged), "--scheme", "int8", "--out", str(small)]) == 0
    batch = {"prompts": ["a", "b"], "completions": ["yes cabno d", "no c"]}
    first, second, third = (
        open_reward_model(str(path)).score(batch, 1.0) for path in (export, merged, small)
    )
    assert second == pytest.approx(first, abs=1e-5)
    assert third == pytest.approx(first, abs=0.05)
    assert main(["info", str(small)]) == 0


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(2, Layout(zero=3), id="zero3"),
        pytest.param(2, Layout(pp=2), id="pp", marks=pytest.mark.long),
        pytest.param(2, Layout(tp=2), id="tp", marks=pytest.mark.long),
        pytest.param(2, Layout(tp=2, sequence_parallel=True), id="sp", marks=pytest.mark.long),
        pytest.param(2, Layout(cp=2), id="cp", marks=pytest.mark.long),
    ],
)
def test_layouts(start: Path, world: int, layout: Layout) -> None:
    want = run_distributed(figures, 1, make_config(start, "one", 3))[0]
    for got in run_distributed(figures, world, make_config(start, "all", 3, layout=layout)):
        assert torch.tensor(got).allclose(torch.tensor(want), rtol=2e-4, atol=2e-5)


def test_a_run_is_rewarded_by_a_process_reward_model(place: Path, tmp_path: Path) -> None:  # noqa: F811
    """The rewards in completions.jsonl are those of the model for the written answers."""
    folder = write_model(tmp_path / "prm", num_kv_heads=4)
    head = LlamaConfig.from_pretrained(folder).replace(head="token_classification", num_labels=2)
    Llama.from_config(head, seed=4).save_pretrained(folder, overwrite=True)
    (folder / "process_reward.json").write_text(json.dumps({"step_separator": "1"}))
    changes = {"reward": (f"dir:{folder}",), "step_aggregation": "mean"}
    recipe_of(place).run(make_rl(place, "prm", 2, **changes))
    wait_for_all()
    lines = (place / "prm" / "completions.jsonl").read_text().splitlines()
    table = [json.loads(line) for line in lines]
    model = open_reward_model(str(folder), "mean")
    batch = {name + "s": [row[name] for row in table] for name in ("prompt", "completion")}
    assert [row["reward"] for row in table] == pytest.approx(model.score(batch, 1.0), abs=1e-5)
    assert len({row["reward"] for row in table}) > 2


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"center_rewards_coefficient": 0.1}, "no effect with supervision=process"),
        ({"supervision": "outcome"}, "no effect with supervision=outcome"),
        ({"step_separator": ""}, "step_separator is empty"),
    ],
)
def test_options_without_effect_are_refused(
    start: Path, changes: dict[str, Any], what: str
) -> None:
    with pytest.raises(ConfigError, match=what):
        run(make_config(start, "run", 1, **changes))
    assert not (start / "run").exists()


def test_aggregation_without_a_process_reward_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="step_aggregation='mean' has no effect"):
        open_reward_sources(["length:3"], 5.0, "mean", "cpu")
