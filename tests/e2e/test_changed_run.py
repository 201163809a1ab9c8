"""A model changed in every way: trained on a cut pipeline, killed, gone on with alone, opened."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from real_runs import command, finish, losses, start, wait_for_step, workers_of, write_text

from bmforge.data import PrepareConfig, prepare
from bmforge.infer import generate
from bmforge.models import AutoModel

STEPS = 24
CONFIG = """
[model]
vocab_size = 300
hidden_size = 32
intermediate_size = 64
num_layers = 4
num_heads = 4
max_seq_len = 32
[data]
paths = ["{data}"]
seq_len = 32
global_batch_size = 8
micro_batch_size = 2
[train]
steps = {steps}
save_every_steps = 4
log_every_steps = 1
[train.optim]
lr = 0.01
[[changes]]
kind = "resize"
where = ["layers.1", "layers.2"]
options = {{ num_heads = 2, intermediate_size = 48 }}
[[changes]]
kind = "int8"
where = ["layers.*.attn.v_proj", "layers.*.mlp.*_proj"]
[[changes]]
kind = "low_rank"
where = ["layers.*.attn.*_proj", "layers.*.mlp.down_proj", "lm_head"]
options = {{ rank = 2, alpha = 4.0 }}
"""
CUT = ("--layout.tp", "2", "--layout.pp", "2")


def run(config: Path, run_dir: Path, launcher: tuple[str, ...], *options: str) -> list[str]:
    return [*command(config, run_dir, launcher), *options]


def generated(run_dir: Path) -> tuple[Any, list[int]]:
    model = AutoModel.from_pretrained(run_dir / "export").double()
    ids = generate(model, torch.arange(10, 18)[None], max_new_tokens=12, do_sample=False)
    return model.config, ids[0].tolist()


@pytest.mark.long
def test_changed_killed_resumed_elsewhere_opened(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.jsonl")
    prepare(text, tmp_path / "data", PrepareConfig(vocab_size=300, validation_fraction=0.1))
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.format(data=tmp_path / "data", steps=STEPS))
    alone, moved = tmp_path / "alone", tmp_path / "moved"
    assert finish(start(run(config, alone, ())))[0] == 0

    process = start(run(config, moved, ("--nproc-per-node", "4"), *CUT))
    assert wait_for_step(process, 10)
    for victim in (process.pid, *workers_of(process.pid)):
        os.kill(victim, signal.SIGKILL)
    finish(process)
    done = losses(moved)[-1][0]
    assert 8 <= done < STEPS
    status, errors = finish(start(run(config, moved, ())))
    assert status == 0, errors
    assert "resumed at step" in errors

    wanted, got = losses(alone), losses(moved)
    assert [row[0] for row in got] == list(range(1, STEPS + 1))
    assert [row[1] for row in got] == pytest.approx([row[1] for row in wanted], rel=2e-4)
    assert wanted[-1][1] < wanted[0][1]
    assert generated(moved) == generated(alone)
    assert [change.kind for change in generated(moved)[0].changes] == ["resize", "int8", "low_rank"]
