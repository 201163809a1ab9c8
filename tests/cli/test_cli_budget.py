"""`generate` and `chat` within a budget: what they write without one, and refusals."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from bmforge.byte_sizes import parse_size
from bmforge.cli.main import main
from bmforge.cli.open_model import delta_bytes
from bmforge.models import GPT2, GPT2Config
from bmforge.tune.delta import Lora


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of eight blocks with a tokenizer of words."""
    folder = tmp_path_factory.mktemp("model")
    words = {f"w{number}": number for number in range(96)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"unk_token": "w0"}))
    config = GPT2Config(vocab_size=96, hidden_size=64, num_layers=8, num_heads=4, max_seq_len=64)
    GPT2.from_config(config, seed=3).save_pretrained(folder)
    return folder


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str, said: str = ""
) -> tuple[int, str, str]:
    """Run a command here; return its status and what it printed."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    status = main(list(words))
    out, err = capsys.readouterr()
    return status or 0, out, err


@pytest.fixture
def least(folder, capsys, monkeypatch) -> str:
    """The smallest budget, as the refusal of a smaller one says it."""
    words = ["generate", str(folder), "--prompt", "w1", "--device-budget", "1MiB"]
    _, out, err = run(capsys, monkeypatch, *words)
    found = re.search(r"too small: (\d+)", " ".join((out + err).replace("│", " ").split()))
    assert found is not None, err
    return found[1]


def test_on_several_devices(folder, least, capsys, monkeypatch) -> None:
    """The same text, with a plan of each; without a budget too."""
    words = ["generate", str(folder), "--prompt", "w1 w2 w3", "--max-new-tokens", "8"]
    _, want, _ = run(capsys, monkeypatch, *words)
    for more in (["--device-budget", least, "--max-model-len", "64"], []):
        status, out, err = run(capsys, monkeypatch, *words, "--devices", "cpu, cpu", *more)
        assert (status, out) == (0, want)
        assert err.count("memory of cpu") == (2 if more else 0)  # without, all fit on the first
    status, _, err = run(capsys, monkeypatch, *words, "--devices", "cpu,nothing")
    assert status != 0
    assert "unknown device: devices='nothing'" in err


def test_the_same_text(folder, least, capsys, monkeypatch) -> None:
    """Also of beams; the plan is shown beside it."""
    for extra in ([], ["--num-beams", "2"]):
        words = ["generate", str(folder), "--prompt", "w1 w2 w3", "--max-new-tokens", "8", *extra]
        _, want, _ = run(capsys, monkeypatch, *words)
        status, got, err = run(capsys, monkeypatch, *words, "--device-budget", least)
        assert (status, got) == (0, want)
        assert "slots for streamed blocks" in err


@pytest.mark.parametrize("name", ["--max-tokens", "--max_tokens", "--max-tokens="])
def test_names_that_users_of_vllm_know(folder, capsys, monkeypatch, name) -> None:
    words = ["generate", str(folder), "--prompt", "w1 w2 w3"]
    _, want, _ = run(capsys, monkeypatch, *words, "--max-new-tokens", "3")
    given = [f"{name}3"] if name.endswith("=") else [name, "3"]
    status, got, _ = run(capsys, monkeypatch, *words, *given)
    assert (status, got) == (0, want)
    _, longer, _ = run(capsys, monkeypatch, *words, "--max-new-tokens", "8")
    assert longer != want


@pytest.mark.parametrize("budget", [False, True])
def test_packed_as_it_is_opened(folder, least, capsys, monkeypatch, tmp_path, budget) -> None:
    """What a directory that was packed before writes; packed weights fit in less."""
    assert run(capsys, monkeypatch, "quantize", str(folder), str(tmp_path / "int4"))[0] == 0
    words = ["--prompt", "w1 w2 w3", "--max-new-tokens", "8"]
    _, want, _ = run(capsys, monkeypatch, "generate", str(tmp_path / "int4"), *words)
    words += ["--quantize", "int4", *(["--device-budget", least] if budget else [])]
    status, got, err = run(capsys, monkeypatch, "generate", str(folder), *words)
    assert (status, got) == (0, want)
    assert ("blocks stay" in err) == budget
    status, _, err = run(capsys, monkeypatch, "generate", str(folder), *words, "--quantize", "int5")
    assert status == 2
    assert "int5" in err


def test_the_same_conversation(folder, least, capsys, monkeypatch) -> None:
    words = ["chat", str(folder), "--max-new-tokens", "6", "--num-beams", "2"]
    _, want, _ = run(capsys, monkeypatch, *words, said="w1 w2\nw5\n")
    assert len(want.splitlines()) == 2
    _, got, _ = run(capsys, monkeypatch, *words, "--device-budget", least, said="w1 w2\nw5\n")
    assert got == want


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        (["--device-budget", "1MiB"], "is the smallest that works"),
        (["--device-budget", "much"], "invalid size"),
        (["--device-budget", "0"], "must be above 0"),
        (["--device-budget", "900TiB"], "more than the machine's memory"),
        (["--max-model-len", "20"], "has no effect without device_budget"),
        (["--device-budget", "60MiB", "--max-model-len", "5"], "memory plan allows"),
        (
            ["--device-budget", "60MiB", "--max-model-len", "65"],
            "more than the model's 64 positions",
        ),
    ],
)
def test_refusals(folder, capsys, monkeypatch, extra, match) -> None:
    words = ["generate", str(folder), "--prompt", "w1 w2 w3", "--max-new-tokens", "8"]
    status, out, err = run(capsys, monkeypatch, *words, *extra)
    assert status == 2, err
    assert match in " ".join((out + err).replace("│", " ").split())


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 << 30),
        ("1.5 GB", 1_500_000_000),
        ("800mib", 800 << 20),
        ("3kB", 3000),
        ("7", 7),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_a_delta_beside_blocks_that_come_and_go(
    folder, least, capsys, monkeypatch, tmp_path: Path
) -> None:
    """It writes what it writes without a budget; the budget holds for it as well."""
    model = GPT2.from_pretrained(folder)
    delta = Lora(model, ["attn.q", "mlp.down"], rank=2)
    for _, _, part in delta.held:
        torch.nn.init.normal_(part.up, std=0.5, generator=torch.Generator().manual_seed(1))
    delta.save(tmp_path)
    words = ["generate", str(folder), "--prompt", "w1 w2 w3", "--max-new-tokens", "8"]
    _, plain, _ = run(capsys, monkeypatch, *words)
    words += ["--adapter", str(tmp_path)]
    _, want, _ = run(capsys, monkeypatch, *words)
    assert want != plain
    budget = int(least) + delta_bytes([str(tmp_path)])
    status, got, err = run(capsys, monkeypatch, *words, "--device-budget", str(budget))
    assert (status, got) == (0, want)
    assert "slots for streamed blocks" in err
    assert run(capsys, monkeypatch, *words, "--device-budget", least)[0] == 2
    _, got, _ = run(capsys, monkeypatch, *words[:-1], f"{tmp_path}=0", "--device-budget", "1GiB")
    assert got == plain
