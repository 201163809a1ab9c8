"""OpenPrompt's yaml configs become runs that say the same, or say what they could not."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from bmforge.cli import main
from bmforge.compat.openprompt.configs import read_config
from bmforge.config import config_from_dict
from bmforge.errors import ConfigError
from bmforge.recipes.prompt import PromptGenerateConfig, PromptTuneConfig

FEW_SHOT = """
dataset:
  name: agnews
  path: datasets/TextClassification/agnews
plm:
  model_name: bert
  model_path: bert-large-cased
  optimize:
    freeze_para: False
    lr: 0.00003
    weight_decay: 0.02
    adam_epsilon: 1e-6
    scheduler:
      type:
      num_warmup_steps: 12
train:
  batch_size: 4
  num_epochs: 3
  gradient_accumulation_steps: 2
  max_grad_norm: 0.5
test:
  batch_size: 8
dataloader:
  max_seq_length: 128
  truncate_method: balanced
template: manual_template
verbalizer: manual_verbalizer
manual_template:
  parent_config: template
  choice: 2
  file_path: scripts/agnews/manual_template.txt
mixed_template:
  file_path: elsewhere.txt
manual_verbalizer:
  choice: 2
  file_path: scripts/agnews/manual_verbalizer.txt
  multi_token_handler: mean
environment:
  num_gpus: 1
  cuda_visible_devices:
learning_setting: few_shot
few_shot:
  parent_config: learning_setting
  few_shot_sampling: sampling_from_train
sampling_from_train:
  num_examples_per_label: 10
  also_sample_dev: True
  seed:
    - 123
    - 124
reproduce:
  seed: 7
calibrate: contextualized_calibrate
contextualized_calibrate:
  num_example: 20
  use_split: train
train_verbaliser: post
"""
GENERATION = """
dataset: {name: webnlg_2017, path: data}
task: generation
plm:
  model_name: t5
  model_path: t5-base
  optimize: {freeze_para: True}
train: {num_training_steps: 50, batch_size: 2, teacher_forcing: True}
generation: {max_length: 512, num_beams: 5, max_new_tokens: 64}
template: prefix_tuning_template
prefix_tuning_template:
  text: '{"placeholder":"text_a"} {"mask"}'
  num_token: 6
  mid_dim: 32
  prefix_dropout: 0.1
  optimize: {lr: 5.0e-5, weight_decay: 0.0, scheduler: {num_warmup_steps: 3}}
