"""What machines can do: memory, products, bandwidths and links, each figure with its source.

Peaks are dense ones (without sparsity) of the makers' data sheets. `efficiency` is the part of the
peak that matrix products reach in training; it comes from one published row, which is named, or is
taken over from a relative, which is said. Figures by hand go over the table's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from bmforge.errors import ConfigError, suggest

__all__ = [
    "DEVICES",
    "FULL_SOURCE",
    "INTERCONNECTS",
    "Cluster",
    "Device",
    "find_device",
    "parse_interconnect",
]

_GIB = 2**30
FULL_SOURCE = "ModelCenter's benchmark page: transformers in fp32, 11 rows on a V100, 1.11 s"
_FULL = 0.743


@dataclass(frozen=True)
class Device:
    """One accelerator.

    Args:
        name: as `--gpu` takes it.
        memory_gib: what a program finds free when it starts, of the nominal size.
        half_tflops: peak of bf16 or fp16 products.
        full_tflops: peak of fp32 products as torch does them by default.
        memory_gb_s: bandwidth of its memory.
        peer_gb_s: to the others in its node, one direction.
        host_gb_s: to host memory, one direction.
        has_bf16: else half precision is fp16.
        efficiency: part of the peak that products reach in half precision.
        source: of the figures.
        measured: where the efficiency is from.
        is_host: a processor: its collectives make buffers of their own, as gloo's do, and what is
            offloaded goes to disk, but for gradients.
        full_efficiency: part of the peak that fp32 products reach; they have no tensor cores to
            feed, so it is higher.
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
        """Return the part of the peak that products reach."""
        return self.full_efficiency if precision == "fp32" else self.efficiency

    def peak_flops(self, precision: str) -> float:
        """Return the peak in FLOP/s."""
        return 1e12 * (self.full_tflops if precision == "fp32" else self.half_tflops)

    @property
    def memory_bytes(self) -> float:
        """What one process can use: the rest is the driver's context and fragmentation."""
        return _GIB * (self.memory_gib - CONTEXT_GIB) * (1 - FRAGMENTED)


# A context with its kernels, and the buffers of the collectives, on every device.
CONTEXT_GIB = 0.9
# What the caching allocator cannot hand out again at once.
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
        "5090", 31.35, 209.5, 104.8, 1792, 24, 50, True, 0.491,
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
        "b200", 178.3, 2250, 75, 8000, 900, 50, True, 0.714, "NVIDIA DGX B200 data sheet / 8",
        "assumed: as h200",
    ),
)  # fmt: skip
DEVICES: Mapping[str, Device] = {device.name: device for device in _TABLE}

# Per GPU, in Gb/s. The names say the fabric, the number what one GPU gets.
INTERCONNECTS: Mapping[str, float] = {
    "ethernet-10": 10,
    "ethernet-25": 25,
    "ethernet-100": 100,
    "ib-25": 25,
    "ib-50": 50,
    "ib-100": 100,
    "ib-200": 200,
    "ib-400": 400,
    "ib-800": 800,
}


@dataclass(frozen=True)
class Cluster:
    """The machines of a run.

    Args:
        device: of one process.
        count: how many devices.
        per_node: devices that share a node.
        network_gbit_s: between nodes, per device, one direction.
        host_memory_gib: of a node.
        host_gb_s: bandwidth of a node's memory.
        has_switch: devices of a node reach each other through a switch; else over links that lead
            from each to each, of which a group of fewer can use only its own.
    """

    device: Device
    count: int
    per_node: int = 8
    network_gbit_s: float = 200.0
    host_memory_gib: float = 1024.0
    host_gb_s: float = 200.0
    has_switch: bool = True

    def __post_init__(self) -> None:
        """Raise `ConfigError` for numbers that describe no machines."""
        for name in ("count", "per_node", "network_gbit_s", "host_memory_gib", "host_gb_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0.")
        if not self.holds(self.count):
            full = self.count // self.per_node * self.per_node
            inside = next(n for n in range(self.per_node, 0, -1) if self.count % n == 0)
            raise ConfigError(
                f"{self.count} devices do not fill nodes of {self.per_node}. Nearest that work: "
                f"--gpus {full} or {full + self.per_node}, or --gpus-per-node {inside}."
            )

    def holds(self, count: int) -> bool:
        """Whether so many devices fill nodes of this size, or fit into one."""
        return count <= self.per_node or count % self.per_node == 0

    def inside_gb_s(self, size: int) -> float:
        """Return what each of `size` devices of a node can send to the others of them."""
        others = min(size, self.per_node) - 1
        if self.has_switch or not others:
            return self.device.peer_gb_s
        return self.device.peer_gb_s * others / (self.per_node - 1)


def find_device(
    name: str, memory_gib: float | None = None, half_tflops: float | None = None
) -> Device:
    """Return a device by name, with figures given by hand over the table's.

    A name that is not in the table is described by hand with both figures; what else is needed is
    taken from the device of the table that is nearest in products.

    Raises:
        ConfigError: an unknown name without both figures; the nearest match is named.
    """
    for label, value in (("--gpu-memory", memory_gib), ("--gpu-tflops", half_tflops)):
        if value is not None and value <= 0:
            raise ConfigError(f"{label} {value} must be above 0.")
    key = re.sub(r"^(nvidia|tesla|geforce|rtx|-)+(?=\w)", "", re.sub(r"[_ ]", "-", name.lower()))
    found = DEVICES.get(key)
    if found is None:
        if memory_gib is None or half_tflops is None:
            raise ConfigError(
                f"--gpu {name!r} is not known.{suggest(key, DEVICES)} Known: "
                f"{', '.join(DEVICES)}. Any other: give --gpu-memory GIB and --gpu-tflops N."
            )
        wanted = half_tflops
        near = min(DEVICES.values(), key=lambda device: abs(device.half_tflops - wanted))
        found = replace(near, name=name, source=f"by hand, the rest as {near.name}")
    if memory_gib is not None:
        found = replace(found, memory_gib=memory_gib)
    return found if half_tflops is None else replace(found, half_tflops=half_tflops)


def parse_interconnect(text: str) -> float:
    """Return Gb/s per device of a name of the table, or of a number.

    Raises:
        ConfigError: neither.
    """
    if text in INTERCONNECTS:
        return INTERCONNECTS[text]
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if value <= 0:
        raise ConfigError(
            f"--interconnect {text!r} is neither a number of Gb/s per GPU nor one of "
            f"{', '.join(INTERCONNECTS)}."
        )
    return value
