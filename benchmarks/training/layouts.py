"""Training step on two processes compared with a script written by hand with torch.

    python -m benchmarks.training.layouts [--layout zero3|tp2|pp2] [--pairs 31]

Both sides train the same model from the same weights on the same batch. bmforge uses `parallelize`
and `Trainer.train_step` (token-weighted loss, agreement on skipped steps, metrics). The other side
(`plain_gpt.py`) uses `fully_shard`, `parallelize_module` or `torch.distributed.pipelining`, fused
AdamW and torch's gradient clipping. The steps alternate.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.harness import header, make_parser, paired_ratio, table
from benchmarks.training.plain_gpt import LAYOUTS, PlainGPT
from bmforge.models import GPT2, GPT2Config, init_weights_
from bmforge.parallel import (
    Layout,
    build_mesh,
    data_parallel_rank,
    init_distributed,
    parallelize,
)
from bmforge.train import OptimConfig, TrainConfig, Trainer

CONFIG = {"vocab_size": 8192, "hidden_size": 512, "num_layers": 6, "num_heads": 8}
ROWS, LENGTH, LR, CLIP = 4, 256, 1e-4, 1.0
SIZES = GPT2Config(**CONFIG, max_seq_len=LENGTH, tie_word_embeddings=False)
BMFORGE = {"zero3": Layout(), "tp2": Layout(tp=2, sequence_parallel=True), "pp2": Layout(pp=2)}
MICRO = {"zero3": 1, "tp2": 1, "pp2": 4}


class FixedRows:
    """A loader that returns the same batch in every step."""

    def __init__(self, ids: torch.Tensor, micro_batches: int) -> None:
        self.batches = [{"input_ids": part, "labels": part} for part in ids.chunk(micro_batches)]

    def __next__(self) -> list[dict[str, torch.Tensor]]:
        return self.batches

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def rows(rank: int) -> torch.Tensor:
    """Return the random tokens of a rank."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, CONFIG["vocab_size"], (ROWS, LENGTH), generator=generator)


def build_bmforge(name: str) -> Callable[[], float]:
    """Return a training step of bmforge."""
    world = init_distributed()
    layout = BMFORGE[name]
    mesh = build_mesh(layout, world.device)
    model = GPT2.from_config(SIZES, device="meta")
    parallelize(model, layout, mesh=mesh)
    init_weights_(model, seed=0)
    config = TrainConfig(grad_clip=CLIP, optim=OptimConfig(lr=LR))
    loader = FixedRows(rows(data_parallel_rank(mesh)), MICRO[name])
    trainer = Trainer(model.train(), loader, config, mesh=mesh)
    return lambda: trainer.train_step()[0]["loss"]


def build_plain(name: str) -> Callable[[], float]:
    """Return a training step of the hand-written script."""
    weights = GPT2.from_config(SIZES, seed=0).state_dict()
    model = PlainGPT(CONFIG, LENGTH)
    model.load_state_dict(weights)
    run, clip = LAYOUTS[name](model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), fused=True)
    is_sharded = name == "zero3"
    ids = rows(dist.get_rank() if is_sharded else 0)

    def step() -> float:
        loss = run(ids)
        clip(CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if is_sharded:
            dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        return loss.item()

    return step


def work(rank: int, world: int, port: int, pairs: int, name: str) -> None:
    """Time both sides on one rank; rank 0 prints the result."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    steps = {"bmforge": build_bmforge(name), "hand-written": build_plain(name)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(pairs + 2):
        order = list(steps) if number % 2 else list(steps)[::-1]
        for side in order:
            dist.barrier()
            start = time.perf_counter()
            losses[side].append(steps[side]())
            dist.barrier()
            seconds[side].append(time.perf_counter() - start)
    if rank == 0:
        groups = world if name == "zero3" else 1
        report({n: s[2:] for n, s in seconds.items()}, losses, name, groups * ROWS * LENGTH)
    dist.destroy_process_group()


def report(
    seconds: dict[str, list[float]], losses: dict[str, list[float]], name: str, tokens: int
) -> None:
    """Print the times, the ratio of the speeds and the difference of the losses."""
    lines = [
        (side, f"{statistics.median(s) * 1e3:.0f}", f"{tokens / statistics.median(s):,.0f}")
        for side, s in seconds.items()
    ]
    print(table([f"{name}, 2 processes", "median step, ms", "tokens/s"], lines))
    ratio = paired_ratio(seconds, "bmforge", "hand-written")
    print(f"\nspeed, {ratio.sides}: {ratio:.3f}, {len(seconds['bmforge'])} pairs")
    gap = max(abs(a - b) / b for a, b in zip(*losses.values(), strict=True))
    print(f"largest relative difference of the losses of all steps: {gap:.1e}")


def main() -> None:
    """Start two processes."""
    parser = make_parser(__doc__)
    parser.add_argument("--layout", choices=list(LAYOUTS), default="zero3")
    parser.add_argument("--pairs", type=int, default=31)
    arguments = parser.parse_args()
    print(header(1, ["torch"]) + "\n")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    mp.spawn(work, args=(2, port, arguments.pairs, arguments.layout), nprocs=2)


if __name__ == "__main__":
    main()
