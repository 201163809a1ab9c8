"""The frame of the command line: what is said before anything heavy is imported, and switches."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bmforge.cli import main
from bmforge.cli.commands import COMMANDS
from bmforge.cli.parse import parse_options, take_switch
from bmforge.cli.train_help import SHORT_NAMES, describe_task, list_tasks
from bmforge.config import config_to_dict
from bmforge.data.tasks import TASKS as DATA_TASKS
from bmforge.errors import ConfigError
from bmforge.recipes.registry import RECIPES, TASKS
from bmforge.task_names import OLD_NAMES, PUBLISHED, TASK_NAMES

ROOT = Path(__file__).resolve().parents[2]
LIGHT = """
import contextlib, io, sys
from bmforge.cli import main
from bmforge.cli.commands import COMMANDS

lines = [[name, "--help"] for name in COMMANDS]
lines += [["train", "pretrain", "--help"], ["train", "pretrian"], ["trian"], []]
lines += [["train", "pretrain", "--model", "gpt2", "--train.stpes", "9"]]
lines += [[name, "--no-such-option", "1"] for name, command in COMMANDS.items() if command.options]
for line in lines:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            status = main(line)
        except SystemExit as stop:
            status = stop.code
    assert said.getvalue(), line
    wrong = {"--no-such-option", "--train.stpes", "pretrian", "trian"} & {*line}
    assert status == (2 if wrong else 0), (line, status)
    heavy = {"torch", "numpy", "tokenizers"} & sys.modules.keys()
    assert not heavy, (line, heavy)
