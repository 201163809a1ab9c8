"""Table of GPUs with their memory, peak throughput and links, for the planner and the MFU.

Peaks are the dense ones (without sparsity) in the vendors' data sheets. `efficiency` is the
fraction of the peak that matrix products reach in training. It was measured on a few GPUs, and the
other GPUs use the value of a similar GPU; `measured` names that GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

__all__ = ["DEVICES", "FULL_SOURCE", "Device", "find_devices_by_name", "peak_flops_by_name"]

_GIB = 2**30
FULL_SOURCE = "ModelCenter's benchmark page: transformers in fp32, 11 rows on a V100, 1.11 s"
_FULL = 0.743


@dataclass(frozen=True)
class Device:
    """Memory, speed and links of one kind of accelerator.

    Args:
        name: name to select it with `--gpu`.
        memory_gib: memory that is free when a program starts; a little less than the nominal size.
        half_tflops: peak of bf16 or fp16 products.
        full_tflops: peak of fp32 products with torch's default settings.
        memory_gb_s: bandwidth of the device's memory.
        peer_gb_s: bandwidth to other devices of the node, in one direction.
        host_gb_s: bandwidth to host memory, in one direction.
        has_bf16: whether half precision is bf16; otherwise it is fp16.
        efficiency: fraction of the half-precision peak that matrix products reach in training.
        source: source of the figures.
        measured: source of the efficiency.
        is_host: whether the device is a CPU; gloo collectives then allocate buffers, and everything
            that is offloaded, except gradients, goes to disk.
        full_efficiency: fraction of the fp32 peak that matrix products reach; it is higher
            because fp32 does not use tensor cores.
    """

    name: str
    memory_gib: float
    half_tflops: float
    full_tflops: float
    memory_gb_s: float
    peer_gb_s: float
    host_gb_s: float
    has_bf16: bool
    efficiency: float
    source: str
    measured: str
    is_host: bool = False
    full_efficiency: float = _FULL

    def reached(self, precision: str) -> float:
        """Return the fraction of the peak FLOP/s that matrix products reach in this precision."""
        return self.full_efficiency if precision == "fp32" else self.efficiency

    def peak_flops(self, precision: str) -> float:
        """Return the peak of matrix products in this precision, in FLOP/s."""
        return 1e12 * (self.full_tflops if precision == "fp32" else self.half_tflops)

    @property
    def memory_bytes(self) -> float:
        """Bytes that a process can use: the memory minus the driver's context and fragmentation."""
        return _GIB * (self.memory_gib - CONTEXT_GIB) * (1 - FRAGMENTED)


# A context with its kernels, and the buffers of the collectives, on every device.
CONTEXT_GIB = 0.9
# Fraction of the memory that the caching allocator cannot reuse because of fragmentation.
FRAGMENTED = 0.02
_BMTRAIN = "BMTrain README, 13B on 32 V100, batch 16: 26.94 samples/s"
_MEGATRON = "Megatron-LM (2104.04473) table 1, 7.5B on 128 GPUs: 142 TFLOP/s"
_KEMPNER = "KempnerForge mfu_scaling 2026-04-05, 7B on one H200: 10,471 tokens/s"
_TITAN = "torchtitan 2024-12, Llama 3.1 8B, 8 GPUs, FSDP + compile: 6,667 tokens/s per GPU"
_OLMO = "OLMo-core README, Llama-3 8B, H100, 4,096 tokens: 9,500 tokens/s per GPU"

_AS_A100 = "assumed: as a100-80gb"

