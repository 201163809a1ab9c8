"""Every command checks the path that it writes before it does any work.

The inputs are such that the work itself would fail: model directories whose weights are damaged,
texts that are no archives. A command that begins before it has checked its output would report
the input instead.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import typing
from pathlib import Path
from typing import Any

import pytest

from bmforge.cli import main
from bmforge.cli.commands import COMMANDS
from bmforge.cli.data import SUBCOMMANDS
from bmforge.models import GPT2, GPT2Config
from bmforge.task_names import TASK_NAMES

SIZES = {"vocab_size": 50, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_seq_len": 32}
TRAIN = "--data.paths {root}/texts.txt.gz --run-dir"
# Command -> arguments up to the output path, and whether the output is a file.
WRITES: dict[str, tuple[str, bool]] = {
    "quickstart": ("--input {root}/texts.txt.gz --run-dir", False),
    "prepare": ("{root}/texts.txt.gz --out", False),
    "evaluate": ("{root}/damaged --text {root}/texts.txt.gz --out", True),
    "serve": ("{root}/damaged --uds", True),
    "convert": ("{root}/damaged --out", False),
    "convert-gguf": ("{root}/damaged", True),
    "convert-adapter": ("{root}/adapter --out", False),
    "quantize": ("{root}/damaged --out", False),
    "quantize-adapter": ("{root}/adapter --out", False),
    "merge": ("{root}/adapter --out", False),
    "compress": ("{root}/damaged --recipe {root}/recipe.toml --out", False),
    "compress-adapter": ("{root}/adapter --recipe {root}/recipe.toml --out", False),
    "migrate": ("{root}/missing.sh --out", True),
    "plan": ("{root}/full --plot", True),
    "tree": ("{root}/full --html", True),
    "data collect": ("http://192.0.2.1/ --out", False),
    "data quality": ("--good {root}/texts.txt.gz --out", False),
    **{f"train {task}": (TRAIN, False) for task in TASK_NAMES},
}
MORE = {
    "train rl": "--reward math:sqrt",
    "train distill": "--teacher {root}/model",
    "train classify": "--data.labels a b",
    "train prompt-classify": "--data.labels a b",
    "train prompt-generate": "--data.labels a b",
    "train dialogue": "--model eva2.0-base",
    "train documents": "--model cpm-bee-1b",
    "train stc": "--model cpm1-small",
    "train images": "--model vit-base-patch16-224",
    "train speech": "--model {root}/speech",
}
SHARED = {"data collect", "data quality"}  # they add to the files of a directory
ENDS = {"convert-gguf": ".gguf", "tree": ".html", "plan": ".svg", "migrate": ".toml"}
# Options of commands with a path that is read. Reports are written into the directory that is read.
READS = {
    "keys_file", "ssl_certfile", "ssl_keyfile", "document", "recipe", "verbalizer", "run",
    "directory", "image", "audio",
}  # fmt: skip
OUTPUTS = {"out", "target", "run_dir", "html", "plot", "uds"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs with which no command gets far, a file, and a directory that is not empty."""
    folder = tmp_path_factory.mktemp("inputs")
    GPT2.from_config(GPT2Config(**SIZES)).save_pretrained(folder / "model")
    shutil.copytree(folder / "model", folder / "damaged")
    for file in (folder / "damaged").glob("*.safetensors"):
        file.write_bytes(b"damaged")
    (folder / "speech").mkdir()
    whisper = {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}
    (folder / "speech" / "config.json").write_text(json.dumps(whisper))
    shutil.copy(folder / "model" / "model.safetensors", folder / "speech")
    (folder / "adapter").mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": str(folder / "damaged")}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter" / "adapter_model.safetensors").write_bytes(b"damaged")
    (folder / "texts.txt.gz").write_bytes(b"no archive")
    (folder / "recipe.toml").write_text('[quantize]\nscheme = "int8"\n')
    (folder / "file").write_text("a file")
    for ending in ("", *ENDS.values()):
        (folder / f"full{ending}").mkdir()
        (folder / f"full{ending}" / "note.txt").write_text("of the user")
    return folder


def list_path_fields(kind: type[Any]) -> set[str]:
    """Return the names of a command's options that are paths."""
    names, hints = set(), typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            names |= list_path_fields(typing.cast(Any, hints[field.name]))
        elif Path in (hints[field.name], *typing.get_args(hints[field.name])):
            names.add(field.name)
    return names


def test_every_path_is_known() -> None:
    """A new command, or a new option with a path, has to join the tables above."""
    kinds = {name: command.options for name, command in COMMANDS.items() if command.options}
    kinds |= {f"data {name}": options for name, (_, options, _) in SUBCOMMANDS.items()}
    fields = {name: list_path_fields(kind) for name, kind in kinds.items()}
    assert set().union(*fields.values()) == READS | OUTPUTS
    writing = {name for name, names in fields.items() if names & OUTPUTS}
    assert writing == {name for name in WRITES if not name.startswith("train ")
                       and name.partition("-")[0] == name} - {"evaluate"}  # fmt: skip


def join_words(command: str, root: Path, bad: Path) -> list[str]:
    """Return the arguments of a command of the table."""
    name, _, task = command.partition(" ")
    line = f"{WRITES[command][0]} {bad} {MORE.get(command, '')}".format(root=root)
    if task in TASK_NAMES and "--model" not in line:
        line += f" --model {root}/model"
    words = [task] if task else []
    return [name.partition("-")[0], *words, *line.split()]


@pytest.mark.parametrize("kind", ["below a file", "of the other kind", "not empty"])
@pytest.mark.parametrize("command", WRITES)
def test_outputs_are_checked_first(
    command: str, kind: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    is_file, ending = WRITES[command][1], ENDS.get(command, "")
    if kind == "not empty" and (is_file or command in SHARED):
        pytest.skip("the command adds files to a directory, or writes a file")
    name = {"below a file": "file/x", "of the other kind": "full" if is_file else "file"}
    bad = root / (name.get(kind, "full") + ending)
    before = sorted(root.rglob("*"))
    assert main(join_words(command, root, bad)) == 2
    message = capsys.readouterr().err
    assert repr(str(bad)) in message
    assert "Traceback" not in message
    assert sorted(root.rglob("*")) == before
