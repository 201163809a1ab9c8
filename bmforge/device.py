"""The one file that knows which kinds of device there are.

Everything else asks here: which device to use, which collective backend suits it, how much memory
it has given out, and how fast it is at best. A machine without an accelerator uses the CPU.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from bmforge.errors import ConfigError
from bmforge.host_memory import data_room_bytes, host_memory_bytes, peak_resident_bytes
from bmforge.native import processor_field

__all__ = [
    "backend_for",
    "default_device",
    "device_at",
    "device_memory_bytes",
    "device_name",
    "device_size_bytes",
    "fast_products",
    "find_devices",
    "fork_random",
    "has_fast_half",
    "keep_random",
    "is_host",
    "memory_room_bytes",
    "parse_dtype",
    "peak_flops",
    "reads_are_free",
    "wide_dtype",
]

# Dense bf16/fp16 peak in FLOP/s without sparsity, from the vendors' data sheets.
_PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "V100": 125e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
_BACKENDS = {"cuda": "nccl", "cpu": "gloo", "xpu": "xccl", "npu": "hccl"}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def default_device(local_rank: int = 0) -> torch.device:
    """Return this process's accelerator, or the CPU where there is none."""
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        return torch.device(kind.type, local_rank % torch.accelerator.device_count())
    return torch.device("cpu")


def device_at(index: int | None = None) -> torch.device:
    """Return the accelerator of that number, the current one for None; the CPU where there is none.

    Raises:
        ConfigError: there are fewer accelerators.
    """
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    index = torch.accelerator.current_device_index() if index is None else index
    if not 0 <= index < count:
        raise ConfigError(f"there is no accelerator {index}: this machine has {count}, from 0 on.")
    return torch.device(default_device().type, index)


def find_devices(
    named: Sequence[int | str | torch.device] | None = None,
) -> tuple[torch.device, ...]:
    """Return devices by numbers or names, such as 0, "cuda:1" or "cpu"; the default one for None.

    Raises:
        ConfigError: none is named, there is no such one, or an accelerator is named twice.
    """
    if named is None:
        return (default_device(),)
    if isinstance(named, str) or not isinstance(named, Sequence) or not named:
        raise ConfigError(f"devices={named!r} must be a list with at least one, such as [0, 1].")
    found = tuple(_find_device(one) for one in named)
    twice = {str(one) for one in found if not is_host(one) and found.count(one) > 1}
    if twice:
        raise ConfigError(f"devices={list(named)} names {', '.join(sorted(twice))} twice.")
    return found


def _find_device(named: int | str | torch.device) -> torch.device:
    if isinstance(named, str) and named.isdecimal():
        named = int(named)
    if type(named) is int:
        if not torch.accelerator.is_available():
            raise ConfigError(
                f"there is no accelerator {named}: this machine has none. Leave devices out, or "
                'name "cpu".'
            )
        return device_at(named)
    try:
        if not isinstance(named, (str, torch.device)):
            raise TypeError
        device = torch.device(named)
    except (RuntimeError, TypeError):
        raise ConfigError(
            f'devices: {named!r} is no device; use a number, or a name such as "cuda:0" or "cpu".'
        ) from None
    if is_host(device):
        return torch.device("cpu")
    if not torch.accelerator.is_available() or device.type != default_device().type:
        raise ConfigError(f"there is no device {named}: this machine has {default_device().type}.")
    return device_at(device.index or 0)


def backend_for(device: torch.device) -> str:
    """Return the collective backends for `device`; host tensors always have gloo beside it."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{_BACKENDS.get(device.type, 'gloo')}"


def is_host(device: torch.device) -> bool:
    """Tell whether `device` computes in the host's own memory."""
    return device.type == "cpu"


def device_name(device: torch.device) -> str:
    """Return a name a person knows the device by."""
    if device.type == "cpu":
        return _cpu_name()
    return str(torch.get_device_module(device).get_device_name(device))


def peak_flops(device: torch.device) -> float | None:
    """Return the dense half-precision peak in FLOP/s, or None where no peak is known."""
    if device.type == "cpu":
        return None
    name = device_name(device)
    return next((flops for key, flops in _PEAK_FLOPS.items() if key in name), None)


