"""A delta: trained, killed and gone on with bit for bit, on another layout too, merged, written."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from real_runs import (
    command,
    final_hashes,
    finish,
    kill_in_chain,
    losses,
    start,
    wait_for_step,
    workers_of,
    write_text,
)

from bmforge.cli import main
from bmforge.data import PrepareConfig, prepare
from bmforge.infer import generate
from bmforge.models import GPT2, AutoModel, GPT2Config
from bmforge.surgery import persistent_tensors
from bmforge.testing import assert_equal_trees
from bmforge.tune.delta import Lora, load_delta

STEPS = 24
SIZES = {"vocab_size": 300, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "max_seq_len": 32}
CONFIG = """
init_from = "{base}"
[adapter]
kind = "lora"
targets = ["attn.q", "attn.v", "mlp.down"]
rank = 4
lr_ratio = 4.0
[model]
vocab_size = 300
hidden_size = 32
num_layers = 2
num_heads = 2
max_seq_len = 32
[data]
paths = ["{data}"]
seq_len = 32
global_batch_size = 4
micro_batch_size = 2
[train]
steps = {steps}
save_every_steps = 3
log_every_steps = 1
[train.optim]
lr = 0.01
"""
IDS = torch.arange(10, 18)[None]


def write_run(folder: Path) -> Path:
    """A base, its corpus, and the config of a run that tunes it."""
    prepare(
        write_text(folder / "text.jsonl"),
        folder / "data",
        PrepareConfig(vocab_size=300, validation_fraction=0.1),
    )
    GPT2.from_config(GPT2Config(**SIZES, tie_word_embeddings=False)).save_pretrained(
        folder / "base"
    )
    config = folder / "run.toml"
    text = CONFIG.format(base=folder / "base", data=folder / "data", steps=STEPS)
    config.write_text(text, encoding="utf-8")
    return config


@pytest.mark.long
def test_a_delta_from_start_to_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_run(tmp_path)
    unkilled, killed, moved = (tmp_path / name for name in ("unkilled", "killed", "moved"))
    assert finish(start(command(config, unkilled)))[0] == 0
    hits = kill_in_chain(command(config, killed), 4, STEPS, seed=3)
    status, errors = finish(start(command(config, killed)))
    assert status == 0, errors
    assert "training" in hits
    assert losses(killed) == losses(unkilled)
    assert final_hashes(killed) == final_hashes(unkilled)
    assert losses(killed)[-1][1] < losses(killed)[0][1]

    launcher = ("--nproc-per-node", "2")
    process = start([*command(config, moved, launcher), "--layout.tp", "2"])
    assert wait_for_step(process, 10)
    for victim in (process.pid, *workers_of(process.pid)):
        os.kill(victim, signal.SIGKILL)
    finish(process)
    status, errors = finish(start(command(config, moved)))
    assert status == 0, errors
    assert "resumed at step" in errors
    got, wanted = ([row[1] for row in losses(run)] for run in (moved, unkilled))
    assert got == pytest.approx(wanted, rel=2e-4)

    base = GPT2.from_pretrained(tmp_path / "base")
    kept = {n: t.clone() for n, t in persistent_tensors(base).items()}
    delta = load_delta(base, killed / "export")
    assert isinstance(delta, Lora)
    tuned = base(IDS).logits
    written = generate(base, IDS, max_new_tokens=12, do_sample=False)
    delta.merge()
    torch.testing.assert_close(base(IDS).logits, tuned, rtol=1e-4, atol=1e-5)
    base.save_pretrained(tmp_path / "merged")
    merged = AutoModel.from_pretrained(tmp_path / "merged")
    assert not merged.config.changes
    assert torch.equal(generate(merged, IDS, max_new_tokens=12, do_sample=False), written)
    delta.unmerge().detach()
    assert_equal_trees(persistent_tensors(base), kept)
    capsys.readouterr()
    assert main(["tree", str(tmp_path / "base"), "--adapter", str(killed / "export")]) == 0
    assert "LowRank" in capsys.readouterr().out
