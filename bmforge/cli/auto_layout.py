"""`--layout auto`: chooses a parallel layout for this machine with the planner."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import torch
import torch.distributed as dist

from bmforge.cli.plan import auto_layout
from bmforge.device import default_device, device_name, is_host, memory_room_bytes
from bmforge.errors import ConfigError
from bmforge.gpu_specs import DEVICES, Device, find_devices_by_name
from bmforge.logging import get_logger
from bmforge.parallel import init_distributed
from bmforge.parallel.planner.hardware import Cluster
from bmforge.recipes.start import traits_of

__all__ = ["apply_auto_layout", "find_cluster_here"]

_GIB = 2**30


def apply_auto_layout(config: Any, world_size: int, *, joins: bool) -> Any:
    """Return a recipe's config with the fastest parallel layout that fits.

    Recomputation, offloading and micro-batch size are chosen as well. The first process plans
    before it joins the process group, and then broadcasts the result.

    Args:
        config: the recipe's config.
        world_size: number of processes.
        joins: whether to initialize the process group and broadcast the result.

    Raises:
        ConfigError: no layout fits, or the table of GPUs does not contain the machine's
            accelerator.
    """
    if traits_of(config.model).has_images:
        raise ConfigError(
            "--layout auto does not support image models (supported: language models). Set "
            "the fields of the layout, for example --layout.zero 2."
        )
    if getattr(config.data, "grad_accum_steps", None) is not None:
        raise ConfigError(
            "--layout auto chooses the micro-batches, so data.grad_accum_steps would change "
            "the global batch. Set data.global_batch_size instead."
        )
    outcome: list[Any] = [None]
    if not joins or os.environ.get("RANK", "0") == "0":
        try:
            cluster = find_cluster_here(world_size)
            # On a CPU, offloading to the host saves no memory.
            outcome[0] = auto_layout(config, cluster, offload=not is_host(default_device()))
        except ConfigError as error:
            outcome[0] = error
    if joins and world_size > 1:
        init_distributed()
        dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    layout, recompute, offloaded, rows = outcome[0]
    get_logger().info(
        "layout: %s, micro-batches of %d sequences%s%s",
        layout,
        rows,
        ", recompute" if recompute else "",
        f", {offloaded:.0%} of the optimizer states offloaded" if offloaded else "",
    )
    return dataclasses.replace(
        config,
        layout=layout,
        recompute=recompute,
        offload=dataclasses.replace(config.offload, fraction=offloaded)
        if offloaded
        else config.offload,
        data=dataclasses.replace(config.data, micro_batch_size=rows),
    )


def find_cluster_here(world_size: int) -> Cluster:
    """Return the cluster of `world_size` processes, assuming that all machines are equal."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    device = default_device()
    if is_host(device):
        return Cluster(_measure_host(local), world_size, per_node=local)
    return Cluster(_find_accelerator(device), world_size, per_node=local)


def _measure_host(processes: int) -> Device:
    """Benchmark the CPU, because its data sheet does not state the throughput of torch."""
    side = 1024
    left, other = torch.randn(side, side), torch.randn(side, side)
    torch.mm(left, other)
    rate = max(2 * side**3 / _seconds(lambda: torch.mm(left, other)) for _ in range(3))
    source = torch.empty(64 << 20, dtype=torch.uint8)
    target = torch.empty_like(source)
    copied = max(2 * source.numel() / _seconds(lambda: target.copy_(source)) for _ in range(3))
    memory = memory_room_bytes(default_device()) / processes / _GIB
    return Device(
        name="this-processor",
        memory_gib=memory,
        half_tflops=rate / 1e12,
        full_tflops=rate / 1e12,
        memory_gb_s=copied / 1e9,
        peer_gb_s=copied / 2e9,
        host_gb_s=copied / 2e9,
        has_bf16=False,
        efficiency=0.8,
        source="measured now: a product of two 1,024 x 1,024 matrices, a copy of 64 MiB",
        measured="docs/results/training_step.md: steps run at 80 % of their products",
        is_host=True,
        full_efficiency=0.8,
    )


def _seconds(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _find_accelerator(device: torch.device) -> Device:
    """Return the GPU table's entry with the accelerator's name and the closest memory size."""
    size = torch.get_device_module(device).mem_get_info(device)[1] / _GIB
    kinds = find_devices_by_name(device_name(device))
    if not kinds:
        raise ConfigError(
            f"--layout auto has no data about the GPU {device_name(device)!r} (supported: "
            f"{', '.join(DEVICES)}). Run `bmforge plan` with --gpu-memory and --gpu-tflops, and "
            "set the fields of the layout that it prints, for example --layout.zero 2."
        )
    nearest = min(kinds, key=lambda kind: abs(kind.memory_gib - size))
    return dataclasses.replace(nearest, memory_gib=size)
