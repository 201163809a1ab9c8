"""Train your own module: any nn.Module with repeated blocks, sharded over the processes.

    python examples/train_own_module.py --steps 100
    torchrun --nproc-per-node 2 examples/train_own_module.py --steps 100

You provide the module, a loader (any iterable of each process's rows with a state), and an
objective. `parallelize` finds the repeated blocks and shards each of them; the Trainer adds
accumulation, clipping, the schedule, metrics, and checkpoints to resume from.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.parallel import (
    Layout,
    build_mesh,
    data_parallel_rank,
    data_parallel_size,
    init_distributed,
    parallelize,
    shutdown_distributed,
)
from bmforge.train import OptimConfig, TrainConfig, Trainer

SEQ_LEN, ROWS_PER_STEP = 64, 8


class Block(nn.Module):
    """A causal convolution, then an MLP for each byte."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.look_back = nn.Conv1d(width, width, kernel_size=8, padding=7)
        self.think = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        past = self.look_back(self.norm(x).transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return x + self.think(past)


class ByteModel(nn.Module):
    """Language model of bytes."""

    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 256)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TextRows:
    """This process's rows, a pure function of the step, so that the state is one number."""

    def __init__(self, rank: int, world_size: int) -> None:
        text = "\n".join(topics.values()).encode()
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.rank, self.world_size, self.step = rank, world_size, 0

    def __next__(self) -> list[dict[str, Tensor]]:
        draw = torch.Generator().manual_seed(self.step)
        starts = torch.randint(len(self.bytes) - SEQ_LEN, (ROWS_PER_STEP,), generator=draw)
        mine = starts[self.rank :: self.world_size].tolist()
        rows = torch.stack([self.bytes[s : s + SEQ_LEN] for s in mine]).long()
        self.step += 1
        return [{"ids": rows, "labels": rows}]

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def next_byte_loss(model: nn.Module, batch: Mapping[str, Tensor], num_items: float) -> Tensor:
    """Return the sum of the losses divided by `num_items`, the mean over all processes."""
    logits = model(batch["ids"])[:, :-1]
    targets = batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / num_items


def main(steps: int = 100, run_dir: str | None = None) -> list[float]:
    """Train, and return the loss of every step."""
    world = init_distributed()
    torch.manual_seed(0)  # the same weights on every process before sharding
    model = ByteModel().to(world.device)
    layout = Layout(zero=3)
    mesh = build_mesh(layout, world.device)
    parallelize(model, layout, mesh=mesh)
    losses: list[float] = []
    trainer = Trainer(
        model,
        TextRows(data_parallel_rank(mesh), data_parallel_size(mesh)),
        TrainConfig(steps=steps, optim=OptimConfig(lr=3e-3)),
        mesh=mesh,
        run_dir=run_dir,
        objective=next_byte_loss,
        callbacks=[lambda trainer, row: losses.append(row["loss"])],
    )
    trainer.fit()
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="train a module of your own")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--run-dir", help="directory for metrics and checkpoints, to resume from")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.run_dir)
    shutdown_distributed()