_TABLE = (
    Device(
        "t4", 14.56, 65, 8.1, 320, 6, 12, False, 0.332, "NVIDIA T4 data sheet; peers over PCIe 3",
        "assumed: as v100-32gb",
    ),
    Device(
        "v100-16gb", 15.77, 125, 15.7, 900, 150, 12, False, 0.332, "NVIDIA V100 data sheet (SXM2)",
        f"as v100-32gb: {_BMTRAIN}",
    ),
    Device(
        "v100-32gb", 31.74, 125, 15.7, 900, 150, 12, False, 0.332, "NVIDIA V100 data sheet (SXM2)",
        _BMTRAIN,
    ),
    Device(
        "2080ti", 10.75, 53.8, 13.4, 616, 6, 12, False, 0.332,
        "NVIDIA Turing white paper (fp16 with fp32 accumulation); peers over PCIe 3",
        "assumed: as v100-32gb",
    ),
    Device(
        "3090", 23.69, 71, 35.6, 936, 12, 24, True, 0.491,
        "NVIDIA GA102 white paper (fp16 with fp32 accumulation); peers over PCIe 4",
        _AS_A100,
    ),
    Device(
        "4090", 23.65, 165.2, 82.6, 1008, 12, 24, True, 0.491,
        "NVIDIA Ada white paper (fp16 with fp32 accumulation); peers over PCIe 4",
        _AS_A100,
    ),
    Device(
        "4090-laptop", 15.7, 79.4, 39.7, 576, 12, 24, True, 0.491,
        "4090 x 9,728 / 16,384 cores x 2,040 / 2,520 MHz at the highest power limit", _AS_A100,
    ),
    Device(
        "5090", 31.35, 209.5, 104.8, 1792, 24, 50, True, 0.491,
        "NVIDIA RTX Blackwell white paper (fp16 with fp32 accumulation); peers over PCIe 5",
        _AS_A100,
    ),
    Device(
        "5080", 15.45, 112.6, 56.3, 960, 24, 50, True, 0.491,
        "NVIDIA RTX Blackwell white paper (fp16 with fp32 accumulation); peers over PCIe 5",
        _AS_A100,
    ),
    Device(
        "5070ti", 15.45, 87.9, 43.9, 896, 24, 50, True, 0.491,
        "NVIDIA RTX Blackwell white paper (fp16 with fp32 accumulation); peers over PCIe 5",
        _AS_A100,
    ),
    Device(
        "5070", 11.5, 61.7, 30.9, 672, 24, 50, True, 0.491,
        "NVIDIA RTX Blackwell white paper (fp16 with fp32 accumulation); peers over PCIe 5",
        _AS_A100,
    ),
    Device(
        "a10", 22.06, 125, 31.2, 600, 12, 24, True, 0.491,
        "NVIDIA A10 data sheet; peers over PCIe 4", _AS_A100,
    ),
    Device(
        "l4", 22.03, 121, 30.3, 300, 12, 24, True, 0.491,
        "NVIDIA L4 data sheet, half of its figures with sparsity; peers over PCIe 4", _AS_A100,
    ),
    Device(
        "a40", 44.4, 149.7, 37.4, 696, 12, 24, True, 0.491,
        "NVIDIA A40 data sheet; peers over PCIe 4", _AS_A100,
    ),
    Device(
        "a6000", 47.4, 154.8, 38.7, 768, 12, 24, True, 0.491,
        "NVIDIA RTX A6000 data sheet, half of its figure with sparsity; peers over PCIe 4",
        _AS_A100,
    ),
    Device(
        "6000-ada", 47.4, 364.2, 91.1, 960, 12, 24, True, 0.491,
        "NVIDIA RTX 6000 Ada data sheet, a quarter of its fp8 figure with sparsity; peers over "
        "PCIe 4", _AS_A100,
    ),
    Device(
        "l40", 44.4, 181, 90.5, 864, 12, 24, True, 0.491,
        "NVIDIA L40 data sheet; peers over PCIe 4", _AS_A100,
    ),
    Device(
        "l40s", 44.4, 362, 91.6, 864, 12, 24, True, 0.491,
        "NVIDIA L40S data sheet; peers over PCIe 4", _AS_A100,
    ),
    Device(
        "a800-80gb", 79.25, 312, 19.5, 2039, 200, 24, True, 0.491,
        "NVIDIA A800 data sheet: an A100 with links of 400 GB/s both ways", _AS_A100,
    ),
    Device(
        "a100-40gb", 39.56, 312, 19.5, 1555, 300, 24, True, 0.491, "NVIDIA A100 data sheet (SXM4)",
        f"as a100-80gb: {_MEGATRON}",
    ),
    Device(
        "a100-80gb", 79.25, 312, 19.5, 2039, 300, 24, True, 0.491, "NVIDIA A100 data sheet (SXM4)",
        _MEGATRON,
    ),
    Device(
        "h100-80gb", 79.18, 989, 67, 3350, 450, 50, True, 0.535, "NVIDIA H100 data sheet (SXM5)",
        _OLMO,
    ),
    Device(
        "h100-96gb-500w", 94.99, 989, 67, 2400, 450, 50, True, 0.405,
        "torchtitan benchmarks/llama3_h100_202412 (HBM2e, 500 W); peak of the SXM5", _TITAN,
    ),
    Device(
        "h100-pcie", 79.18, 756, 51, 2000, 24, 50, True, 0.535,
        "NVIDIA H100 data sheet (PCIe); peers over PCIe 5", "assumed: as h100-80gb",
    ),
    Device(
        "h100-nvl", 93.1, 835, 60, 3938, 300, 50, True, 0.535,
        "NVIDIA H100 data sheet (NVL), half of its figure with sparsity", "assumed: as h100-80gb",
    ),
    Device(
        "h800", 79.18, 989, 67, 3350, 200, 50, True, 0.535,
        "an H100 (SXM5) with links of 400 GB/s both ways", "assumed: as h100-80gb",
    ),
    Device(
        "h20", 95.1, 148, 44, 4000, 450, 50, True, 0.535,
        "figures of NVIDIA's H20 as its sellers publish them", "assumed: as h100-80gb",
    ),
    Device(
        "h200", 139.8, 989, 67, 4800, 450, 50, True, 0.714, "NVIDIA H200 data sheet (SXM5)",
        _KEMPNER,
    ),
    Device(
        "mi300x", 191, 1307, 163, 5300, 448, 50, True, 0.535,
        "AMD Instinct MI300X data sheet", "assumed: as h100-80gb",
    ),
    Device(
        "mi325x", 255, 1307, 163, 6000, 448, 50, True, 0.535,
        "AMD Instinct MI325X data sheet", "assumed: as h100-80gb",
    ),
    Device(
        "mi210", 63.9, 181, 45.3, 1638, 150, 24, True, 0.491,
        "AMD Instinct MI210 data sheet (fp32: matrix cores)", _AS_A100,
    ),
    Device(
        "mi250x", 63.9, 191.5, 47.9, 1638, 150, 24, True, 0.491,
        "AMD Instinct MI250X data sheet, one of its two dies, each a device (fp32: matrix cores)",
        _AS_A100,
    ),
    Device(
        "b200", 178.3, 2250, 75, 8000, 900, 50, True, 0.714, "NVIDIA DGX B200 data sheet / 8",
        "assumed: as h200",
    ),
)  # fmt: skip
DEVICES: Mapping[str, Device] = {device.name: device for device in _TABLE}

