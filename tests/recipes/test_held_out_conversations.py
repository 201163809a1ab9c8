"""`--data.validation-fraction` of conversations: the split, its seed, and the evaluation loss."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_adapter_runs import train, write_qwen3

from bmforge.data.sources.conversations import ChatExample
from bmforge.errors import DataError
from bmforge.recipes.sft import _hold_out
from bmforge.train import read_metrics

NUMBERS = st.lists(st.integers(0, 10**6), min_size=200, max_size=300)


def write(numbers: list[int]) -> list[ChatExample]:
    said = {"role": "assistant", "content": "yes"}
    return [
        ChatExample(f"line {n}", [{"role": "user", "content": f"question {number}"}, said])
        for n, number in enumerate(numbers)
    ]


@given(numbers=NUMBERS, fraction=st.sampled_from([0.2, 0.5]), seed=st.integers(0, 99))
def test_the_split(numbers: list[int], fraction: float, seed: int) -> None:
    """Every conversation is in one part; equal ones are together; new data moves none."""
    numbers = list(dict.fromkeys(numbers))
    chats = write(numbers)
    if len(chats) < 150:
        return
    training, held_out = _hold_out(chats, fraction, seed)
    assert sorted(c.place for c in [*training, *held_out]) == sorted(c.place for c in chats)
    assert abs(len(held_out) / len(chats) - fraction) < 0.25
    again = _hold_out(write([*numbers, *numbers, 10**7]), fraction, seed)
    for part, more in zip((training, held_out), again, strict=True):
        texts = [c.messages[0]["content"] for c in more]
        assert all(texts.count(c.messages[0]["content"]) == 2 for c in part)
    assert _hold_out(chats, fraction, seed + 1)[1] != held_out


def test_a_run_evaluates_on_the_held_out_part(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = write_qwen3(tmp_path / "base")
    more = ("--data.validation-fraction", "0.5", "--train.eval-every-steps", "2")
    run = train(base, tmp_path, "--lr", "0", *more, steps=2)
    (row,) = (row for row in read_metrics(run / "metrics.jsonl") if row["step"] == 2)
    assert row["val_loss"] > 0
    assert "16 examples in" not in caplog.text
    with pytest.raises(DataError, match=r"0 for evaluation\. Use another fraction"):
        _hold_out(write([1, 2]), 1e-9, 0)
