"""`bmforge train TASK --model ...`: which model is meant, what follows from it, what is refused."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest

from bmforge.cli import main
from bmforge.cli.train_help import SHORT_NAMES, SWITCHES, describe_task
from bmforge.config import config_to_dict
from bmforge.data import TokenStoreWriter
from bmforge.data.tasks import TASKS as PUBLISHED
from bmforge.errors import ConfigError
from bmforge.models import GPT2, AutoModel, Bert, BertConfig, GPT2Config, T5Config
from bmforge.models.hub import FAMILIES, find_config
from bmforge.recipes.pretrain import GPT2PretrainConfig
from bmforge.recipes.registry import RECIPES, TASKS, find_recipe
from bmforge.recipes.start import find_start

SIZES = {"vocab_size": 50, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_seq_len": 32}


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["train", *words, "--print-config"]) == 0
    return tomllib.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("start")
    GPT2.from_config(GPT2Config(**SIZES, dropout=0.1)).save_pretrained(root / "gpt2")
    Bert.from_config(BertConfig(**SIZES, intermediate_size=32)).save_pretrained(root / "bert")
    with TokenStoreWriter(root / "tokens", vocab_size=50) as writer:
        for number in range(8):
            writer.add_item([(number + i) % 50 for i in range(40)])
            writer.end_document()
    return root


def test_a_model_is_a_preset_a_family_or_a_directory(start: Path) -> None:
    preset = find_start("gpt2-medium")
    assert (preset.family, preset.init_from) == (GPT2, None)
    assert preset.config == GPT2Config.preset("gpt2-medium")
    for name in ("gpt2", "GPT2"):
        assert find_start(name).config == GPT2Config()
    assert find_start("cpm-bee").family is find_start("CPMBee").family is FAMILIES["CPMBee"]
    opened = find_start(str(start / "gpt2"))
    assert opened.init_from == str(start / "gpt2")
    assert (opened.config.hidden_size, opened.config.dropout) == (16, 0.1)
    with pytest.raises(
        ConfigError, match=r"unknown model: model='gtp2-small'.*Did you mean 'gpt2-small'"
    ):
        find_start("gtp2-small")


@pytest.mark.parametrize("name", ["gpt2", "GPT2", "gpt2-medium", "bert", "cpm-bee"])
def test_a_directory_has_precedence_over_a_preset(
    name: str,
    start: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In training and in the other commands; a folder that is no model changes nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    assert find_start(name).init_from is None
    shutil.copytree(start / "gpt2", tmp_path / name, dirs_exist_ok=True)
    with caplog.at_level("INFO"):
        opened = find_start(name)
    assert (opened.init_from, opened.config.hidden_size) == (name, 16)
    assert f"{name} is read from the directory ./{name}" in caplog.text
    assert find_config(name)[1].hidden_size == 16
    (tmp_path / name / "config.json").unlink()
    assert find_start(name).init_from is None


def test_another_name_of_a_task() -> None:
    assert find_recipe("sft", "gpt2-small").run is find_recipe("conversations", "gpt2-small").run


@pytest.mark.parametrize("name", RECIPES)
def test_an_old_name_is_a_task_with_a_model(name: str) -> None:
    """Both forms have the same options, and but for what says the family the same values."""
    old = RECIPES[name]
    usual = old.config()
    family = next(f for f in FAMILIES.values() if f.config_class is type(usual.model))
    preset = next(
        (p for p in family.config_class.presets if family.config_class.preset(p) == usual.model),
        None,
    )
    assert preset is not None
    new = find_recipe(old.task, preset)
    assert new.run is old.run
    values, others = config_to_dict(new.config()), config_to_dict(usual)
    for left_out in ("run_dir", "family", "new_head"):
        values.pop(left_out, None)
        others.pop(left_out, None)
    assert values == others


def test_options_are_the_models(start: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A family's defaults, a preset's, a directory's; what follows from a width follows."""
    family = shown(capsys, "pretrain", "--model", "gpt2", "--model.hidden-size", "96")
    assert (family["model"]["hidden_size"], family["model"]["num_layers"]) == (96, 12)
    preset = shown(capsys, "pretrain", "--model", "t5-v1_1-base", "--noise-density", "0.2")
    assert preset["model"] == config_to_dict(T5Config.preset("t5-v1_1-base"))
    assert preset["noise_density"] == 0.2
    own = shown(capsys, "pretrain", "--model", str(start / "gpt2"), "--model.dropout", "0")
    assert (own["model"]["hidden_size"], own["model"]["dropout"]) == (16, 0.0)
    assert (own["init_from"], own["model_changes"]) == (str(start / "gpt2"), ["dropout"])
    same = shown(capsys, "pretrain", "--init-from", str(start / "gpt2"), "--model.dropout", "0")
    assert same == own


