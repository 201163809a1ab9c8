"""A ZeRO-3 step on two processes: the Trainer against a hand-written FSDP2 script.

Both train the same model from the same weights on the same rows: ours through `parallelize` and
`Trainer.train_step` with all it does (token-weighted loss, agreed skips, metrics), the other as a
person would write it with `fully_shard`, torch's fused AdamW and torch's gradient clipping. The two
take turns within one run; pairs cancel what slows the machine down.

    python benchmarks/zero3.py [--pairs 51] [--precision fp32|bf16]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import header, paired_ratio, table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from bmforge.models import GPT2, GPT2Config, init_weights_
from bmforge.parallel import Layout, build_mesh, init_distributed, parallelize
from bmforge.train import OptimConfig, TrainConfig, Trainer

CONFIG = {"vocab_size": 8192, "hidden_size": 512, "num_layers": 6, "num_heads": 8}
ROWS, LENGTH, LR, CLIP = 2, 256, 1e-4, 1.0


class FixedRows:
    """A loader that hands out the same rows again and again."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.batch = {"input_ids": ids, "labels": ids}

    def __next__(self) -> list[dict[str, torch.Tensor]]:
        return [self.batch]

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def rows(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, CONFIG["vocab_size"], (ROWS, LENGTH), generator=generator)


def build_ours(precision: str) -> Callable[[], float]:
    world = init_distributed()
    layout = Layout(zero=3)
    mesh = build_mesh(layout, world.device)
    model = GPT2.from_config(GPT2Config(**CONFIG, max_seq_len=LENGTH), device="meta")
    parallelize(model, layout, mesh=mesh, precision=precision)
    init_weights_(model, seed=0)
    config = TrainConfig(precision=precision, grad_clip=CLIP, optim=OptimConfig(lr=LR))
    trainer = Trainer(model.train(), FixedRows(rows(world.rank)), config, mesh=mesh)
    return lambda: trainer.train_step()[0]["loss"]


def build_plain(precision: str) -> Callable[[], float]:
    model = GPT2.from_config(GPT2Config(**CONFIG, max_seq_len=LENGTH), seed=0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    half = torch.bfloat16 if precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), fused=True)
    ids = rows(dist.get_rank())

    def step() -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        return mean.item()

    return step


def work(rank: int, world: int, port: int, pairs: int, precision: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    ours, plain = build_ours(precision), build_plain(precision)
    steps = {"bmforge": ours, "hand-written": plain}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(pairs + 2):
        order = list(steps) if number % 2 else list(steps)[::-1]
        for name in order:
            dist.barrier()
            start = time.perf_counter()
            losses[name].append(steps[name]())
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    if rank == 0:
        report({n: s[2:] for n, s in seconds.items()}, losses, world)
    dist.destroy_process_group()


def report(seconds: dict[str, list[float]], losses: dict[str, list[float]], world: int) -> None:
    ratio, low, high = paired_ratio(seconds["bmforge"], seconds["hand-written"])
    tokens = ROWS * LENGTH * world
    lines = [
        (name, f"{statistics.median(s) * 1e3:.0f}", f"{tokens / statistics.median(s):,.0f}")
        for name, s in seconds.items()
    ]
    print(table(["ZeRO-3, 2 processes", "median step, ms", "tokens/s"], lines))
    pairs = len(seconds["bmforge"])
    interval = f"95 % interval {low:.3f} to {high:.3f} over {pairs} pairs"
    print(f"\nmedian speed ratio of the pairs {ratio:.3f}, {interval}")
    gap = max(abs(a - b) / b for a, b in zip(*losses.values(), strict=True))
    print(f"largest relative difference of the losses of all steps: {gap:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=51)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    arguments = parser.parse_args()
    command = f"python benchmarks/zero3.py --pairs {arguments.pairs}"
    print(header(f"{command} --precision {arguments.precision}", 1, ["torch"]) + "\n")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    mp.spawn(work, args=(2, port, arguments.pairs, arguments.precision), nprocs=2)


if __name__ == "__main__":
    main()
