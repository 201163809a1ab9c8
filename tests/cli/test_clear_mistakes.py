"""Mistakes of first users get one sentence that names the fix, before any work is done."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from bmforge.cli import main
from bmforge.cli.commands import COMMANDS
from bmforge.cli.completion import list_words
from bmforge.cli.data import SUBCOMMANDS
from bmforge.cli.foreign_options import FOREIGN_COMMANDS, FOREIGN_OPTIONS
from bmforge.cli.option_names import name_options, options_of
from bmforge.cli.options import EvaluateCommand
from bmforge.cli.parse import find_options
from bmforge.cli.train_help import SHORT_NAMES, describe_task
from bmforge.config import save_toml
from bmforge.data.sources.encoding import decode
from bmforge.errors import CheckpointError, ConfigError, DataError
from bmforge.provenance import Provenance, ProvenanceSource, describe_provenance
from bmforge.recipes.adapter_dirs import merged_model
from bmforge.recipes.adapters import AdapterConfig, resolve_adapter
from bmforge.recipes.pretrain import GPT2PretrainConfig
from bmforge.recipes.run_dir import check_run_dir
from bmforge.serve.errors import explain_types
from bmforge.serve.openai_types import ChatRequest
from bmforge.settings import MemoryOptions
from bmforge.tokenizers import AutoTokenizer

PARSED = [name for name, command in COMMANDS.items() if command.options is not None]
USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("command", PARSED)
def test_misspelled_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence with the nearest option, in every command."""
    paths = [path for path, _ in find_options(COMMANDS[command].options, positional=False)]
    for path in [path for path in paths if len(path) > 5][:3]:
        assert main([command, "x", f"--{path[:-2]}{path[-1]}{path[-2]}z", "1"]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: unknown option of bmforge {command}: --")
        assert said.count("\n") == 1
        assert "Did you mean '--" in said


# Option of another program, and the option that does the same in `bmforge train`.
OTHER_NAMES = """
--num_train_epochs 3: --epochs; --num-train-epochs=3: --epochs; --adapter.r 8: --adapter.rank
--lora_r 8: --adapter.rank; --lora_alpha 16: --adapter.alpha; --loss-type ipo: --method
--learning_rate 1e-4: --lr; --per_device_train_batch_size 2: --micro-batch-size
--max_seq_length 512: --seq-len; --gradient_accumulation_steps 4: --data.grad-accum-steps
--gradient_checkpointing: --recompute; --bf16: --precision bf16; --cutoff_len 9: --seq-len
--load_in_4bit: --base-dtype int4; --weight_decay 0.1: --train.optim.weight-decay
"""


@pytest.mark.parametrize("pair", OTHER_NAMES.strip().replace("\n", "; ").split("; "))
def test_options_of_other_programs(pair: str, capsys: pytest.CaptureFixture[str]) -> None:
    typed, option = pair.split(": ")
    assert main(["train", "preferences", "--model", "gpt2", *typed.split()]) == 2
    assert f"Did you mean '{option}'?" in capsys.readouterr().err


def test_the_task_and_the_command_select_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    """`--beta` is an option of preferences, not of rl; a model has no option elsewhere."""
    for arguments, advice in (
        (["train", "rl", "--model", "gpt2", "--beta", "0.1"], "Did you mean '--rl.beta'?"),
        (["evaluate", "--max_length", "9"], "Did you mean '--seq-len'?"),
        (["plan", "gpt2", "--lora_r", "9"], "Did you mean '--adapter-rank'?"),
        (["merge", "x", "--base_model=y"], "Did you mean '--base'?"),
        (["generate", "--model", "x"], "Pass it without a name: bmforge generate MODEL."),
        (["quantize", "--model_name_or_path=x"], "bmforge quantize SOURCE."),
        (["data", "collect", "http://x.org/", "--max_pages", "3"], "Did you mean '--most-pages'?"),
        (["data", "collect", "http://x.org/", "--user-agent", "a"], "Did you mean '--agent'?"),
        (["data", "collect", "--url", "http://x.org/"], "bmforge data collect URLS."),
        (["collect", "http://x.org/"], "Did you mean 'data collect'?"),
        (["tokenizer", "a.txt"], "Did you mean 'prepare'?"),
        (["prepre", "a.txt"], "Did you mean 'prepare'?"),
    ):
        assert main(arguments) == 2
        assert advice in capsys.readouterr().err


def test_suggested_options_exist() -> None:
    """Each is an option of its command, or one of its arguments without a name."""
    words = list_words()
    for command, table in FOREIGN_OPTIONS.items():
        options = set(words[(command, "*") if command == "train" else tuple(command.split())])
        name, _, subcommand = command.partition(" ")
        kind = EvaluateCommand if command == "evaluate" else COMMANDS[name].options
        kind = SUBCOMMANDS[subcommand][1] if subcommand else kind
        arguments = set() if kind is None else {name for name, _ in find_options(kind)}
        for known in table:
            assert f"--{known.partition(' ')[0]}" in options or known in arguments


def test_suggested_commands_exist() -> None:
    words = list_words()
    for command, names in FOREIGN_COMMANDS.items():
        *first, last = command.split()
        assert last in words[tuple(first)]
        assert not set(names.split()) & set(COMMANDS)


def test_wrong_kinds_of_paths_have_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("page.html").write_text("<p>text</p>")
    Path("tokenizer.json").write_text("{}")
    for arguments, advice in (
        (["data", "collect", "page.html", "--out", "o"], "bmforge prepare reads these"),
        (["data", "collect", "www.x.org/a", "--out", "o"], "Pass https://www.x.org/a"),
        (["prepare", "http://x.org/a", "--out", "o"], "'http://x.org/a' is a URL. Collect pages"),
        (["prepare", "page.html", "--out", "o", "--tokenizer", "tokenizer.json"], "files: '.'."),
    ):
        assert main(arguments) == 2
        assert advice in capsys.readouterr().err
        assert not Path("o").exists()


def test_planned_length_needs_a_budget() -> None:
    with pytest.raises(ConfigError, match="has no effect without device_budget"):
        MemoryOptions(max_model_len=5)


@pytest.mark.parametrize("field", ["temperature", "max_tokens", "stream", "messages", "seed"])
def test_misspelled_fields_of_requests(field: str) -> None:
    body = {"model": "m", "messages": USER, f"{field[:-2]}{field[-1]}{field[-2]}": 1}
    with pytest.raises(ValidationError) as error:
        ChatRequest.model_validate(body)
    explained = explain_types(RequestValidationError(error.value.errors()))
    assert f"Did you mean {field!r}?" in explained.message
    assert explained.code == "unknown_parameter"
    assert ChatRequest.model_validate({"model": "m", "messages": USER}).messages


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252"])
@pytest.mark.parametrize(
    "text", ["Ou est le café déjà fermé à Noël ? ", "Grüße aus Köln, Österreich"]
)
def test_latin_1_is_read(encoding: str, text: str) -> None:
    text += "and plain words without accents, so that few characters are invalid " * 9
    assert decode(text.encode(encoding), "file 'a'", errors="strict").text == text
    damaged = text.encode()[:-9] + b"\xff" + b" more words" * 20
    with pytest.raises(DataError, match="is encoded in utf-8, but has 1 invalid"):
        decode(damaged, "file 'a'", errors="strict")


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Copy tokenizer\.json") as error:
        AutoTokenizer.from_pretrained(tmp_path)
    assert str(error.value).count("(") == str(error.value).count(")")


@pytest.mark.parametrize("target", ["a.gguf", "folder"])
def test_an_existing_target_is_found_before_the_merge(target: str, tmp_path: Path) -> None:
    """The adapter names no base model, so that a merge would fail with another error."""
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    path = tmp_path / target
    if target == "folder":
        path.mkdir()
        path = path / "file"
    path.write_text("")
    merging = merged_model(tmp_path / "adapter", tmp_path / target)
    with pytest.raises(CheckpointError, match="already exists"), merging:
        pass


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (None, 8, None),
        (8, None, None),
        (None, 16, "adapter.rank: 8 in that run, now 16"),
        (4, None, "adapter.rank: 4 in that run, now 8"),
    ],
)
@pytest.mark.parametrize("is_settled", [False, True])
def test_the_default_rank_is_compared(
    before: int | None, now: int | None, message: str | None, is_settled: bool, tmp_path: Path
) -> None:
    """Also with a run.toml of an earlier version, which lacks the default rank."""
    plain = GPT2PretrainConfig(run_dir=tmp_path)
    first, second = (
        dataclasses.replace(plain, adapter=AdapterConfig(kind="lora", rank=rank))
        for rank in (before, now)
    )
    save_toml(resolve_adapter(first) if is_settled else first, tmp_path / "run.toml")
    problem = check_run_dir(tmp_path, resolve_adapter(second), frozenset())
    assert (problem is None) if message is None else (problem is not None and message in problem)


