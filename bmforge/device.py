"""Device-dependent functions; no other module distinguishes between kinds of devices.

Its functions choose the device, the collective backend and fast matrix products, and return the
allocated memory and the peak speed. Without an accelerator they use the CPU.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from bmforge.errors import ConfigError
from bmforge.gpu_specs import peak_flops_by_name
from bmforge.host_memory import data_room_bytes, host_memory_bytes, peak_resident_bytes
from bmforge.native import processor_field

__all__ = [
    "DeviceGraph",
    "accumulates_in_fp32",
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
    "has_graphs",
    "keep_random",
    "is_host",
    "memory_room_bytes",
    "parse_dtype",
    "peak_flops",
    "reads_without_sync",
    "send_to",
    "triton_features",
    "accumulation_dtype",
]

_BACKENDS = {"cuda": "nccl", "cpu": "gloo", "xpu": "xccl", "npu": "hccl"}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def default_device(local_rank: int = 0) -> torch.device:
    """Return this process's accelerator, or the CPU if the machine has none."""
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        return torch.device(kind.type, local_rank % torch.accelerator.device_count())
    return torch.device("cpu")


def device_at(index: int | None = None) -> torch.device:
    """Return accelerator `index`, or by default the current one (the CPU if there is none).

    Raises:
        ConfigError: the machine has fewer accelerators.
    """
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    index = torch.accelerator.current_device_index() if index is None else index
    if not 0 <= index < count:
        raise ConfigError(
            f"accelerator {index} does not exist (this machine has {count}, numbered from 0). "
            "Choose another index."
        )
    return torch.device(default_device().type, index)


def find_devices(
    names: Sequence[int | str | torch.device] | None = None,
) -> tuple[torch.device, ...]:
    """Return devices by index or name, such as 0, "cuda:1" or "cpu"; if None, the default device.

    Raises:
        ConfigError: the list is empty, a device does not exist, or a device is listed twice.
    """
    if names is None:
        return (default_device(),)
    if isinstance(names, str) or not isinstance(names, Sequence) or not names:
        raise ConfigError(
            f"devices={names!r} must be a list with at least one device, such as [0, 1]."
        )
    devices = tuple(_find_device(name) for name in names)
    twice = {str(d) for d in devices if not is_host(d) and devices.count(d) > 1}
    if twice:
        raise ConfigError(
            f"devices={list(names)} contains {', '.join(sorted(twice))} more than once. Remove "
            "the duplicate."
        )
    return devices


def _find_device(name: int | str | torch.device) -> torch.device:
    if isinstance(name, str) and name.isdecimal():
        name = int(name)
    if type(name) is int:
        if not torch.accelerator.is_available():
            raise ConfigError(
                f"accelerator {name} does not exist, because this machine has none. Leave devices "
                'out, or set devices="cpu".'
            )
        return device_at(name)
    try:
        if not isinstance(name, (str, torch.device)):
            raise TypeError
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise ConfigError(
            f"unknown device: devices={name!r} (allowed: an index, or a name such as "
            '"cuda:0" or "cpu").'
        ) from None
    if is_host(device):
        return torch.device("cpu")
    if not torch.accelerator.is_available() or device.type != default_device().type:
        raise ConfigError(f"device {name} does not exist (available: {default_device().type}).")
    return device_at(device.index or 0)


def backend_for(device: torch.device) -> str:
    """Return the name of the collective backend for `device`; CPU tensors always use gloo."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{_BACKENDS.get(device.type, 'gloo')}"


def is_host(device: torch.device) -> bool:
    """Return True if `device` is the CPU."""
    return device.type == "cpu"


def device_name(device: torch.device) -> str:
    """Return the vendor's name of the device."""
    if device.type == "cpu":
        return _cpu_name()
    return str(torch.get_device_module(device).get_device_name(device))


def peak_flops(device: torch.device) -> float | None:
    """Return the dense half-precision peak in FLOP/s, or None if it is unknown."""
    if device.type == "cpu":
        return None
    return peak_flops_by_name(device_name(device))


