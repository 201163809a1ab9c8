"""An error on the command line names the options that it is about."""

from __future__ import annotations

import pytest

from bmforge.cli import main
from bmforge.cli.option_names import name_options, options_of

TRAIN = ["train", "pretrain", "--model", "gpt2", "--data.paths", "nowhere"]


def test_a_recipes_error_names_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    batch = ["--data.global-batch-size", "7", "--data.micro-batch-size", "2"]
    assert main([*TRAIN, *batch, "--data.grad-accum-steps", "3"]) == 2
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


def test_other_commands_have_their_own_options() -> None:
    assert "--gpus-per-node" in name_options("gpus_per_node=0", options_of("plan"))
    assert "--vocab-size" in name_options("vocab_size=3 is too small.", options_of("prepare"))
    assert name_options("gpus_per_node=0", options_of("unknown")) == "gpus_per_node=0"
