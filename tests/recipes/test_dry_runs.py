"""The dry run of every training task refuses what the run refuses, with the same sentence."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from speech_models import write_speech_model
from task_folders import write_boolq, write_words
from test_option_effects import set_option
from test_rl_runs import write_model

from bmforge.errors import BmforgeError
from bmforge.recipes.registry import TASKS, find_recipe
from bmforge.recipes.run import check_recipe

# Task -> families whose implementations of the task differ.
FAMILIES = {
    "pretrain": ("gpt2", "bert", "t5", "glm", "cpm-ant", "eva", "cpm-bee"),
    "conversations": ("llama", "t5"),
    **dict.fromkeys(("preferences", "reward", "rl", "distill"), ("llama",)),
    **dict.fromkeys(("classify", "delta-search"), ("bert", "gpt2")),
    **dict.fromkeys(("prompt-classify", "prompt-generate"), ("gpt2",)),
    **{"squad": ("t5",), "dialogue": ("eva",), "documents": ("cpm-bee",)},
    **{"chid": ("cpm1",), "stc": ("cpm1",), "images": ("vit",), "speech": ("WHISPER",)},
}
TRIALS = [(task, family) for task, families in FAMILIES.items() for family in families]
SMALL = {"vocab_size": 64, "hidden_size": 32, "num_layers": 1, "num_heads": 2, "max_seq_len": 64}
# Option -> value that every task refuses, if it has the option, and a word of the refusal.
VALUES: dict[str, tuple[Any, str]] = {
    "timeout_s": (0.0, "timeout_s=0.0"),
    "layout.tp": (2, "tp"),
    "layout.dp_replicate": (2, "dp_replicate"),
    "loss_scale.init_scale": (8.0, "loss_scale has no effect"),
    "train.master_weights": (False, "train.master_weights=False"),
    "train.schedule.decay_steps": (1, "schedule.decay_steps=1"),
    "train.schedule.warmup_steps": (10**6, "schedule.warmup_steps=1000000"),
    "base_dtype": ("int8", "base_dtype='int8'"),
    "freeze_base": (True, "freeze_base=True"),
    "new_head": (True, "new_head=True has no effect"),
    "license": ("no license", "license='no license'"),
    "data.micro_batch_size": (0, "data.micro_batch_size=0"),
    "data.global_batch_size": (-1, "data.global_batch_size=-1"),
    "data.grad_accum_steps": (0, "data.grad_accum_steps=0"),
    "data.seq_len": (10**6, "data.seq_len=1000000"),
}
# Families without a maximum sequence length, and tasks with a new head by default.
EXCEPT = {
    *((family, "data.seq_len") for family in ("t5", "eva", "cpm-bee", "cpm-ant")),
    *(("reward", option) for option in ("new_head", "freeze_base")),
    ("delta-search", "new_head"),  # refused because no candidate fits
}


def test_every_task_is_tried() -> None:
    assert FAMILIES.keys() == TASKS.keys()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dry")
    write_boolq(folder)
    write_words(folder / "words")
    write_model(folder / "teacher")
    write_speech_model(folder / "WHISPER")
    (folder / "empty.jsonl").touch()
    for name in ("cat", "dog"):
        (folder / "images" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(folder / "images" / name / "0.png")
    return folder


def make_config(place: Path, task: str, family: str) -> tuple[Any, Any]:
    """The recipe and a config for a tiny model; most tasks need no data to check options."""
    name = str(place / family) if family.isupper() else family
    recipe = find_recipe("BoolQ" if task == "classify" else task, name)
    config = recipe.config()
    if not family.isupper():
        fields = {field.name for field in dataclasses.fields(config.model) if field.init}
        sizes = {name: size for name, size in SMALL.items() if name in fields}
        config.model = config.model.without_derived().replace(**sizes)
    data: dict[str, Any] = {"paths": (str(place / "empty.jsonl"),)}
    if task == "images":
        data["paths"] = (str(place / "images"),)
    if task in ("classify", "delta-search", "prompt-classify", "prompt-generate"):
        data = {"paths": (str(place / "BoolQ"),), "task": "BoolQ"}
        data["tokenizer"] = str(place / "words")
    if hasattr(config.data, "seq_len"):
        data["seq_len"] = 32
    config.data = dataclasses.replace(config.data, **data)
    if task == "rl":
        config.reward = ("length:1",)
    if task == "distill":
        config.teacher = str(place / "teacher")
    if hasattr(config, "rollout"):
        config.rollout = dataclasses.replace(config.rollout, max_new_tokens=8)
    config.run_dir = place / "runs" / f"{task}-{family}"
    return recipe, config


def refusal(recipe: Any, config: Any, *launch: Any) -> str:
    with pytest.raises(BmforgeError) as caught:
        recipe.run(config, *launch)
    return str(caught.value)


@pytest.mark.parametrize(("task", "family"), TRIALS, ids=[f"{t}-{f}" for t, f in TRIALS])
def test_a_dry_run_refuses_what_the_run_refuses(task: str, family: str, place: Path) -> None:
    """Before data is read (most data files are empty), and nothing is written."""
    recipe, config = make_config(place, task, family)
    for option, (value, words) in VALUES.items():
        first, _, name = option.partition(".")
        is_absent = first == "data" and not hasattr(config.data, name)
        if is_absent or {(task, option), (family, option)} & EXCEPT:
            continue
        changed = set_option(config, option, value)
        foreseen = refusal(recipe, changed, partial(check_recipe, processes=1))
        assert words in foreseen, option
        assert foreseen == refusal(recipe, changed), option
        assert not (place / "runs").exists(), option