def test_rows_are_no_longer_than_the_model_reads(tmp_path: Path) -> None:
    """Where nothing is said of them; what is longer by itself goes on as usual."""
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_layers": 1, "num_heads": 2}
    for longest, rows in ((24, 24), (4096, GPT2PretrainConfig().data.seq_len)):
        folder = tmp_path / str(longest)
        GPT2.from_config(GPT2Config(**sizes, max_seq_len=longest)).save_pretrained(folder)
        assert find_recipe("pretrain", str(folder)).config().data.seq_len == rows


def test_help_names_the_model_and_what_is_no_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train", "pretrain", "--model", "gpt2-medium", "--help-all"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: bmforge train pretrain --model gpt2-medium [-h]")
    for word in (TASKS["pretrain"].about, "--config FILE", "--print-config", "--changes JSON"):
        assert word in said
    assert "--model.hidden-size INT" in said


def test_switches_need_no_value(capsys: pytest.CaptureFixture[str]) -> None:
    told = shown(capsys, "pretrain", "--model", "gpt2-small", "--freeze-base", "--new-head")
    assert (told["freeze_base"], told["new_head"]) == (True, True)


def test_an_old_name_with_another_model(capsys: pytest.CaptureFixture[str]) -> None:
    told = shown(capsys, "llama-sft", "--model", "gpt2-medium")
    assert (told["run_dir"], told["family"]) == ("runs/gpt2-conversations", "GPT2")


def test_a_published_task_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    told = shown(capsys, "boolq", "--model", "gpt2-small")
    assert (told["data"]["task"], told["run_dir"]) == ("BoolQ", "runs/gpt2-boolq")
    assert shown(capsys, "cmrc2018", "--model", "cpm2")["max_new_tokens"] == 32
    # ChID is CPM-1's own with its tokenizer, and CLUE's for all others.
    assert "task" not in shown(capsys, "chid", "--model", "cpm1-small")["data"]
    assert shown(capsys, "chid", "--model", "gpt2")["data"]["task"] == "chid"
    assert {name for name, task in PUBLISHED.items() if task.asks_for_text} == {
        "SQuAD",
        "cmrc2018",
        "drcd",
        "WebNLG",
    }


