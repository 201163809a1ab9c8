"""Reinforcement learning killed at random instants goes on with the same answers and weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import tokenizers
from real_runs import final_hashes, finish, kill_in_chain, losses, start

from bmforge.models import Llama, LlamaConfig

MARKS = ["<pad>", "</s>", "<unk>", *"0123456789+=abcdef"]


def write_run(folder: Path, method: str, steps: int) -> list[str]:
    """A model, prompts and a reward; the command of a run with two updates per rollout and a KL."""
    config = LlamaConfig(
        vocab_size=len(MARKS),
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        max_seq_len=32,
        init_std=0.1,
    )
    Llama.from_config(config, seed=0).save_pretrained(folder / "model")
    vocabulary = {token: number for number, token in enumerate(MARKS)}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    fast.decoder = tokenizers.decoders.Fuse()
    fast.add_special_tokens(MARKS[:3])
    fast.save(str(folder / "model" / "tokenizer.json"))
    roles = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(roles))
    rows = [{"prompt": f"{a}+{b}="} for a in range(5) for b in range(5)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "digits.py").write_text(
        "def digits(completions, **columns):\n"
        "    return [sum(c.isdigit() for c in text) for text in completions]\n"
    )
    options = (
        f"train rl --model {folder / 'model'} --data.paths {folder / 'prompts.jsonl'} --reward "
        f"{folder / 'digits.py'}:digits --data.seq-len 6 --data.global-batch-size 16 "
        "--data.micro-batch-size 8 --rollout.num-generations 4 --rollout.max-new-tokens 6 "
        f"--rollout.num-iterations 2 --rl.beta 0.05 --method {method} "
        f"--train.steps {steps} --train.optim.lr 1e-2 "
        "--train.save-every-steps 1 --train.log-every-steps 1"
    )
    return [sys.executable, "-m", "bmforge", *options.split()]


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("method", "kills", "steps", "seed"),
    [("ppo", 2, 10, 4), ("grpo", 10, 40, 1), ("grpo", 10, 40, 2), ("ppo", 10, 40, 3)],
)
def test_kills_change_nothing(
    method: str, kills: int, steps: int, seed: int, tmp_path: Path
) -> None:
    """The answers, both models of PPO with their optimizers, and the metrics, bit for bit."""
    arguments = write_run(tmp_path, method, steps)
    for name in ("whole", "killed"):
        command = [*arguments, "--run-dir", str(tmp_path / name)]
        if name == "killed":
            hits = kill_in_chain(command, kills, steps, seed)
            assert len(hits) == kills
            assert "training" in hits
        status, errors = finish(start(command))
        assert status == 0, errors
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert losses(killed) == losses(whole)
    assert final_hashes(killed) == final_hashes(whole)
    files = [run / "completions.jsonl" for run in (whole, killed)]
    assert files[0].read_bytes() == files[1].read_bytes()
