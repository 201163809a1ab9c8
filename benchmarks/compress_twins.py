"""Compares each calibrated compression method with the method that needs no data.

    python benchmarks/compress_twins.py TEXT

Trains a byte-level OPT of 3.2M parameters on the first nine tenths of TEXT for `--steps` steps, and
prints the bits per byte of the rest for every method. About five minutes of one core.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bmforge.compress.prune import PruneConfig, StructureConfig, prune, shrink_
from bmforge.compress.quantize import quantize
from bmforge.models import OPT, OPTConfig
from bmforge.nn.packing import QuantSpec

SIZES: dict[str, Any] = {
    **{"vocab_size": 256, "hidden_size": 256, "num_layers": 4, "num_heads": 4},
    **{"intermediate_size": 1024, "max_seq_len": 128},
}


def train(data: Tensor, steps: int) -> OPT:
    """Train on rows of 128 bytes that are sampled at random."""
    torch.manual_seed(0)
    model = OPT.from_config(OPTConfig(**SIZES)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps)
    for _ in range(steps):
        ids = rows_of(data, 10)
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.eval()


def rows_of(data: Tensor, count: int) -> Tensor:
    starts = torch.randint(0, len(data) - 128, (count, 1))
    return data[starts + torch.arange(128)]


@torch.no_grad()
def bits(model: Any, held_out: Tensor) -> float:
    """Return bits per byte of the held-out rows."""
    losses = [float(model(input_ids=part, labels=part).loss) for part in held_out.split(32)]
    return sum(losses) / len(losses) / 0.6931471805599453


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--keep", type=Path, help="directory of the trained model, made or reused")
    options = parser.parse_args()
    data = torch.tensor(list(options.text.read_bytes()))
    cut = len(data) * 9 // 10
    if options.keep and options.keep.exists():
        model = OPT.from_pretrained(options.keep).eval()
    else:
        model = train(data[:cut], options.steps)
        if options.keep:
            model.save_pretrained(options.keep)
    torch.manual_seed(1)
    held_out = data[cut : cut + 256 * 128].view(256, 128)
    batches = [rows_of(data[:cut], 8) for _ in range(16)]
    print(f"plain: {bits(model, held_out):.4f} bits per byte")

    def show(name: str, change: Callable[[Any], Any]) -> None:
        small = copy.deepcopy(model)
        change(small)
        print(f"{name:<40}{bits(small, held_out):.4f}", flush=True)

    specs = {"int8-dynamic": "int8-dynamic", "int4": "int4", "int4-128": "int4-128"}
    schemes = {**specs, "int4-asym": "int4-asym", "int4 rows": QuantSpec(4, 0, activations="float")}
    for name, scheme in schemes.items():
        show(f"{name} absmax", lambda m, s=scheme: quantize(m, s))
        for method in ("smooth", "awq", "gptq"):
            given = {"method": method, "batches": batches}
            show(f"{name} {method}", lambda m, s=scheme, g=given: quantize(m, s, **g))
    for pattern in ("2:4", "free"):
        show(f"{pattern} magnitude", lambda m, p=pattern: prune(m, PruneConfig(pattern=p)))
        for method in ("wanda", "sparsegpt"):
            config: Any = PruneConfig(method=method, pattern=pattern)
            show(f"{pattern} {method}", lambda m, c=config: prune(m, c, batches=batches))
    labelled = [{"input_ids": ids, "labels": ids} for ids in batches]
    for by in ("size", "activation", "taylor"):
        config = StructureConfig(intermediate_size=512, by=by)
        show(
            f"half of the MLPs by {by}",
            lambda m, c=config, b=by: shrink_(m, c, () if b == "size" else labelled),
        )


if __name__ == "__main__":
    main()