# Pattern of the name that the driver reports -> table entries, of which the one with the device's
# memory size applies. The first match counts, so a variant comes before the plain name.
_PATTERNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"4090 laptop", ("4090-laptop",)),
    (r"laptop|max-q|mobile|4090 d\b|5090 d\b", ()),  # slower variants without published peaks
    (r"h100.*pcie", ("h100-pcie",)),
    (r"h100.*nvl", ("h100-nvl",)),
    (r"h200.*nvl|gh200|gb200", ()),
    (r"h100", ("h100-80gb", "h100-96gb-500w")),
    (r"h800.*pcie", ("h100-pcie",)),
    (r"a100", ("a100-40gb", "a100-80gb")),
    (r"a800", ("a800-80gb",)),
    (r"v100", ("v100-16gb", "v100-32gb")),
    (r"2080 ti", ("2080ti",)),
    (r"5070 ti", ("5070ti",)),
    (r"6000 ada", ("6000-ada",)),
    (r"3090 ti", ()),
    *((rf"\b{name}\b", (name,)) for name in (
        "t4", "3090", "4090", "5090", "a10", "l4", "a40", "a6000", "l40", "l40s", "h800", "h20",
        "h200", "b200", "5080", "5070", "mi300x", "mi325x", "mi210", "mi250x",
    )),
)  # fmt: skip
# Fraction of a GPU's multiprocessors in one compute slice of a MIG instance.
_MIG_SLICE = {"a100": 14 / 108, "a800": 14 / 108, "h100": 16 / 132, "h200": 16 / 132}


def find_devices_by_name(name: str) -> tuple[Device, ...]:
    """Return the table entries for a device name from the driver; () for an unknown GPU.

    If there are several entries, they differ only in memory. The entry for a MIG instance has the
    peak throughput of its compute slices.

    Args:
        name: name of the device, such as "NVIDIA H100 80GB HBM3 MIG 1g.10gb".
    """
    lowered = name.lower()
    keys = next((keys for pattern, keys in _PATTERNS if re.search(pattern, lowered)), ())
    instance = re.search(r"\bmig (\d)g", lowered)
    if instance is None:
        return tuple(DEVICES[key] for key in keys)
    kind = next((kind for kind in _MIG_SLICE if kind in lowered), None)
    if kind is None:
        return ()
    share = min(1.0, int(instance[1]) * _MIG_SLICE[kind])
    return tuple(
        replace(
            DEVICES[key],
            half_tflops=share * DEVICES[key].half_tflops,
            full_tflops=share * DEVICES[key].full_tflops,
        )
        for key in keys
    )


def peak_flops_by_name(name: str, precision: str = "bf16") -> float | None:
    """Return a GPU's dense peak in FLOP/s, given its name from the driver; None if unknown."""
    devices = find_devices_by_name(name)
    return devices[0].peak_flops(precision) if devices else None
