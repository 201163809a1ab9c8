"""Tokens per second and MFU on one accelerator: GPT-2 124M and a Llama of 1B, through the Trainer.

    python benchmarks/gpu.py [--steps 20]

Prints one row per model and setting; a setting that does not fit says so. Needs an accelerator.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass

import torch
from harness import header, table

from bmforge.device import default_device, device_memory_bytes, peak_flops
from bmforge.models import GPT2, GPT2Config, Llama, LlamaConfig, init_weights_
from bmforge.parallel import Layout, build_mesh, init_distributed, parallelize, shutdown_distributed
from bmforge.train import OptimConfig, TrainConfig, Trainer


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    preset: str
    rows: int
    length: int
    recompute: bool


CASES = [
    Case("gpt2-small", 16, 1024, False),
    Case("gpt2-small", 64, 1024, False),
    Case("llama-3.2-1b", 2, 4096, False),
    Case("llama-3.2-1b", 8, 4096, False),
    Case("llama-3.2-1b", 8, 4096, True),
]


class RandomRows:
    """A loader of random rows that live on the device already."""

    def __init__(self, case: Case, vocab_size: int, device: torch.device) -> None:
        ids = torch.randint(0, vocab_size, (case.rows, case.length), device=device)
        self.batch = {"input_ids": ids, "labels": ids}

    def __next__(self) -> list[dict[str, torch.Tensor]]:
        return [self.batch]

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def measure(case: Case, steps: int) -> list[str]:
    """Train `steps` steps and return the table row."""
    family = GPT2 if case.preset.startswith("gpt2") else Llama
    kind = GPT2Config if family is GPT2 else LlamaConfig
    config = kind.preset(case.preset, max_seq_len=max(case.length, 1024))
    world = init_distributed()
    mesh = build_mesh(Layout(), world.device)
    model = family.from_config(config, device="meta")
    parallelize(model, mesh=mesh, precision="bf16", recompute=case.recompute, compile=True)
    init_weights_(model, 0, device=world.device)
    trainer = Trainer(
        model.train(),
        RandomRows(case, config.vocab_size, world.device),
        TrainConfig(precision="bf16", optim=OptimConfig(lr=1e-4)),
        mesh=mesh,
    )
    seconds = []
    for _ in range(steps):
        torch.accelerator.synchronize()
        start = time.perf_counter()
        trainer.train_step()
        torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - start)
    tokens = case.rows * case.length / statistics.median(seconds[steps // 3 :])
    peak = peak_flops(world.device)
    used = tokens * config.flops_per_token(case.length)
    memory = device_memory_bytes(world.device) or 0
    return [
        case.preset,
        f"{case.rows} x {case.length}",
        "yes" if case.recompute else "no",
        f"{tokens:,.0f}",
        f"{used / peak:.1%}" if peak else "peak unknown",
        f"{memory / 2**30:.1f}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    if not torch.accelerator.is_available():
        print("no accelerator here: nothing was measured", file=sys.stderr)
        return 1
    print(header(f"python benchmarks/gpu.py --steps {arguments.steps}", 1, ["torch"]) + "\n")
    rows = []
    for case in CASES:
        module = torch.get_device_module(default_device())
        module.reset_peak_memory_stats()
        try:
            rows.append(measure(case, arguments.steps))
        except torch.OutOfMemoryError:
            rows.append([case.preset, f"{case.rows} x {case.length}", "", "out of memory", "", ""])
        shutdown_distributed()
        torch.compiler.reset()
        module.empty_cache()
    print(table(["model", "batch", "recompute", "tokens/s", "MFU", "peak GiB"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