def test_errors_name_the_options_as_they_were_typed() -> None:
    message = "adapter.rank: 8 in that run; init_from: 'a'; train.optim.lr: 1. Choose a run_dir."
    typed = ["--model", "base", "--adapter.rank=16", "--lr", "1e-2", "--run-dir", "runs/a"]
    shown = name_options(message, options_of("train"), typed).splitlines()[1]
    assert shown.endswith("--adapter.rank, --model, --lr, --run-dir.")
    shown = name_options(message, options_of("train"), ["--init-from", "base"]).splitlines()[1]
    assert shown.endswith("--init-from, --run-dir.")


def test_help_of_tasks() -> None:
    """Columns are separated, and only tasks with rollouts list the options of rollouts."""
    for task in ("conversations", "rl", "distill"):
        text = describe_task(task)
        rows = [line.split() for line in text.splitlines() if line.strip().startswith("--")]
        assert all(word.rfind("--") <= 0 or "=" in word for row in rows for word in row[:1])
        assert ("--num-generations" in text) == (task != "conversations")
        shown = [short for short in SHORT_NAMES if any(row[0] == short for row in rows)]
        assert {"--lr", "--data"} <= set(shown)


def test_provenance_is_worded_plainly() -> None:
    parts = (ProvenanceSource("base", "llama", "MIT"), ProvenanceSource("data", "chats", "unknown"))
    assert describe_provenance(Provenance("MIT", parts)) == [
        "license: MIT",
        "base model llama: license MIT",
        "data chats: license unknown",
    ]
