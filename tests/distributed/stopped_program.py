"""A training of a tiny model in which one rank stops itself (SIGSTOP) at a given point.

    python stopped_program.py LAYOUT POINT RANK TIMEOUT_S FOLDER

`POINT` is a point of the third step: "step" (between two steps), "forward", "backward", "save" (in
the thread that writes a checkpoint), or "end" (while the last checkpoint is written).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from bmforge.models import Mixtral, MixtralConfig, init_weights_
from bmforge.parallel import Layout, init_distributed, parallelize
from bmforge.train import TrainConfig, Trainer
from bmforge.train.checkpoint import write

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_layers": 4, "num_heads": 4,
    "num_kv_heads": 4, "head_dim": 4, "max_seq_len": 16, "num_experts": 4,
}  # fmt: skip


class Rows:
    """Two micro-batches of the same rows in every step."""

    def __next__(self) -> Any:
        ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(1))
        return [{"input_ids": ids, "labels": ids}] * 4

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def main(layout: str, point: str, rank: str, timeout_s: str, folder: str) -> None:
    init_distributed(timeout_s=float(timeout_s))
    mine, seen = dist.get_rank() == int(rank), {"step": 0}

    def stop(at: str) -> None:
        if mine and at == point and seen["step"] >= 2:
            print("stopped", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)

    def note(trainer: Trainer, row: Any) -> None:
        seen["step"] = trainer.step
        stop("step")

    model = Mixtral.from_config(MixtralConfig(**SIZES), device="meta")
    parallelize(model, Layout(**json.loads(layout)))
    init_weights_(model, seed=0)
    for module in model.modules():
        if type(module).__name__ == "Attention":
            module.register_forward_pre_hook(lambda *_: stop("forward"))
            module.register_full_backward_hook(lambda *_: stop("backward"))
    write_share = write._write_own_share

    def write_or_stop(*args: Any) -> Any:
        stop("save")
        return write_share(*args)

    config = TrainConfig(steps=3 if point == "save" else 1000, save_every_steps=2)
    with mock.patch.object(write, "_write_own_share", write_or_stop):
        Trainer(model, Rows(), config, run_dir=folder, callbacks=[note]).fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