def has_fast_half(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if half-precision matrix products are faster than fp32 ones on `device`.

    A CPU without half-precision instructions emulates them, many times slower. GPUs of the Volta
    and Turing generations have tensor cores for fp16 only and emulate bf16.
    """
    if dtype == torch.float32:
        return True
    if device.type != "cpu":
        supports = getattr(torch.get_device_module(device), "is_bf16_supported", None)
        if dtype != torch.bfloat16 or supports is None:
            return True
        return bool(supports(including_emulation=False))
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def triton_features(device: torch.device) -> tuple[bool, bool] | None:
    """Return the flags (has_dp4a, has_tensor_cores) of Triton on `device`; None without Triton.

    On Turing (sm_75), Triton supports NVIDIA's dot product of bytes (dp4a), but no tensor cores. On
    AMD's and Intel's GPUs, Triton uses the matrix cores, but has no dp4a.
    """
    if device.type not in ("cuda", "xpu"):
        return None
    if device.type == "xpu" or torch.version.hip is not None:
        return False, True
    capability = torch.cuda.get_device_capability(device)
    return (True, capability >= (8, 0)) if capability >= (7, 5) else None


def accumulates_in_fp32(device: torch.device) -> bool:
    """Return True if 16-bit products can be added to fp32 sums by one operation of torch."""
    return device.type == "cuda" and torch.version.hip is None


def has_graphs(device: torch.device) -> bool:
    """Return True if `DeviceGraph` supports the device: NVIDIA's and AMD's GPUs."""
    return device.type == "cuda"


class DeviceGraph:
    """Records the kernels that a function launches, to replay them in one call.

    Launching a kernel from Python takes about 10 us on the host; in a graph it takes a fraction of
    that. Every replay uses the same memory. The function must not read values of the device, and
    must have run once before with the same shapes, because kernels cannot be compiled while a graph
    is recorded.

    Args:
        run: function whose kernels are recorded, but not run.
        like: another graph whose memory this graph may reuse, if their calls never overlap.

    Attributes:
        output: return value of the function; every replay overwrites its tensors.

    Raises:
        RuntimeError: if the function waits for the device.
    """

    def __init__(self, run: Callable[[], Any], like: DeviceGraph | None = None) -> None:
        self._graph = torch.cuda.CUDAGraph()
        pool = None if like is None else like._graph.pool()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Other threads may use the device meanwhile, for example to load adapters.
            self._graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                self.output = run()
            finally:
                self._graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)

    def replay(self) -> None:
        """Launch the kernels on the current stream."""
        self._graph.replay()


def send_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a host tensor on `device`; copies to an accelerator are asynchronous.

    The host memory should be page-locked; torch's allocator keeps that memory until the copy is
    done.
    """
    if device.type == "cpu":
        return tensor
    if not _can_pin(device.type):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@cache
def _can_pin(kind: str) -> bool:
    """Return True if torch has page-locked host memory for the current accelerator."""
    try:
        torch.empty(1).pin_memory()
    except (NotImplementedError, RuntimeError):
        return False
    return True


def reads_without_sync(tensor: torch.Tensor) -> bool:
    """Return True if reading a tensor's values causes no device wait and no graph break."""
    is_plain = type(tensor) is torch.Tensor and not torch.compiler.is_compiling()
    return is_plain and tensor.device.type == "cpu"


@contextmanager
def fork_random(number: int) -> Iterator[None]:
    """Context manager that seeds the generators from `number` and restores them on exit.

    The seed also depends on one sample of the global generator, so runs are reproducible.
    """
    seed = int(torch.randint(1 << 62, ()))
    with keep_random():
        torch.manual_seed(seed ^ number)
        yield


@contextmanager
def keep_random() -> Iterator[None]:
    """Context manager that restores the random generators on exit."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    indices = [] if kind is None else [torch.accelerator.current_device_index()]
    with torch.random.fork_rng(indices, device_type="cpu" if kind is None else kind.type):
        yield


def device_memory_bytes(device: torch.device) -> int | None:
    """Return the accelerator's peak allocated memory in bytes, or None on the CPU."""
    if device.type == "cpu":
        return None
    return int(torch.get_device_module(device).max_memory_allocated(device))


def memory_room_bytes(device: torch.device) -> int:
    """Return the memory of `device`, in bytes, that was free at peak use, minus a reserve of 3 %.

    Limits by torch's per-process memory fraction, by ``ulimit -d`` and by a container are taken
    into account. On an accelerator, memory that other processes use now is not counted as free.
    """
    if device.type != "cpu":
        accelerator = torch.get_device_module(device)
        free_bytes, total_bytes = accelerator.mem_get_info(device)
        share = getattr(accelerator, "get_per_process_memory_fraction", lambda _: 1.0)(device)
        peak_bytes = int(accelerator.max_memory_reserved(device))
        # The allocator's own memory counts as used, although this process can use it again.
        reserved = getattr(accelerator, "memory_reserved", accelerator.max_memory_reserved)(device)
        usable_bytes = min(share * total_bytes, free_bytes + reserved)
        return int(0.97 * usable_bytes) - peak_bytes
    limited = data_room_bytes()
    if limited is not None:
        return limited
    return int(0.97 * host_memory_bytes()) - peak_resident_bytes()


def device_size_bytes(device: torch.device) -> int:
    """Return the total bytes of memory of `device`; for a CPU, of the host or its container."""
    if device.type == "cpu":
        return host_memory_bytes()
    return int(torch.get_device_module(device).mem_get_info(device)[1])


def parse_dtype(name: str) -> torch.dtype:
    """Return torch's dtype for the name ``fp32``, ``bf16`` or ``fp16``."""
    if name not in _DTYPES:
        raise ConfigError(f"unknown precision: precision={name!r} (supported: {sorted(_DTYPES)}).")
    return _DTYPES[name]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are accumulated: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@contextmanager
def fast_products() -> Iterator[bool]:
    """Context manager that multiplies fp32 matrices with oneDNN where MKL is slower.

    It yields True if oneDNN is used. On CPUs of vendors other than Intel, MKL does not use AVX512;
    oneDNN does, and is twice as fast for all but the smallest products. Torch uses oneDNN if bf16
    is allowed in place of fp32. CPUs without bf16 instructions still compute in fp32, which this
    function verifies first. Only the order of summation differs.
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
    """Return True on a CPU that has AVX512 but on which MKL does not use it."""
    vendor = processor_field("vendor_id")
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return wide and torch.backends.mkl.is_available() and vendor not in ("", "GenuineIntel")


def _keeps_fp32() -> bool:
    """Return True if fp32 matrix products keep digits that bf16 cannot represent."""
    value, size = 1 + 2**-12, 256
    product = torch.full((size, size), value) @ torch.ones(size, size)
    return bool((product == size * value).all())


def _cpu_name() -> str:
    return processor_field("model name") or platform.processor() or platform.machine()
