"""Starting from a model: a field of `model` that is given always holds, the others are its own."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest

from bmforge.cli import main
from bmforge.config import load_toml
from bmforge.data import TokenStoreWriter
from bmforge.errors import ConfigError
from bmforge.models import GPT2, AutoModel, GPT2Config
from bmforge.recipes.finetune import BertSuperGLUEConfig
from bmforge.recipes.inputs.corpus import CorpusConfig
from bmforge.recipes.pretrain import GPT2PretrainConfig, pretrain
from bmforge.recipes.start import change_model, complete_model_config
from bmforge.train import TrainConfig

SIZES = {"vocab_size": 50, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_seq_len": 32}
USUAL = GPT2PretrainConfig().model


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with dropout, which the recipe has not by default, and a token store beside it."""
    root = tmp_path_factory.mktemp("start")
    model = GPT2.from_config(GPT2Config(**SIZES, dropout=0.1, attn_dropout=0.1))
    model.save_pretrained(root / "model")
    with TokenStoreWriter(root / "tokens", vocab_size=50) as writer:
        for number in range(8):
            writer.add_item([(number + i) % 50 for i in range(40)])
            writer.end_document()
    return root


def config(start: Path, **changes: object) -> GPT2PretrainConfig:
    data = CorpusConfig(paths=(str(start / "tokens"),), seq_len=16, global_batch_size=2)
    usual = {"init_from": str(start / "model"), "data": data, "train": TrainConfig(steps=1)}
    return GPT2PretrainConfig(**{**usual, **changes})


def options(start: Path, run_dir: Path) -> list[str]:
    return [
        *("train", "gpt2-pretrain", "--init-from", str(start / "model"), "--run-dir", str(run_dir)),
        *("--data.paths", str(start / "tokens"), "--data.seq-len", "16"),
        *("--data.global-batch-size", "2", "--train.steps", "1", "--model.dropout", "0"),
    ]


def test_what_the_command_line_gives_holds_and_its_run_goes_on(start, tmp_path, capsys) -> None:
    """0 is the recipe's default; run.toml says the same again, and may be changed by hand."""
    assert USUAL.dropout == USUAL.attn_dropout == 0.0
    run_dir = tmp_path / "run"
    assert main(options(start, run_dir)) == 0
    made = AutoModel.from_pretrained(run_dir / "export").config
    assert (made.dropout, made.attn_dropout, made.hidden_size) == (0.0, 0.1, 16)
    file = run_dir / "run.toml"
    first = tomllib.loads(file.read_text())
    assert first["model_changes"] == ["dropout"]
    again = ["train", "gpt2-pretrain", "--config", str(file)]
    assert main([*again, "--train.steps", "2"]) == 0
    assert tomllib.loads(file.read_text()) == {**first, "train": {**first["train"], "steps": 2}}
    assert pretrain(load_toml(GPT2PretrainConfig, file)).step == 2
    capsys.readouterr()
    assert main([*again, "--model.attn-dropout", "0"]) == 2
    assert "model.attn_dropout: 0.1 in that run, now 0.0" in capsys.readouterr().err


def test_a_file_gives_the_fields_it_names(start, tmp_path, capsys) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'init_from = "{start / "model"}"\n[model]\nattn_dropout = 0.0\n')
    assert main(["train", "gpt2-pretrain", "--config", str(file), "--print-config"]) == 0
    printed = capsys.readouterr().out
    shown = tomllib.loads(printed)
    assert shown["model_changes"] == ["attn_dropout"]
    assert (shown["model"]["dropout"], shown["model"]["attn_dropout"]) == (0.1, 0.0)
    assert {name: shown["model"][name] for name in SIZES} == SIZES
    file.write_text(printed.replace("dropout = 0.1", "dropout = 0.0"))
    assert main(["train", "gpt2-pretrain", "--config", str(file), "--print-config"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["model"]["dropout"] == 0.0


def test_python_names_the_fields(start) -> None:
    own = complete_model_config(config(start))
    assert (own.model.dropout, own.model_changes) == (0.1, ())
    differing = complete_model_config(config(start, model=USUAL.replace(dropout=0.3)))
    assert (differing.model.dropout, differing.model.attn_dropout) == (0.3, 0.1)
    given = complete_model_config(config(start, model_changes=("dropout", "attn_dropout")))
    assert (given.model.dropout, given.model.attn_dropout) == (0.0, 0.0)
    assert complete_model_config(given) == given
    with pytest.raises(ConfigError, match="Did you mean 'dropout'"):
        complete_model_config(config(start, model_changes=("dropuot",)))
    with pytest.raises(ConfigError, match="no effect without init_from"):
        complete_model_config(config(start, init_from=None, model_changes=("dropout",)))


def test_what_follows_from_a_given_field_follows(start) -> None:
    """Half as many heads are twice as wide."""
    model = USUAL.without_derived().replace(num_heads=1)
    settled = complete_model_config(config(start, model=model, model_changes=("num_heads",))).model
    assert (settled.num_kv_heads, settled.head_dim, settled.hidden_size) == (1, 16, 16)


def test_a_recipe_changes_the_model_too() -> None:
    changed = change_model(
        BertSuperGLUEConfig(init_from="x", model_changes=("norm_eps",)),
        head="sequence_classification",
        num_labels=2,
    )
    assert changed.model_changes == ("head", "norm_eps")
    assert changed.model.head == "sequence_classification"
    assert change_model(BertSuperGLUEConfig(), num_labels=3).model_changes is None


def test_a_dry_run_is_of_the_model_it_starts_from(start, tmp_path, capsys) -> None:
    assert main([*options(start, tmp_path), "--dry-run", "--world", "2"]) == 0
    model = AutoModel.from_pretrained(start / "model")
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters" in capsys.readouterr().out


def test_a_run_goes_on_when_its_data_has_moved(start, tmp_path) -> None:
    assert main(options(start, tmp_path / "run")) == 0
    for end in (".bin", ".idx"):
        shutil.copy(start / f"tokens{end}", tmp_path / f"moved{end}")
    moved = [str(tmp_path / "moved") if option == str(start / "tokens") else option
             for option in options(start, tmp_path / "run")]  # fmt: skip
    moved[moved.index("--train.steps") + 1] = "2"
    assert main(moved) == 0
    assert "resumed at step 1 of 2" in (tmp_path / "run" / "log.txt").read_text()
