"""Mistakes in options are reported before torch is imported, which takes several seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bmforge.cli.early_checks import check_arguments, check_model
from bmforge.errors import ConfigError

TRAIN = "train conversations --model gpt2-small --data chats.jsonl"
# Arguments, and words of the error.
CASES = [
    (f"{TRAIN} --epochs -1", "epochs=-1.0 must be above 0, and finite."),
    (f"{TRAIN} --epochs -1", "In this command, the option is --epochs."),
    (f"{TRAIN} --lr -1e-4", "train.optim.lr=-0.0001 must be at least 0, and finite."),
    (f"{TRAIN} --lr -1e-4", "In this command, the option is --lr."),
    (f"{TRAIN} --lr=x", "--lr x is not valid (needed: a number). Correct the value."),
    (f"{TRAIN} --train.optim.lr x", "--train.optim.lr x is not valid (needed: a number)."),
    (f"{TRAIN} --batch-size -8", "data.global_batch_size=-8 must be at least 1."),
    (f"{TRAIN} --batch_size -8", "In this command, the option is --batch-size."),
    (f"{TRAIN} --seq-len -5", "data.seq_len=-5 must be at least 1."),
    (f"{TRAIN} --seq-len", "--seq-len needs a value."),
    (f"{TRAIN} --adapter loar", "Did you mean 'lora'?"),
    (f"{TRAIN} --precision bf61", "--precision bf61 is not supported (supported: bf16, fp16"),
    (f"{TRAIN} --precision bf61", "Did you mean 'bf16'?"),
    (f"{TRAIN} --train.schedule.kind cosin", "Did you mean 'cosine'?"),
    (f"{TRAIN} --config nowhere.toml", "config file 'nowhere.toml' does not exist."),
    ("train conversations --model gpt2-smal", "Did you mean 'gpt2-small'"),
    ("train conversations --model ./mine", "no such directory: './mine'"),
    ("train conversations --model my.gguf", "the GGUF file 'my.gguf' does not exist."),
    ("train conversations --model gpt2 --data chat.jsonl", "Did you mean 'chats.jsonl'?"),
    ("train conversations --model gpt2 --data chats.jsonl no.jsonl", "the file 'no.jsonl'"),
    ("generate runs/mine/export --prompt hi", "no such directory: 'runs/mine/export'"),
    ("evaluate runs/mine/export --text x", "no such directory: 'runs/mine/export'"),
    ("quantize runs/mine/export out", "no such directory: 'runs/mine/export'"),
]
PROGRAM = """
import contextlib, io, json, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        assert name != "torch", "torch is imported"

sys.meta_path.insert(0, Finder())
from bmforge.cli import main
for line in sys.stdin.read().splitlines():
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        status = main(line.split())
    print(json.dumps([status, shown.getvalue()]))
"""


def test_mistakes_are_reported_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").touch()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input="\n".join(command for command, _ in CASES),
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    for (command, words), line in zip(CASES, done.stdout.splitlines(), strict=True):
        status, shown = json.loads(line)
        assert status == 2, command
        assert words in shown, command
        assert shown.startswith("error: ")


@pytest.mark.parametrize(
    "arguments",
    [
        "--data.paths corpus/text --train.grad-clip None --train.optim.betas 0.9 0.99",
        "--model OWNER/NAME --layout.zero 3 --offload.fraction auto --compile --epochs 0.5",
        "--model CPM-Bee --data.paths corpus --data.paths=corpus/text --adapter.kind None",
        "--data.paths nowhere --print-config",
        "--model.num-layers 2 --train.steps=7 --no-export --adapter.rank None",
    ],
)
def test_correct_options_are_accepted(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token store is named without the suffixes of its files."""
    monkeypatch.chdir(tmp_path)
    Path("corpus").mkdir()
    Path("corpus/text.bin").touch()
    check_arguments("pretrain", arguments.split())


def test_names_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    for name in ("mine", "gpt2", "gpt2-small", "cpm-bee", "CPMBee", "me/mine"):
        check_model(name)
    with pytest.raises(ConfigError, match="unknown model: model='nowhere'"):
        check_model("nowhere")
