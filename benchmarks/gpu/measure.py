"""Shared parts of the rows: the device, models with random weights, timing, ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.harness import paired_ratio
from bmforge.device import default_device, device_memory_bytes, device_name, memory_room_bytes
from bmforge.gpu_specs import Device, find_devices_by_name
from bmforge.models import GPT2, GPT2Config, Llama, LlamaConfig
from bmforge.models.init import materialize_
from bmforge.models.pack import quantize_
from bmforge.shards import local_tensor
from bmforge.surgery import persistent_tensors

__all__ = [
    "GIB",
    "SkippedRowError",
    "Values",
    "build_model",
    "config_of",
    "family_of",
    "fill_random_",
    "half_dtype",
    "median_seconds",
    "peak_gib",
    "ratio_value",
    "require_memory",
    "seconds_in_turns",
    "synchronize",
    "table_entry",
    "time_once",
]

GIB = 1 << 30
Values = Iterator[dict[str, Any]]
TINY = LlamaConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    max_seq_len=512,
)
# 2 ** -10 in fp16: packed scales are stored as bytes, of which random ones can be NaN.
_SCALE_BITS = 0x1400


class SkippedRowError(Exception):
    """A row that cannot be measured here; its message says why."""


def config_of(preset: str, length: int = 0) -> Any:
    """Return the config of a preset or of "tiny", for sequences of at least `length` tokens."""
    if preset == "tiny":
        return TINY
    kind: Any = GPT2Config if preset.startswith("gpt2") else LlamaConfig
    return kind.preset(preset, max_seq_len=max(length, 1024))


def family_of(config: Any) -> Any:
    """Return the model class of a config."""
    return GPT2 if isinstance(config, GPT2Config) else Llama


def half_dtype(device: torch.device) -> torch.dtype:
    """Return bf16, or fp32 for a CPU."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def build_model(config: Any, dtype: torch.dtype, scheme: str | None = None) -> Any:
    """Build a model with random weights on the default device.

    Args:
        config: model config.
        dtype: dtype of the weights.
        scheme: quantization scheme; None does not quantize.
    """
    model: Any = family_of(config).from_config(config, device="meta", dtype=dtype)
    if scheme is not None:
        quantize_(model, scheme)
    fill_random_(model, default_device())
    return model


@torch.no_grad()
def fill_random_(model: Any, device: torch.device) -> None:
    """Materialize a model on `device` with random weights that the device generates.

    8B parameters take a second. `init_weights_` generates equal weights for every layout, which a
    benchmark does not need.
    """
    materialize_(model, device)
    for name, tensor in persistent_tensors(model).items():
        local = local_tensor(tensor)
        if name.endswith((".scales", ".minima")):
            local.view(torch.int16).fill_(_SCALE_BITS)
        elif not local.is_floating_point():
            local.random_()
        elif tensor.ndim == 1:
            local.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            local.normal_(std=0.02)


def table_entry(device: torch.device) -> Device | None:
    """Return the entry of bmforge's table of GPUs with the nearest memory; None if unknown."""
    if device.type == "cpu":
        return None
    entries = find_devices_by_name(device_name(device))
    size_gib = torch.get_device_module(device).mem_get_info(device)[1] / GIB
    return min(entries, key=lambda entry: abs(entry.memory_gib - size_gib), default=None)


def require_memory(needed_bytes: float, device: torch.device) -> None:
    """Skip the row if the device has too little free memory."""
    free = memory_room_bytes(device)
    if needed_bytes > free:
        raise SkippedRowError(f"needs {needed_bytes / GIB:.1f} GiB, {free / GIB:.1f} GiB are free")


def synchronize() -> None:
    """Wait for the accelerator, if there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def time_once(run: Callable[[], Any]) -> float:
    """Return the seconds of one call, the device's work included."""
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def median_seconds(run: Callable[[], Any], count: int) -> float:
    """Return the median seconds of a call; a third of the calls warms up."""
    seconds = [time_once(run) for _ in range(count)]
    return statistics.median(seconds[count // 3 :])


def seconds_in_turns(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of functions that run alternately, after one round of warm-up."""
    rows = [[time_once(run) for run in runs.values()] for _ in range(rounds + 1)][1:]
    return {
        name: list(seconds) for name, seconds in zip(runs, zip(*rows, strict=True), strict=True)
    }


def ratio_value(seconds: dict[str, list[float]], first: str, second: str) -> dict[str, str]:
    """Return the column and the cell of the ratio of two speeds."""
    ratio = paired_ratio(seconds, first, second)
    return {f"speed, {ratio.sides}": f"{ratio:.2f}"}


def peak_gib(device: torch.device) -> float | None:
    """Return the allocator's peak in GiB; None on a CPU."""
    peak = device_memory_bytes(device)
    return None if peak is None else peak / GIB