"""


def test_help_and_mistakes_import_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_corpus_is_prepared_without_torch() -> None:
    """Its 130 MB would lie in every worker."""
    light = "import sys; import bmforge.data.prepare.run; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", light], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_names_a_function(name: str) -> None:
    module, _, function = COMMANDS[name].run.partition(":")
    assert callable(getattr(importlib.import_module(f"bmforge.cli.{module}"), function))


def test_the_options_of_train_are_those_of_its_configs() -> None:
    """Written anew by `python dev/train_options.py`, they are the same."""
    spec = importlib.util.spec_from_file_location("train_options", ROOT / "dev/train_options.py")
    assert spec is not None
    assert spec.loader is not None
    writer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    assert writer.PLACE.read_text("utf-8") == writer.render(), "run python dev/train_options.py"


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--train.stpes", "Did you mean '--train.steps'"),
        ("--train.optm.lr=1", "Did you mean '--train.optim.lr'"),
        ("--no-recomptue", "unknown option of bmforge train: --no-recomptue"),
        ("--stpes", "Did you mean '--steps'"),
    ],
)
def test_a_mistyped_option_of_train(
    option: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "pretrain", "--model", "gpt2", option, "3"]) == 2
    assert said in capsys.readouterr().err


def test_the_names_are_those_that_can_be_run() -> None:
    assert list(TASK_NAMES) == list(TASKS)
    assert list(OLD_NAMES) == list(RECIPES)
    assert list(PUBLISHED) == list(DATA_TASKS)
    said = list_tasks()
    for name, about in (TASK_NAMES | OLD_NAMES).items():
        assert f"  {name:<18}{about}\n" in said


@dataclass
class Inner:
    """Of a test.

    Args:
        deep_flag: a switch.
        maybe: a switch that may be left open.
    """

    deep_flag: bool = False
    maybe: bool | None = None


@dataclass
class Outer:
    """Of a test.

    Args:
        flag: off.
        full_on: on.
        name: no switch.
        inner: more.
    """

    flag: bool = False
    full_on: bool = True
    name: str = ""
    inner: Inner = field(default_factory=Inner)


@dataclass(frozen=True)
class Stated:
    """Options whose help states the default in effect.

    Args:
        size: size of a cache (if None: 64, or 8 (small models)). It is fixed.
        names: names to keep (if empty: all).
        rate: rate of one case (if None: 1) or of another (if None: 2).
        place: place in a file.
    """

    size: int | None = None
    names: tuple[str, ...] = ()
    rate: float | None = None
    place: str | None = None


def test_the_help_shows_the_default_in_effect(capsys: pytest.CaptureFixture[str]) -> None:
    """An option that was set to another default keeps it, and its text."""
    shown = []
    for default in (Stated(), Stated(size=3)):
        with pytest.raises(SystemExit):
            parse_options(Stated, ["--help"], "test", default)
        shown.append(" ".join(capsys.readouterr().out.replace("│", "").split()))
    assert "size of a cache. It is fixed. (default: 64, or 8 (small models))" in shown[0]
    assert "(if None: 64, or 8 (small models)). It is fixed. (default: 3)" in shown[1]
    for text in (
        "names to keep. (default: all)",
        "(if None: 1) or of another (if None: 2). (default: None)",
        "place in a file. (default: None)",
    ):
        assert text in shown[0]
        assert text in shown[1]
    assert parse_options(Stated, ["--size", "5"], "test") == Stated(size=5)


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("", {}),
        ("--flag", {"flag": True}),
        ("--flag True", {"flag": True}),
        ("--flag=True", {"flag": True}),
        ("--flag --no-flag", {}),
        ("--flag False", {}),
        ("--no-full-on", {"full_on": False}),
        ("--no_full_on --name x", {"full_on": False, "name": "x"}),
        ("--full-on False --flag", {"full_on": False, "flag": True}),
        ("--inner.deep-flag", {"inner": {"deep_flag": True}}),
        ("--inner.deep_flag --flag", {"inner": {"deep_flag": True}, "flag": True}),
        ("--inner.maybe", {"inner": {"deep_flag": False, "maybe": True}}),
        ("--inner.no-maybe", {"inner": {"deep_flag": False, "maybe": False}}),
        ("--no-inner.maybe --name a", {"inner": {"deep_flag": False, "maybe": False}, "name": "a"}),
    ],
)
def test_switches_both_ways(line: str, changed: dict) -> None:
    got = config_to_dict(parse_options(Outer, line.split(), "test"))
    assert got == config_to_dict(Outer()) | changed


@pytest.mark.parametrize(
    ("line", "is_on"),
    [
        ("", False),
        ("--dry-run", True),
        ("--dry-run True", True),
        ("--dry-run=False", False),
        ("--no-dry-run", False),
        ("--dry-run --no-dry-run", False),
        ("--no-dry-run --dry-run", True),
    ],
)
def test_switches_that_are_no_fields(line: str, is_on: bool) -> None:
    rest = ["--a", *line.split(), "b"]
    assert take_switch(rest, "--dry-run") is is_on
    assert rest == ["--a", "b"]
    with pytest.raises(ConfigError, match="--dry-run is a switch"):
        take_switch(["--dry-run=maybe"], "--dry-run")


def test_switches_and_short_names_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    line = "train pretrain --model llama --recompute --compile --offload.activations --no-export"
    short = "--lr 0.5 --steps=7 --batch-size 6 --micro-batch-size 3 --seq-len 9 --precision bf16"
    more = "--layout.sequence-parallel --layout.tp 2 --model.tie-word-embeddings --data a b"
    assert main([*line.split(), *short.split(), *more.split(), "--print-config"]) == 0
    told = tomllib.loads(capsys.readouterr().out)
    assert told["recompute"] is told["compile"] is told["offload"]["activations"] is True
    assert told["export"] is False
    assert told["layout"]["sequence_parallel"] is told["model"]["tie_word_embeddings"] is True
    train, data = told["train"], told["data"]
    assert (train["optim"]["lr"], train["steps"], train["precision"]) == (0.5, 7, "bf16")
    assert (data["global_batch_size"], data["micro_batch_size"], data["seq_len"]) == (6, 3, 9)
    assert data["paths"] == ["a", "b"]


@pytest.mark.parametrize("name", [*TASKS, "sft", "BoolQ", "gpt2-pretrain"])
def test_help_of_a_task_names_what_is_there(name: str) -> None:
    """Short names stand for fields that every form of the task has, but for rows of images."""
    said = describe_task(name)
    assert f"usage: bmforge train {name} --model" in said
    for form in TASKS[name].forms if name in TASKS else ():
        fields = config_to_dict(form.config())
        for short, option in SHORT_NAMES.items():
            # Options of rollouts are listed for rl and distill alone.
            is_listed = not option.startswith("--rollout.") or "rollout" in fields
            assert (short in said) == (is_listed and (name, short) != ("images", "--seq-len"))
            value = fields
            for part in option.removeprefix("--").replace("-", "_").split("."):
                if (name, part) == ("images", "seq_len") or short == "--adapter":
                    break
                if part == "rollout" and part not in value:
                    break
                value = value[part]


def test_help_all_lists_every_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["train", "pretrain", "--model", "gpt2", "--help-all"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    for option in ("--train.optim.lr FLOAT", "--model.num-layers INT", "--data.reset-at-documents"):
        assert option in said
    assert not any(tmp_path.iterdir())


def test_one_of_several_processes_leaves_at_once() -> None:
    """What would abort while the interpreter ends does not; what was to be done at the end is."""
    program = (
        "import atexit, os, threading\n"
        "from bmforge.__main__ import exit_process\n"
        "class Fragile:\n"
        "    def __del__(self, abort=os.abort): abort()\n"
        "kept = Fragile()\n"
        "atexit.register(print, 'done')\n"
        "def work():\n"
        "    sum(range(10_000_000))\n"
        "    print('written')\n"
        "threading.Thread(target=work).start()\n"
        "exit_process(3)\n"
    )
    alone = {name: value for name, value in os.environ.items() if name != "RANK"}
    cases = ((alone, -signal.SIGABRT), ({**alone, "RANK": "1"}, 3))
    for environment, status in cases:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status
    assert done.stdout == "written\ndone\n"