learning_setting: full
"""
SOFT = """
dataset: {name: super_glue.boolq}
plm: {model_name: t5, model_path: t5-large, optimize: {freeze_para: %s, lr: 0.001}}
train: {num_training_steps: 50}
template: soft_template
verbalizer: soft_verbalizer
soft_template: {num_tokens: 100, choice: 1, optimize: {lr: 0.3, weight_decay: 0.0}}
soft_verbalizer: {label_words: {'No': ['no'], 'Yes': ['yes']}, num_classes: 2}
learning_setting: zero_shot
"""


def read(tmp_path: Path, text: str, **options):
    file = tmp_path / "old.yaml"
    file.write_text(text)
    return read_config(file, **options)


def test_a_few_shot_config(tmp_path):
    found = read(tmp_path, FEW_SHOT)
    assert found.task == "prompt-classify"
    assert found.values == {
        "init_from": "bert-large-cased",
        "seed": 7,
        "cut": "balanced",
        "template": "scripts/agnews/manual_template.txt",
        "choice": 2,
        "verbalizer": "scripts/agnews/manual_verbalizer.txt",
        "join": "mean",
        "calibrate": 20,
        "data": {
            "task": "ag_news", "paths": ["datasets/TextClassification/agnews"], "dev_split": "test",
            "seq_len": 128, "micro_batch_size": 4, "grad_accum_steps": 2, "shots": 10,
            "seed": 123, "seeds": 2,
        },
        "train": {
            "steps": 15,  # 3 x 40 examples of 4 labels / 8
            "grad_clip": 0.5,
            "optim": {"betas": [0.9, 0.999], "weight_decay": 0.02, "eps": 1e-6, "lr": 3e-5},
            "schedule": {"kind": "linear", "warmup_steps": 12},
        },
    }  # fmt: skip
    assert [name for name, _ in found.unplaced] == [
        "sampling_from_train.also_sample_dev", "train_verbaliser",
    ]  # fmt: skip
    assert found.unplaced[-1][1] == "unknown key"
    assert {name for name, _ in found.dropped} == {
        "plm.model_name", "environment.num_gpus", "test.batch_size", "mixed_template.file_path",
    }  # fmt: skip
    config = config_from_dict(PromptTuneConfig, found.values)
    assert (config.data.shots, config.train.optim.lr) == (10, 3e-5)


def test_every_key_has_an_end(tmp_path):
    """It is in the run, or listed: none goes without a word, whatever it is called."""
    for line in FEW_SHOT.splitlines():
        if ":" not in line or line.strip().endswith(":") or "parent_config" in line:
            continue
        key, _, value = line.partition(":")
        odd = FEW_SHOT.replace(line, f"{key}_odd:{value}")
        found = read(tmp_path, odd)
        assert any(name.endswith(f"{key.strip()}_odd") for name, _ in
                   (*found.unplaced, *found.dropped)), line  # fmt: skip


def test_a_config_that_writes_texts(tmp_path):
    found = read(tmp_path, GENERATION, files_dir=tmp_path / "out")
    assert found.task == "prompt-generate"
    config = config_from_dict(PromptGenerateConfig, found.values)
    assert (config.adapter.kind, config.adapter.length, config.adapter.inner) == ("prefix", 6, 32)
    assert (config.train.optim.lr, config.train.optim.weight_decay) == (5e-5, 0.0)
    assert (config.train.steps, config.train.grad_clip, config.max_new_tokens) == (50, None, 64)
    assert config.data.task == "WebNLG"
    assert not config.freeze_base  # a delta freezes the rest anyway
    assert config.template == tmp_path / "out" / "template.txt"
    assert found.files == {"template.txt": '{"placeholder":"text_a"} {"mask"}\n'}
    names = {name for name, _ in found.unplaced}
    assert names == {
        "prefix_tuning_template.prefix_dropout", "generation.max_length", "generation.num_beams",
    }  # fmt: skip


def test_rows_with_a_rate_of_their_own(tmp_path):
    frozen = read(tmp_path, SOFT % "True", files_dir=tmp_path)
    config = config_from_dict(PromptTuneConfig, frozen.values)
    assert (config.soft_front, config.choice, config.zero_shot) == (100, 1, True)
    assert (config.freeze_base, config.train.optim.lr, config.train.optim.weight_decay) == (
        True, 0.3, 0.0,
    )  # fmt: skip
    assert config.data.task == "BoolQ"
    assert any(name == "verbalizer" for name, _ in frozen.unplaced)
    assert frozen.files == {"verbalizer.json": '{"No": ["no"], "Yes": ["yes"]}\n'}
    whole = config_from_dict(PromptTuneConfig, read(tmp_path, SOFT % "False").values)
    assert (whole.freeze_base, whole.train.optim.lr) == (False, 0.001)
    (group,) = whole.train.optim.groups
    assert (group.glob, group.lr, group.weight_decay) == ("embed.prompt.weight", 0.3, 0.0)


def test_on_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("old.yaml").write_text(GENERATION)
    assert main(["migrate", "old.yaml", "--out", "new/run.toml"]) == 0
    said = capsys.readouterr().out
    assert "bmforge train prompt-generate --config new/run.toml" in said
    assert "generation.num_beams: texts are generated greedily" in said
    text = Path("new/run.toml").read_text()
    assert "# not migrated: generation.num_beams" in text
    assert tomllib.loads(text)["template"] == "new/template.txt"
    assert Path("new/template.txt").exists()
    assert main(["migrate", "old.yaml", "--out", "new/run.toml"]) == 2
    assert "already exists" in capsys.readouterr().err


def test_what_is_no_config(tmp_path):
    for text, said in (
        ("a: [", "cannot be read"),
        ("- a", "is not a valid OpenPrompt config"),
        ("other: 1", "is not a valid OpenPrompt config"),
        ("plm: {optimize: {eps: x}}\ndataset: {name: mnli}", r"eps='x' must be of type float"),
        (SOFT.replace("'", "") % "True", "Put words in quotes"),
        ("!!python/object/apply:os.getcwd []", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=said):
            read(tmp_path, text)
