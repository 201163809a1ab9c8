"""Training step of one checkout, run by `compare_checkouts.py` with another checkout's bmforge.

    python benchmarks/training/checkout_worker.py FAMILY PROCESSES

Runs a step for every line of its input, and prints the seconds, the peak memory in KiB and the
loss. Imports nothing of `benchmarks`, which may differ or be missing in the other checkout.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

import bmforge.models as models
from bmforge.models import init_weights_
from bmforge.parallel import Layout, init_distributed, parallelize

ROWS, LENGTH, WIDTH, LAYERS = 4, 128, 256, 4


def build(family: str, world: int) -> Any:
    """Return a function that runs one step and returns its loss."""
    torch.set_num_threads(2 // world)
    init_distributed()
    sizes: dict[str, Any] = {"vocab_size": 4096, "hidden_size": WIDTH, "num_heads": 4}
    layers = {"num_layers": LAYERS // 2} if family == "T5" else {"num_layers": LAYERS}
    if family in ("Llama", "Bert"):
        sizes["intermediate_size"] = 4 * WIDTH
    config = getattr(models, f"{family}Config")(**sizes, **layers)
    model = getattr(models, family).from_config(config, device="meta")
    parallelize(model, Layout(zero=3))
    init_weights_(model, seed=0)
    model.train()
    ids = torch.randint(
        0, 4096, (ROWS // world, LENGTH), generator=torch.Generator().manual_seed(1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def serve(family: str, world: int) -> None:
    """Run a step for every input line; print its seconds, peak memory in KiB and loss."""
    run = build(family, world)
    for _ in sys.stdin:
        Path("/proc/self/clear_refs").write_text("5")
        start = time.perf_counter()
        loss = run()
        seconds = time.perf_counter() - start
        status = Path("/proc/self/status").read_text().splitlines()
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
        print(f"answer {seconds} {peak} {loss}", flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
