"""BMTrain's three bandwidth benchmarks of communication between processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bmforge.compat.bmtrain import nccl as wires
from bmforge.compat.bmtrain.runtime import config, synchronize
from bmforge.compat.bmtrain.utils import print_rank, round_up

__all__ = ["all_gather", "reduce_scatter", "send_recv"]

# Bytes, from a kibibyte to 4 GiB.
SHAPES = tuple(1 << power for power in range(10, 33))
_REPEATS = 3


def all_gather(sizes: Iterable[int] = SHAPES) -> None:
    """Benchmark all-gather: print the best of three times for each output size in bytes."""
    world, comm = config["world_size"], config["comm"]
    for size in (round_up(size, 2 * world) for size in sizes):
        part, full = _halves(size // world), _halves(size)
        _measure("All gather", size, partial(wires.allGather, part, full, comm))


def reduce_scatter(sizes: Iterable[int] = SHAPES) -> None:
    """Benchmark reduce-scatter: print the best of three times for each input size in bytes."""
    world, comm = config["world_size"], config["comm"]
    for size in (round_up(size, 2 * world) for size in sizes):
        part, full = _halves(size // world), _halves(size)
        _measure("Reduce Scatter", size, partial(wires.reduceScatter, full, part, "avg", comm))


def send_recv(sizes: Iterable[int] = SHAPES) -> None:
    """Benchmark sends from even ranks to the next rank: print the best of three times per size."""
    rank, world, comm = config["rank"], config["world_size"], config["comm"]
    peer = rank + 1 if rank % 2 == 0 else rank - 1
    act: Any = wires.send if rank % 2 == 0 else wires.recv
    for size in (round_up(size, 2) for size in sizes):
        buffer = _halves(size)
        _measure(
            "Send Recv", size, partial(act, buffer, peer, comm) if peer < world else synchronize
        )


def _halves(num_bytes: int) -> Tensor:
    return torch.zeros(num_bytes // 2, dtype=torch.half, device=config.device)


def _measure(name: str, size: int, act: Callable[[], None]) -> None:
    """Print the shortest time of an operation, after one warm-up run, synchronized over ranks."""
    times = []
    for _ in range(1 + _REPEATS):
        synchronize()
        start = time.perf_counter()
        act()
        synchronize()
        times.append(time.perf_counter() - start)
    best = min(times[1:])
    speed = size / best / (1 << 30)
    print_rank(f"{name}:\tsize {size:>12,} B\ttime: {best * 1e3:4.3f} ms\tbw: {speed:2.6f} GiB/s")
