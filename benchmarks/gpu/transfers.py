"""Rows of copies: bandwidths of memory, bus and disk, streamed blocks, offloaded training."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.gpu.measure import (
    GIB,
    Values,
    build_model,
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
    time_once,
)
from benchmarks.gpu.training import build_step, precision_of
from benchmarks.training.offload import drop_cache, read_through
from bmforge.device import default_device
from bmforge.memory.resident import NUM_SLOTS
from bmforge.memory.streaming import stream_blocks_
from bmforge.models import load_weights_, weight_reader
from bmforge.parallel import Layout, OffloadConfig, parallelize
from bmforge.train.offload.states import StateOffload

__all__ = ["copies", "offload", "stream"]


def host_memory(size_bytes: int, pinned: bool) -> Tensor:
    """Return written host memory, page-locked if there is an accelerator and `pinned`."""
    pinned = pinned and torch.accelerator.is_available()
    return torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=pinned)


def copy_speed(target: Tensor, source: Tensor) -> float:
    """Return the speed of a copy in bytes per second."""
    return source.nbytes / median_seconds(lambda: target.copy_(source, non_blocking=True), 9)


def copies(mib: int) -> Values:
    """Measure copies within the device, over the bus and from disk."""
    device, size = default_device(), mib << 20
    entry = table_entry(device)
    yield {"copy of MiB": mib}
    on_device, other = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    yield {
        "memory GB/s (read + write)": 2e-9 * copy_speed(on_device, other),
        "memory in the table": None if entry is None else entry.memory_gb_s,
    }
    for name, pinned in (("pinned", True), ("pageable", False)):
        host = host_memory(size, pinned)
        yield {
            f"to the device GB/s, {name}": 1e-9 * copy_speed(on_device, host),
            f"to the host GB/s, {name}": 1e-9 * copy_speed(host, on_device),
        }
    yield {"bus in the table": None if entry is None else entry.host_gb_s}
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(host_memory(size, False).numpy()))
        file.flush()
        yield {"disk read GB/s": 1e-9 * size / read_through(Path(file.name))}


def stream(preset: str, source: str) -> Values:
    """Time a forward pass whose blocks all come from host memory or from disk."""
    device, config = default_device(), config_of(preset)
    yield {"model": preset, "source": source}
    with tempfile.TemporaryDirectory() as folder:
        model = build_model(config, half_dtype(device))
        require_memory(sum(p.nbytes for p in model.parameters()), device)
        model.save_pretrained(folder)
        ids = torch.arange(16, device=device)[None]
        with torch.no_grad():
            want = model(ids).logits
        del model
        run, size, slots = open_streamed(config, folder, source, ids)
        got = run()
        files = sorted(Path(folder).glob("*.safetensors"))
        seconds = []
        for _ in range(5):
            if source == "disk":
                for file in files:
                    drop_cache(file)
            seconds.append(time_once(run))
        speed = size / statistics.median(seconds)
        bound = bound_speed(files, source, device)
    yield {
        "streamed GiB": size / GIB,
        "streamed GB/s": 1e-9 * speed,
        f"{source} GB/s": 1e-9 * bound,
        "share": speed / bound,
        "bits equal": torch.equal(got, want),
        "slots": slots,
    }


def open_streamed(
    config: Any, folder: str, source: str, ids: Tensor
) -> tuple[Callable[[], Tensor], int, int]:
    """Return a forward pass, the bytes that one pass copies, and the number of slots."""
    device = ids.device
    model = family_of(config).from_config(config, device="meta", dtype=half_dtype(device))
    names = [f"layers.{name}" for name in model.layers]
    on_host = names if source == "host" else []
    reader = weight_reader(model, folder)
    streamer = stream_blocks_(model, reader, device=device, on_host=on_host)
    load_weights_(model, folder, device=device)
    # Passes that follow each other find the blocks of the last copies in the slots.
    copied = len(streamer.blocks) - NUM_SLOTS
    size = sum(block.size_bytes for block in streamer.blocks) * copied // len(streamer.blocks)

    @torch.no_grad()
    def run() -> Tensor:
        return model(ids).logits

    return run, size, NUM_SLOTS


def bound_speed(files: list[Path], source: str, device: torch.device) -> float:
    """Return the speed in bytes per second of plain reads, or of copies from pinned memory."""
    if source == "disk":
        size = sum(file.stat().st_size for file in files)
        return size / sum(read_through(file) for file in files)
    size = min(256 << 20, sum(file.stat().st_size for file in files))
    target = torch.zeros(size, dtype=torch.uint8, device=device)
    return copy_speed(target, host_memory(size, True))


def count_saved_bytes(model: Any, step: Callable[[], None]) -> int:
    """Return the bytes of activations that all blocks but the last save in a step."""
    sizes: dict[int, int] = {}
    handles, hooks = [], []

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and tensor.numel() >= 1 << 12:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = tensor.nbytes
        return tensor

    def enter(*_: Any) -> None:
        hooks.append(saved_tensors_hooks(pack, lambda tensor: tensor))
        hooks[-1].__enter__()

    def leave(*_: Any) -> None:
        hooks.pop().__exit__(None, None, None)

    for block in list(model.layers.values())[:-1]:
        handles += [block.register_forward_pre_hook(enter), block.register_forward_hook(leave)]
    step()
    for handle in handles:
        handle.remove()
    return sum(sizes.values())


def offload(
    preset: str,
    rows: int,
    length: int,
    steps: int,
    activations: bool = False,
    states: bool = False,
) -> Values:
    """Compare a step with offloaded activations or optimizer states with one without."""
    device, config = default_device(), config_of(preset, length)
    yield {"model": preset, "offloaded": "activations" if activations else "states"}
    runs, models = [], []
    for offloads in (True, False):
        model = family_of(config).from_config(config, device="meta")
        options = {"offload_activations": activations and offloads}
        parallelize(model, Layout(zero=0), precision=precision_of(device), **options)
        fill_random_(model, device)
        keep = settle_states(model) if states and offloads else None
        runs.append(build_step(model, rows, length, keep))
        models.append(model)
    moved = count_saved_bytes(models[1], runs[1]) if activations else None
    seconds = seconds_in_turns({"with offload": runs[0], "without": runs[1]}, steps)
    medians = [statistics.median(times) for times in seconds.values()]
    yield {"step ms": 1e3 * medians[0], "without ms": 1e3 * medians[1]}
    yield ratio_value(seconds, "with offload", "without") | {"peak of both GiB": peak_gib(device)}
    if moved:
        speed = bound_of_bus(device)
        added = max(0.0, medians[0] - medians[1])
        yield {"moved GiB": 2 * moved / GIB, "hidden share": 1 - added * speed / (2 * moved)}


def bound_of_bus(device: torch.device) -> float:
    """Return the speed of copies from pinned memory in bytes per second."""
    target = torch.zeros(64 << 20, dtype=torch.uint8, device=device)
    return copy_speed(target, host_memory(64 << 20, True))


def settle_states(model: Any) -> Callable[[Any], Callable[[], None]]:
    """Return the function that offloads the states of a model's optimizers."""
    target: Any = "disk" if default_device().type == "cpu" else "host"

    def attach(optimizers: Any) -> Callable[[], None]:
        return StateOffload(model, optimizers, OffloadConfig(1.0, target=target)).settle

    return attach