def has_fast_half(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether half-precision products are faster than fp32 ones on `device`.

    A CPU without the instructions for them emulates them, many times slower.
    """
    if device.type != "cpu" or dtype == torch.float32:
        return True
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def reads_are_free(tensor: torch.Tensor) -> bool:
    """Tell whether looking at values makes nobody wait and breaks no graph."""
    is_plain = type(tensor) is torch.Tensor and not torch.compiler.is_compiling()
    return is_plain and tensor.device.type == "cpu"


@contextmanager
def fork_random(number: int) -> Iterator[None]:
    """Draw other random numbers for every `number` inside, and leave the generators as they were.

    The seed comes from the common generator, which moves on by one draw, so that doing the same
    again from the same state draws the same.
    """
    seed = int(torch.randint(1 << 62, ()))
    with keep_random():
        torch.manual_seed(seed ^ number)
        yield


@contextmanager
def keep_random() -> Iterator[None]:
    """Leave the generators as they were, whatever is drawn inside."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    here = [] if kind is None else [torch.accelerator.current_device_index()]
    with torch.random.fork_rng(here, device_type="cpu" if kind is None else kind.type):
        yield


def device_memory_bytes(device: torch.device) -> int | None:
    """Return the accelerator's high-water mark of allocated bytes, or None on the CPU."""
    if device.type == "cpu":
        return None
    return int(torch.get_device_module(device).max_memory_allocated(device))


def memory_room_bytes(device: torch.device) -> int:
    """Return what is left of `device` at the highest use so far, less 3 % for what cannot be used.

    An accelerator's share of this process, where one was set, a limit on a CPU process's data
    (``ulimit -d``) and a container's limit count as the size.
    """
    if device.type != "cpu":
        accelerator = torch.get_device_module(device)
        total_bytes = accelerator.mem_get_info(device)[1]
        share = getattr(accelerator, "get_per_process_memory_fraction", lambda _: 1.0)(device)
        return int(0.97 * share * total_bytes) - int(accelerator.max_memory_reserved(device))
    limited = data_room_bytes()
    if limited is not None:
        return limited
    return int(0.97 * host_memory_bytes()) - peak_resident_bytes()


def device_size_bytes(device: torch.device) -> int:
    """Return the memory of `device`; of a CPU the host's, a container's limit included."""
    if device.type == "cpu":
        return host_memory_bytes()
    return int(torch.get_device_module(device).mem_get_info(device)[1])


def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype of a precision word: ``fp32``, ``bf16`` or ``fp16``."""
    if name not in _DTYPES:
        raise ConfigError(f"precision={name!r} is unknown; use one of {sorted(_DTYPES)}.")
    return _DTYPES[name]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what sums and products of `dtype` are kept in: fp32, and fp64 for itself."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@contextmanager
def fast_products() -> Iterator[bool]:
    """Let torch multiply fp32 matrices by the faster of its two libraries inside; tell if it does.

    MKL leaves AVX512 unused on CPUs that are not Intel's; oneDNN takes it and is twice as fast for
    all but the smallest products. Torch gives oneDNN a product where bf16 may stand in for fp32;
    without instructions that round so, it stays fp32, which is looked at first. What differs is
    the order of summation.
    """
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    if not _mkl_is_slow():
        yield False
        return
    matmul.fp32_precision = "bf16"
    try:
        if not _keeps_fp32():
            matmul.fp32_precision = before
        yield matmul.fp32_precision == "bf16"
    finally:
        matmul.fp32_precision = before


def _mkl_is_slow() -> bool:
    """Tell whether this is a CPU with AVX512 on which MKL does not use it."""
    vendor = processor_field("vendor_id")
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return wide and torch.backends.mkl.is_available() and vendor not in ("", "GenuineIntel")


def _keeps_fp32() -> bool:
    """Tell whether products of fp32 matrices keep the digits that bf16 has no room for."""
    value, size = 1 + 2**-12, 256
    product = torch.full((size, size), value) @ torch.ones(size, size)
    return bool((product == size * value).all())


def _cpu_name() -> str:
    return processor_field("model name") or platform.processor() or platform.machine()
