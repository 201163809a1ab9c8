"""Length of a run on conversations: epochs by default, and rows that fit a small data set."""

from __future__ import annotations

import itertools
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import write_jsonl
from test_adapter_runs import write_qwen3

from bmforge.cli import main
from bmforge.recipes.inputs.conversation_rows import EncodedRow, PackedConversations, choose_width
from bmforge.recipes.sft import ConversationData
from bmforge.train import read_metrics

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}


def make_row(length: int) -> EncodedRow:
    return EncodedRow([5] * length, [5] * length)


@given(
    st.lists(st.integers(2, 600), min_size=1, max_size=300),
    st.lists(st.integers(2, 600), max_size=5),
    st.sampled_from((24, 64, 100, 256, 2048)),
    st.sampled_from((1, 2, 8, 32)),
)
@settings(max_examples=100, deadline=None)
def test_rows_are_as_long_as_the_data_needs(
    lengths: list[int], held_out: list[int], longest: int, batch: int
) -> None:
    data = ConversationData(paths=("x",), seq_len=longest, global_batch_size=batch)
    parts = [[make_row(n) for n in part] for part in (lengths, held_out)]
    width = choose_width(parts, data)
    assert width <= longest
    assert width == longest or width % 64 == 0
    assert width >= min(longest, max(*lengths, *held_out, 0))  # nothing is cut more than before
    packed = PackedConversations(parts[0], width, 0)
    assert sum(min(n, longest) for n in lengths) == sum(len(r.ids) for r in packed._texts)
    # A smaller multiple of 64 would cut a conversation or give more than ten steps per epoch.
    smaller = width - 64
    if smaller > 0 and width < longest:
        cuts = smaller < max(*lengths, *held_out, 0)
        assert cuts or sum(lengths) > 10 * batch * smaller


def length_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[Any, int]:
    """Return `epochs` and `train.steps` of the config that a command would run."""
    assert main([*words, "--print-config"]) == 0
    config = tomllib.loads(capsys.readouterr().out)
    return config.get("epochs"), config["train"]["steps"]


def test_three_epochs_unless_a_length_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_qwen3(tmp_path / "base")
    chats = write_jsonl(tmp_path / "chats.jsonl", [CHAT])
    file = tmp_path / "run.toml"
    words = ["train", "conversations", "--model", str(base), "--data", str(chats)]
    in_file = {"nothing": "", "steps": "[train]\nsteps = 7\n", "epochs": "epochs = 2.0\n"}
    given_options = {"none": [], "steps": ["--steps", "9"], "epochs": ["--epochs", "4"]}
    want = {
        ("nothing", "none"): (3.0, 1000),
        ("steps", "none"): (None, 7),
        ("epochs", "none"): (2.0, 1000),
        **{(name, "steps"): (None, 9) for name in in_file},
        ("nothing", "epochs"): (4.0, 1000),
        ("steps", "epochs"): (4.0, 7),
        ("epochs", "epochs"): (4.0, 1000),
    }
    for (name, text), (option, values) in itertools.product(in_file.items(), given_options.items()):
        file.write_text(text)
        got = length_of([*words, "--config", str(file), *values], capsys)
        assert got == want[name, option], (name, option)
    assert main([*words, "--steps", "9", "--epochs", "2"]) != 0
    assert "both set the length of the run" in capsys.readouterr().err


def test_more_epochs_continue_a_finished_run(tmp_path: Path) -> None:
    base = write_qwen3(tmp_path / "base")
    chats = write_jsonl(tmp_path / "chats.jsonl", [CHAT] * 9)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokens = len(tokenizer.apply_chat_template(CHAT["messages"], return_dict=False))
    assert tokens <= 64
    rows = math.ceil(9 / (64 // tokens))
    words = ["train", "conversations", "--model", str(base), "--data", str(chats)]
    words += ["--batch-size", "2", "--micro-batch-size", "2", "--adapter", "lora"]
    words += ["--run-dir", str(tmp_path / "run")]
    for options, epochs in ((), 3), (("--epochs", "5"), 5):
        assert main([*words, *options]) == 0
        (last,) = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1:]
        assert last["step"] == math.ceil(epochs * rows / 2)
