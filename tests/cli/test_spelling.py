"""An error on the command line names the options that it is about."""

from __future__ import annotations

from pathlib import Path

import pytest

from bmforge.cli import main
from bmforge.cli.commands import COMMANDS
from bmforge.cli.option_names import name_options, options_of

TRAIN = ["train", "pretrain", "--model", "gpt2", "--data.paths"]


def test_a_recipes_error_names_the_options(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    batch = ["--data.global-batch-size", "7", "--data.micro-batch-size", "2"]
    assert main([*TRAIN, str(tmp_path), *batch, "--data.grad-accum-steps", "3"]) == 2
    said = capsys.readouterr().err
    assert "micro_batch_size=2" in said
    assert (
        "In this command, the options are --data.global-batch-size, --data.micro-batch-size, "
        "--data.grad-accum-steps." in said
    )


@pytest.mark.parametrize(
    ("message", "option"),
    [
        ("train.grad_clip=-1 must be above 0.", "--train.grad-clip"),
        ("optim.lr=-1.0 must be at least 0.", "--lr"),
        ("data.global_batch_size: 4 in that run, now 8.", "--batch-size"),
        ("freeze_base=True leaves nothing to train.", "--freeze-base"),
    ],
)
def test_a_field_is_found_by_its_path_or_its_name(message: str, option: str) -> None:
    said = name_options(message, options_of("train"))
    assert said == f"{message}\nIn this command, the option is {option}."


@pytest.mark.parametrize(
    "message",
    [
        "--freeze-base, that is freeze_base=True, leaves nothing.",  # has it
        "'out/global_batch_size.txt' is missing, and /tmp/micro_batch_size.",  # files
        "no_such_field=3 is unknown.",
        "seed=-1 must be 0 or more.",  # spelled alike
    ],
)
def test_nothing_is_added_that_is_there_or_is_no_field(message: str) -> None:
    assert name_options(message, options_of("train")) == message


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_word_of_a_sentence_is_no_field(command: str) -> None:
    """Options of one word that the user typed are named only where their value follows."""
    options = options_of(command)
    for word in (name for name in options if name.isalpha()):
        typed = [f"--{word}", "x"]
        for sentence in (f"Leave it {word}.", f"Use {word}, or leave {word} out: it is new."):
            assert name_options(sentence, options, typed) == sentence
        for value in ("3", "'a'", "True", "['a']"):
            for field in (f"{word}={value} is wrong.", f"{word}: {value} in that run."):
                assert name_options(field, options, typed).endswith(f"option is --{word}.")


def test_the_spelling_of_the_user_is_kept() -> None:
    """The parser knows only the full name of an option."""
    message, options = "data.seq_len=0 must be at least 1.", options_of("train")
    for typed in ("--seq-len", "--data.seq-len"):
        said = name_options(message, options, [typed, "0"])
        assert said == f"{message}\nIn this command, the option is {typed}."
        said = name_options("--data.seq-len x is not valid.", options, [typed, "x"])
        assert said == f"{typed} x is not valid."


def test_all_differing_options_are_named() -> None:
    message = "other options: vocab_size=3 there, 5 now; languages=[] there, ['de'] now. Stop."
    shown = name_options(message, options_of("prepare"), ["--vocab-size", "5"])
    assert shown.endswith("In this command, the options are --vocab-size, --languages.")


def test_other_commands_have_their_own_options() -> None:
    assert "--gpus-per-node" in name_options("gpus_per_node=0", options_of("plan"))
    assert "--vocab-size" in name_options("vocab_size=3 is too small.", options_of("prepare"))
    assert name_options("gpus_per_node=0", options_of("unknown")) == "gpus_per_node=0"