def test_a_file_changes_what_it_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And run.toml says all, its family too."""
    file = tmp_path / "mine.toml"
    file.write_text("[train]\nsteps = 9\n[model]\nhidden_size = 1280\n")
    told = shown(capsys, "pretrain", "--model", "gpt2-medium", "--config", str(file))
    assert (told["model"]["num_layers"], told["model"]["hidden_size"]) == (24, 1280)
    assert (told["model"]["intermediate_size"], told["train"]["steps"]) == (5120, 9)
    assert main(["train", "pretrain", "--model", "gpt2-medium", "--print-config"]) == 0
    file.write_text(capsys.readouterr().out)
    assert shown(capsys, "pretrain", "--config", str(file)) == tomllib.loads(file.read_text())


def test_a_run_goes_on_under_either_name(start: Path, tmp_path: Path) -> None:
    options = ["--data.paths", str(start / "tokens"), "--data.seq-len", "16"]
    options += ["--data.global-batch-size", "2", "--run-dir", str(tmp_path / "run")]
    sizes = [f"--model.{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    assert main(["train", "gpt2-pretrain", *options, *sizes, "--train.steps", "1"]) == 0
    words = ["train", "pretrain", "--model", "gpt2-small", *options, *sizes, "--train.steps", "2"]
    assert main(words) == 0
    file = tmp_path / "run" / "run.toml"
    assert main(["train", "pretrain", "--config", str(file), "--train.steps", "3"]) == 0
    assert main(["train", "gpt2-pretrain", "--config", str(file), "--train.steps", "4"]) == 0
    kept = [
        line
        for line in file.read_text().splitlines()
        if line.partition(" ")[0] not in ("new_head", "family", "changes")
    ]
    file.write_text("\n".join(kept) + "\n")  # as earlier versions wrote it
    words[1:4] = ["gpt2-pretrain"]
    assert main([*words[:-1], "5"]) == 0
    assert tomllib.loads(file.read_text())["train"]["steps"] == 5
    assert AutoModel.from_pretrained(tmp_path / "run" / "export").config.hidden_size == 16


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        ("pretrian --model gpt2", ["unknown task 'pretrian'", "Did you mean 'pretrain'"]),
        ("gtp2-pretrain", ["Did you mean 'gpt2-pretrain'"]),
        ("pretrain", ["needs a model", "--model", "GPT2"]),
        (
            "pretrain --model vit",
            ["ViT does not support the task 'pretrain'", "Tasks of ViT: images."],
        ),
        (
            "conversations --model bert-base-uncased",
            ["Bert does not support", "GPT2", "Tasks of Bert:"],
        ),
        ("documents --model llama", ["Families that do: CPMBee."]),
        ("dialogue --model t5", ["Families that do: EVA."]),
        ("stc --model gpt2", ["Families that do: CPM1."]),
        ("images --model gpt2", ["Families that do: ViT."]),
        ("images --model vit --layout auto", ["--layout auto does not support image models"]),
        ("squad --model cpmant", ["CPMAnt does not support", "T5"]),
        ("pretrain --model gpt2 --family Llama", ["family='Llama'", "GPT2"]),
    ],
)
def test_what_cannot_be_trained_is_said(
    words: str,
    texts: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words.split()]) == 2
    said = capsys.readouterr().err
    for text in texts:
        assert text in said
    assert not any(tmp_path.iterdir())


def test_every_family_can_be_trained() -> None:
    for name, family in FAMILIES.items():
        can = [task for task, found in TASKS.items() if found.form(family.family_traits)]
        assert can, name


def test_a_missing_head_is_said_before_anything_is_read(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A classifier on a masked language model: only where it is asked for."""
    words = ["train", "BoolQ", "--model", str(start / "bert"), "--run-dir", str(tmp_path / "run")]
    words += ["--data.paths", str(tmp_path), "--data.seq-len", "16"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "has no head 'sequence_classification'" in said
    assert "classifier.weight" in said
    assert "--new-head" in said
    assert not (tmp_path / "run").exists()
    assert main([*words, "--new-head"]) == 2
    assert "BoolQ has no file for the split 'train'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("task", TASKS)
def test_the_help_of_a_task_lists_options_that_it_has(task: str) -> None:
    """Of every implementation; the groups are not empty."""
    rows = [line.split()[0] for line in describe_task(task).splitlines() if line.startswith("  --")]
    fields = {
        SHORT_NAMES.get(row, row)[2:].replace("-", "_") for row in rows if row not in SWITCHES
    }
    assert len(rows) - len(fields) == len(SWITCHES) - 2  # --world, --help-all
    for form in TASKS[task].forms:
        for name in fields:
            config = form.config()
            for part in name.split("."):
                assert hasattr(config, part), (name, form.config)
                config = getattr(config, part)
