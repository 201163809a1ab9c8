"""A wrong value on the command line is explained in one sentence that names the option."""

from __future__ import annotations

import pytest

from bmforge.cli import main

CASES = [
    ("info gpt2 --seq-len many", "--seq-len many is not valid (needed: None or an integer)."),
    ("plan gpt2 --gpus", "--gpus needs a value."),
    ("plan gpt2 --gpus x", "--gpus x is not valid (needed: an integer)."),
    (
        "plan gpt2 --precision fp17",
        "fp17 is not supported (supported: None, bf16, fp16, fp32).",
    ),
    ("plan gpt2 --precision fp17", "Did you mean 'fp16'?"),
    ("quantize a b --out c", "unexpected argument: b. --help lists the options."),
    ("prepare x", "--out is missing. Pass --out PATH."),
    ("train pretrain --model gpt2 --lr x", "--lr x is not valid (needed: a number)."),
    ("train pretrain --model gpt2 --lr -1", "train.optim.lr=-1.0 must be at least 0, and finite."),
    ("train pretrain --model gpt2 --steps 0", "train.steps=0 must be at least 1."),
    (
        "train pretrain --model gpt2 --adapter.rank x",
        "--adapter.rank x is not valid (needed: None or an integer).",
    ),
    (
        "train pretrain --model gpt2 --adapter loraa",
        "adapter.kind='loraa' (supported: lora, adapter, low-rank, compacter, parallel-adapter,",
    ),
    ("train pretrain --model gpt2 --layout.zero 4", "--layout.zero 4 is not supported (supported"),
    ("train pretrain --model gpt2 --compile maybe", "unexpected argument: maybe."),
]


@pytest.mark.parametrize(("command", "sentence"), CASES, ids=[command for command, _ in CASES])
@pytest.mark.parametrize("width", ["40", "200"])
def test_a_wrong_value_is_explained_in_one_sentence(
    command: str,
    sentence: str,
    width: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Independent of the width of the terminal."""
    monkeypatch.setenv("COLUMNS", width)
    assert main(command.split()) == 2
    shown = capsys.readouterr().err
    (line,) = [line for line in shown.splitlines() if line.startswith("error: ")]
    assert sentence in line
    assert not {*"│─╭"} & {*shown}
