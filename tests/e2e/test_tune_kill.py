"""Tuning on conversations, killed at random instants, ends in the same adapter bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))

from real_runs import final_hashes, finish, kill_in_chain, losses, start
from test_adapter_runs import write_chats, write_qwen3

from bmforge.cli import main
from bmforge.testing import run_distributed

STEPS = 24


def train_here(arguments: list[str]) -> int:
    """Run the command on this process of the pool."""
    return main(arguments)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_killed_tuning_ends_in_the_same_adapter(seed: int, tmp_path: Path) -> None:
    base, chats = write_qwen3(tmp_path / "base"), write_chats(tmp_path / "chats.jsonl")
    given = [
        *("train", "conversations", "--model", str(base), "--data", str(chats)),
        *("--data.validation", str(chats), "--adapter", "lora", "--adapter.dropout", "0.1"),
        *("--seq-len", "64", "--batch-size", "2", "--micro-batch-size", "1", "--lr", "0.01"),
        *("--steps", str(STEPS), "--train.save-every-steps", "3", "--train.log-every-steps", "1"),
        *("--train.eval-every-steps", "4", "--train.load-best-model-at-end"),
    ]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run_distributed(train_here, 1, [*given, "--run-dir", str(whole)]) == [0]
    command = [sys.executable, "-m", "bmforge", *given, "--run-dir", str(cut)]
    hits = kill_in_chain(command, 3, STEPS, seed)
    status, errors = finish(start(command))
    assert status == 0, errors
    assert len(hits) >= 1
    assert losses(cut) == losses(whole)
    assert final_hashes(cut) == final_hashes(whole)
    # The file's header lists its metadata in a random order, so the bytes may differ there.
    files = [run / "export" / "adapter_model.safetensors" for run in (cut, whole)]
    adapters = [load_file(file) for file in files]
    assert adapters[0].keys() == adapters[1].keys()
    assert all(torch.equal(tensor, adapters[1][name]) for name, tensor in adapters[0].items())
