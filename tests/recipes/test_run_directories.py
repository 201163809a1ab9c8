"""A run directory stands for its export wherever a model or an adapter directory is taken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_runs import write_jsonl
from test_adapter_runs import train, write_qwen3

from bmforge.cli import main
from bmforge.cli.open_model import delta_bytes, find_names
from bmforge.errors import ConfigError
from bmforge.models.config_file import read_config_file
from bmforge.models.hub import find_model
from bmforge.recipes.adapter_dirs import find_source


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `base`, a run that trained an adapter (`tuned 1`) and one that merged it (`merged`)."""
    root = tmp_path_factory.mktemp("runs 目")
    write_qwen3(root / "base")
    train(root / "base", root, name="tuned 1", steps=1)
    train(root / "base", root, "--adapter.merge", name="merged", steps=1)
    return root


def test_adapters(root: Path) -> None:
    run, export = root / "tuned 1", root / "tuned 1" / "export"
    assert find_names([f"mine={run}"]) == {"mine": str(export)}
    assert delta_bytes([str(run)]) == delta_bytes([str(export)]) > 0
    for option in (str(run), f"{run}=0.5"):
        prompt = ["--prompt", "hi", "--max-new-tokens", "1"]
        assert main(["generate", str(root / "base"), "--adapter", option, *prompt]) == 0


@pytest.mark.parametrize("name", ["merged", "merged/export"])
def test_runs_of_models(root: Path, tmp_path: Path, name: str) -> None:
    """A run continues another run's model, and an adapter names a base that PEFT can open."""
    run = train(root / name, tmp_path, steps=1)
    config = json.loads((run / "export" / "adapter_config.json").read_text())
    assert Path(config["base_model_name_or_path"]) == (root / "merged" / "export").resolve()
    assert find_source(run).model == root / "merged" / "export"


@pytest.mark.parametrize("name", ["tuned 1", "tuned 1/export"])
@pytest.mark.parametrize("task", ["conversations", "rl"])
def test_a_task_on_an_adapter_names_merge(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, task: str
) -> None:
    data = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "hi", "answer": "a"}])
    command = ["train", task, "--model", str(root / name), "--data", str(data), "--steps", "1"]
    more = ["--reward", "exact:answer"] if task == "rl" else []
    assert main([*command, *more, "--run-dir", str(tmp_path / "run")]) != 0
    assert "Merge it first: bmforge merge" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_find_model(root: Path) -> None:
    assert find_model(root / "merged") == root / "merged" / "export"
    with pytest.raises(ConfigError, match="is an adapter, not a model"):
        read_config_file(find_model(root / "tuned 1"))
