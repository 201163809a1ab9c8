"""Wrong inputs of training commands: one sentence, before weights are read, and nothing is left."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from test_rl_runs import write_model

from bmforge.cli import main

CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
FILES: Mapping[str, list[Any]] = {
    "ok.jsonl": [CHAT] * 12,
    "pairs.jsonl": [PAIR] * 4,
    "empty.jsonl": [],
    "unknown.jsonl": [CHAT, {**CHAT, "foo": 1}],
    "text.jsonl": [{"text": "a"}],
    "number.jsonl": [{"messages": [{"role": "user", "content": 5}, CHAT["messages"][1]]}],
}
TEXTS = {
    "bad.jsonl": json.dumps(CHAT) + "\n{not json\n",
    "bad.toml": "[train\n",
    "type.toml": '[train]\nsteps = "x"\n',
    "bad.jinja": "{% for %}",
    "file": "x",
    "other/notes.txt": "x",
    "broken/config.json": "{",
}
# Task and options that differ from a correct run, and words of the error.
CASES = [
    ("conversations --model nowhere", "unknown model: model='nowhere'"),
    ("conversations --model broken", "'broken/config.json' is not valid JSON"),
    ("conversations --model other", "it contains no config.json"),
    ("conversations --model weightless", "'weightless' contains no weights"),
    ("conversations --model cut", "model.safetensors' is damaged"),
    ("conversations --model wordless", "there is no tokenizer in 'wordless'"),
    ("conversations --data nowhere.jsonl", "the file 'nowhere.jsonl' does not exist"),
    ("conversations --data empty.jsonl", "there is no training example in"),
    ("conversations --data bad.jsonl", "'bad.jsonl', line 2 is not JSON"),
    ("conversations --data unknown.jsonl", "Ignore them with --data.ignore foo"),
    ("conversations --data text.jsonl", "needed: 'messages'"),
    ("conversations --data number.jsonl", "content of type 'int'"),
    ("conversations --data pairs.jsonl", "Use `bmforge train preferences`"),
    ("conversations --data folder", "the folder 'folder' contains no conversation file"),
    ("conversations --data.validation empty.jsonl", "data.validation=['empty.jsonl'] contains no"),
    ("conversations --data.validation-fraction 1.5", "data.validation_fraction=1.5"),
    ("conversations --template nowhere.jinja", "template='nowhere.jinja' is neither a file nor"),
    ("conversations --template bad.jinja", "the chat template is not valid"),
    ("conversations --config nowhere.toml", "config file 'nowhere.toml' does not exist"),
    ("conversations --config bad.toml", "'bad.toml' is not valid TOML"),
    ("conversations --config type.toml", "train.steps='x' must be int, not str"),
    ("conversations --changes {", "is not valid JSON"),
    ("conversations --run-dir file", "run_dir='file' is a file"),
    ("conversations --run-dir file/inside", "is not a directory"),
    ("conversations --run-dir other", "contains files but no run.toml"),
    ("conversations --layout.tp 2", "tp=2"),
    ("conversations --layout.pp 4 --layout.tp 2", "pp=4"),
    ("conversations --precision fp8", "--precision fp8 is not supported"),
    ("conversations --base-dtype int4", "base_dtype='int4' requires an adapter"),
    ("conversations --adapter lora --adapter.rank 0", "rank=0 is out of range"),
    ("conversations --adapter ia3 --adapter.rank 4", "adapter.rank=4 has no effect with"),
    ("conversations --adapter lora --adapter.target-modules x", "target 'x' matches no module"),
    ("conversations --model.intermediate-size 20", "(model.intermediate_size=20). Leave"),
    ("conversations --model.hidden-size 64", "(model.hidden_size=64, model.head_dim=16). Leave"),
    ("conversations --batch-size 0", "data.global_batch_size=0"),
    ("conversations --seq-len 4096", "data.seq_len=4096 is more than model.max_seq_len=32"),
    ("conversations --train.eval-every-steps 1", "has no effect without held-out data"),
    ("conversations --train.schedule.warmup-steps 5", "schedule.warmup_steps=5"),
    ("conversations --push-to-hub noowner", "push_to_hub='noowner' must be OWNER/NAME"),
    ("conversations --push-to-hub me/mine", "push_to_hub='me/mine' needs"),
    ("conversations --override train.lr", "override='train.lr' is not a field of this run"),
    ("conversations --offload.fraction 1 --offload.target disk --offload.directory file", "'file'"),
    ("conversations --epochs inf", "epochs=inf must be above 0, and finite"),
    ("preferences --data ok.jsonl", "is not a preference record"),
    ("preferences --data pairs.jsonl --method dpoo", "Did you mean 'dpo'?"),
    ("preferences --data pairs.jsonl --reference adapter", "needs an adapter"),
    ("reward --data ok.jsonl", "is not a preference record"),
    ("rl --data pairs.jsonl --seq-len 8 --max-completion-length 4 --reward no.py:f", "no.py"),
    (
        "rl --data pairs.jsonl --seq-len 8 --max-completion-length 4 --reward dir:ok",
        "--reward dir:ok",
    ),
    ("distill --data pairs.jsonl --seq-len 8 --max-completion-length 4", "needs a teacher"),
    ("pretrain --data ok.jsonl", "'ok.jsonl.bin' of token store 'ok.jsonl' does not exist"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wrong")
    write_model(place / "ok", more="A: \n.U")
    for name, files in (("weightless", "*.safetensors"), ("wordless", "token*"), ("cut", "")):
        shutil.copytree(place / "ok", place / name)
        for file in (place / name).glob(files) if files else ():
            file.unlink()
    (weights,) = (place / "cut").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:3000])
    for name in ("other", "broken", "folder"):
        (place / name).mkdir()
    for name, rows in FILES.items():
        (place / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in TEXTS.items():
        (place / name).write_text(text)
    return place


def list_files(place: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_mtime_ns) for path in place.rglob("*"))


@pytest.mark.parametrize(("case", "words"), CASES, ids=[case for case, _ in CASES])
def test_a_wrong_input_is_refused_in_one_sentence(
    case: str,
    words: str,
    place: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the same sentence by the dry run."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("weights were read or initialized")

    monkeypatch.chdir(place)
    for name in ("load_weights_", "init_weights_"):
        monkeypatch.setattr(f"bmforge.recipes.build.{name}", refuse)
    task, *options = case.split()
    usual = {"--model": "ok", "--data": "ok.jsonl", "--run-dir": "runs/a", "--seq-len": "32"}
    usual |= {} if "--epochs" in options else {"--steps": "1"}
    for name, value in usual.items():
        options += [] if name in options else [name, value]
    before, errors = list_files(place), []
    for switches in (["--dry-run"], []):
        assert main(["train", task, *options, *switches]) == 2
        shown = capsys.readouterr().err.splitlines()
        errors.append([line for line in shown if line.startswith("error: ")])
        assert list_files(place) == before
    assert errors[0] == errors[1]
    assert len(errors[0]) == 1
    assert words in errors[0][0]
