"""Rows of training: steps by model size, adapters on plain and packed bases, sharding."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu.measure import (
    GIB,
    SkippedRowError,
    Values,
    config_of,
    family_of,
    fill_random_,
    half_dtype,
    median_seconds,
    peak_gib,
    ratio_value,
    require_memory,
    seconds_in_turns,
    table_entry,
)
from bmforge.cli.plan_workload import workload_of
from bmforge.device import default_device, peak_flops
from bmforge.models.pack import quantize_
from bmforge.parallel import Layout, build_mesh, init_distributed, parallelize, run_step
from bmforge.parallel.planner.dry_run import join_fakes
from bmforge.parallel.planner.estimate import Estimator, PlanRequest, TrainingSetup
from bmforge.parallel.planner.hardware import Cluster, find_device
from bmforge.train import OptimConfig, build_optimizers, clip_grad_norm_
from bmforge.tune.delta import Lora

__all__ = ["build_step", "shard", "train", "tune"]

PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def precision_of(device: torch.device) -> str:
    """Return the precision of training: bf16, or fp32 on a CPU."""
    return PRECISIONS[half_dtype(device)]


def random_batch(config: Any, rows: int, length: int, device: torch.device) -> dict[str, Any]:
    """Return random tokens on the device."""
    ids = torch.randint(0, config.vocab_size, (rows, length), device=device)
    return {"input_ids": ids, "labels": ids.clone()}


def build_step(
    model: Any, rows: int, length: int, before_optimizer: Callable[[Any], Any] | None = None
) -> Callable[[], None]:
    """Return a training step of a model on the device, with AdamW and clipped gradients.

    Args:
        model: parallelized model with weights.
        rows: rows of the batch.
        length: tokens of a row.
        before_optimizer: called with the optimizers; returns a function that runs before they
            step. None offloads nothing.
    """
    device = default_device()
    offloaded = before_optimizer is not None
    optimizers = build_optimizers(model.train(), OptimConfig(lr=1e-4), offloaded=offloaded)
    settle = before_optimizer(optimizers) if before_optimizer is not None else lambda: None
    batch, tokens = random_batch(model.config, rows, length, device), float(rows * length)

    def step() -> None:
        run_step(model, lambda b: model(**b, num_items_in_batch=tokens).loss, [batch])
        clip_grad_norm_(model, 1.0)
        settle()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return step


def plan_bytes(preset: str, config: Any, rows: int, length: int, recompute: bool) -> float:
    """Return the planner's peak memory of one process without sharding, in bytes."""
    device = default_device()
    entry = table_entry(device) or replace(find_device("a100-80gb"), is_host=True)
    workload = workload_of(preset, config, length)
    request = PlanRequest(workload, Cluster(entry, 1), rows, precision_of(device))
    setup = TrainingSetup(Layout(zero=0), rows, recompute, 0.0)
    return Estimator(request, exact_shards=True).estimate(setup).memory.total


def step_values(config: Any, rows: int, length: int, seconds: float, share: float) -> dict:
    """Return speed and MFU of a step; `share` is the part of the training FLOPs it computes."""
    device, tokens = default_device(), rows * length / seconds
    peak = peak_flops(device)
    used = share * tokens * config.flops_per_token(length)
    return {"tokens/s": round(tokens, 1), "MFU": used / peak if peak else None}


def train(
    preset: str,
    rows: int,
    length: int,
    steps: int,
    recompute: bool = False,
    compile: bool = False,
) -> Values:
    """Train all weights of a model."""
    device, config = default_device(), config_of(preset, length)
    yield {"model": preset, "batch": f"{rows} x {length}", "recompute": recompute}
    planned = plan_bytes(preset, config, rows, length, recompute)
    yield {"plan GiB": planned / GIB}
    require_memory(planned, device)
    world = init_distributed()
    model = family_of(config).from_config(config, device="meta")
    mesh = build_mesh(Layout(zero=0), world.device)
    parallelize(
        model,
        Layout(zero=0),
        mesh=mesh,
        precision=precision_of(device),
        recompute=recompute,
        compile=compile,
    )
    fill_random_(model, device)
    seconds = median_seconds(build_step(model, rows, length), steps)
    yield step_values(config, rows, length, seconds, 1.0) | {"peak GiB": peak_gib(device)}


def tune(preset: str, rows: int, length: int, steps: int, base_dtype: str) -> Values:
    """Train a LoRA adapter on a frozen base in bf16, int8 or int4."""
    from bmforge.recipes.base_weights import find_base_layers  # imports all recipes: 3 s

    device, config = default_device(), config_of(preset, length)
    yield {"model": preset, "base": base_dtype, "batch": f"{rows} x {length}"}
    model = family_of(config).from_config(config, device="meta", dtype=half_dtype(device))
    weights_bytes = sum(p.numel() for p in model.parameters()) * (2 if base_dtype == "bf16" else 1)
    require_memory(1.2 * weights_bytes, device)
    spec, names = find_base_layers(model, "int8" if base_dtype == "bf16" else base_dtype)
    if base_dtype != "bf16":
        quantize_(model, spec, where=names)
    fill_random_(model, device)
    Lora(
        model, [name.split(".", 2)[2] for name in names[: len(names) // config.num_layers]], rank=16
    )
    parallelize(model, Layout(zero=0), precision=precision_of(device), recompute=True)
    seconds = median_seconds(build_step(model, rows, length), steps)
    # No gradients of frozen weights: two of three products, and recomputation is not counted.
    yield step_values(config, rows, length, seconds, 2 / 3) | {"peak GiB": peak_gib(device)}


def shard(
    preset: str, rows: int, length: int, steps: int, world: int, layout: dict[str, Any]
) -> Values:
    """Compare a sharded step with an unsharded one, in a group without communication."""
    device, config = default_device(), config_of(preset, length)
    yield {"model": preset, "layout": ", ".join(f"{k}={v}" for k, v in layout.items())}
    yield {"ranks": world}
    if device.type not in ("cpu", "cuda"):
        raise SkippedRowError(f"no process group without communication on {device.type}")
    join_fakes(0, world)
    runs = []
    for each in (Layout(**layout), Layout(zero=0)):
        model = family_of(config).from_config(config, device="meta")
        mesh = build_mesh(each, device)
        parallelize(model, each, mesh=mesh, precision=precision_of(device))
        fill_random_(model, device)
        runs.append(build_step(model, rows, length))
    seconds = seconds_in_turns({"sharded": runs[0], "unsharded": runs[1]}, steps)
    yield {"step ms": 1e3 * statistics.median(seconds["sharded"])}
    degree = Layout(**layout).tp
    seconds["sharded"] = [degree * step_s for step_s in seconds["sharded"]]
    yield ratio_value(seconds, "unsharded", "sharded")
