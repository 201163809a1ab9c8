"""Training step of a BMTrain program with a changed import compared with plain FSDP2.

    python -m benchmarks.training.bmtrain_step [--pairs 31] [--recompute] [--plain-adam fused]

Two processes train the same transformer from the same weights on the same batch. One side is a
BMTrain program that imports `bmforge.compat.bmtrain` (blocks, OptimManager, FusedCrossEntropy,
AdamOffloadOptimizer, clipping). The other side uses `fully_shard`, torch's AdamW and torch's
clipping. Both sides recompute activations, or neither does. The steps alternate.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import bmforge.compat.bmtrain as bmt
from benchmarks.harness import header, make_parser, paired_ratio, table

VOCAB, WIDTH, HEADS, LAYERS = 8192, 512, 8, 6
ROWS, LENGTH, LR, CLIP = 4, 256, 1e-4, 1.0


class Block(nn.Module):
    """Transformer block.

    Args:
        linear: class of the linear layers.
    """

    def __init__(self, linear: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.qkv, self.out = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.up, self.down = linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(F.layer_norm(x, (WIDTH,))).unflatten(-1, (3, HEADS, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(F.layer_norm(x, (WIDTH,)))))


class BMTrainEmbedding(bmt.DistributedModule):
    """Embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.empty(VOCAB, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class BMTrainModel(bmt.DistributedModule):
    """Model of the BMTrain program."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.embed = BMTrainEmbedding()
        blocks = [bmt.Block(Block(bmt.nn.Linear), recompute) for _ in range(LAYERS)]
        self.blocks = bmt.TransformerBlockList(blocks)
        self.head = bmt.nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(ids)))


class PlainModel(nn.Module):
    """The same model in plain torch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block(nn.Linear) for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def rows() -> Tensor:
    """Return the random tokens of this rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)


def build_bmtrain(weights: dict[str, Tensor], recompute: bool) -> Callable[[], float]:
    """Return a training step of the BMTrain program."""
    model = BMTrainModel(recompute)
    model.load_state_dict(weights)
    optimizer = bmt.optim.AdamOffloadOptimizer(model.parameters(), lr=LR, weight_decay=1e-2)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    loss_func, ids = bmt.loss.FusedCrossEntropy(), rows()

    def step() -> float:
        loss = loss_func(model(ids[:, :-1]).reshape(-1, VOCAB), ids[:, 1:].reshape(-1))
        manager.zero_grad()
        manager.backward(loss)
        manager.clip_grad_norm(optimizer.param_groups, max_norm=CLIP)
        manager.step()
        return bmt.sum_loss(loss).item()

    return step


def build_plain(
    weights: dict[str, Tensor], recompute: bool, optimizer_kind: str
) -> Callable[[], float]:
    """Return a training step with FSDP2."""
    model = PlainModel()
    model.load_state_dict(weights)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        if recompute:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fused = {"fused": True} if optimizer_kind == "fused" else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=1e-2, **fused)
    ids = rows()

    def step() -> float:
        loss = F.cross_entropy(model(ids[:, :-1]).reshape(-1, VOCAB), ids[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        return total.item()

    return step


def work(rank: int, world: int, port: int, arguments: argparse.Namespace) -> None:
    """Time both sides on one rank; rank 0 prints the result."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    bmt.init_distributed(seed=0)
    weights = PlainModel().state_dict()
    weights = {name: value.clone() for name, value in weights.items()}
    steps = {
        "BMTrain program": build_bmtrain(weights, arguments.recompute),
        "plain FSDP2": build_plain(weights, arguments.recompute, arguments.plain_adam),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(arguments.pairs + 2):
        for side in list(steps) if number % 2 else list(steps)[::-1]:
            dist.barrier()
            start = time.perf_counter()
            losses[side].append(steps[side]())
            dist.barrier()
            seconds[side].append(time.perf_counter() - start)
    if rank == 0:
        report({n: s[2:] for n, s in seconds.items()}, losses, world)
    dist.destroy_process_group()


def report(seconds: dict[str, list[float]], losses: dict[str, list[float]], world: int) -> None:
    """Print the times, the ratio of the speeds and the difference of the losses."""
    tokens = world * ROWS * (LENGTH - 1)
    lines = [
        (side, f"{statistics.median(s) * 1e3:.0f}", f"{tokens / statistics.median(s):,.0f}")
        for side, s in seconds.items()
    ]
    print(table(["2 processes", "median step, ms", "tokens/s"], lines))
    ratio = paired_ratio(seconds, "BMTrain program", "plain FSDP2")
    print(f"\nspeed, {ratio.sides}: {ratio:.3f}, {len(seconds['plain FSDP2'])} pairs")
    gap = max(abs(a - b) / b for a, b in zip(*losses.values(), strict=True))
    print(f"largest relative difference of the losses of all steps: {gap:.1e}")


def main() -> None:
    """Start two processes."""
    parser = make_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=31)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--plain-adam", choices=["default", "fused"], default="fused")
    arguments = parser.parse_args()
    print(header(1, ["torch"]) + "\n")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    mp.spawn(work, args=(2, port, arguments), nprocs=2)


if __name__ == "__main__":
    main()
