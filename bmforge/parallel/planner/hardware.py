"""Hardware of a plan: GPUs, by name or by memory and FLOPS, and the network between them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from bmforge.errors import ConfigError, suggest
from bmforge.gpu_specs import DEVICES, FULL_SOURCE, Device

__all__ = [
    "DEVICES",
    "FULL_SOURCE",
    "INTERCONNECTS",
    "Cluster",
    "Device",
    "find_device",
    "parse_interconnect",
]

# Bandwidth per GPU in Gb/s, by the name of the fabric.
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
    """Devices, nodes and network of a run.

    Args:
        device: device model, one device per process.
        count: number of devices.
        per_node: devices per node.
        network_gbit_s: bandwidth between nodes in Gbit/s, per device, one direction.
        host_memory_gib: host memory of a node in GiB.
        host_gb_s: host memory bandwidth of a node in GB/s.
        has_switch: whether a switch connects the devices of a node; if not, point-to-point links
            do, and a smaller group can use only the links between its members.
    """

    device: Device
    count: int
    per_node: int = 8
    network_gbit_s: float = 200.0
    host_memory_gib: float = 1024.0
    host_gb_s: float = 200.0
    has_switch: bool = True

    def __post_init__(self) -> None:
        """Raise `ConfigError` for invalid numbers."""
        for name in ("count", "per_node", "network_gbit_s", "host_memory_gib", "host_gb_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0.")
        if not self.holds(self.count):
            full = self.count // self.per_node * self.per_node
            inside = next(n for n in range(self.per_node, 0, -1) if self.count % n == 0)
            raise ConfigError(
                f"{self.count} devices cannot be grouped into nodes of {self.per_node}. Use "
                f"--gpus {full} or {full + self.per_node}, or --gpus-per-node {inside}."
            )

    def holds(self, count: int) -> bool:
        """Return True if `count` devices fit into one node or fill whole nodes."""
        return count <= self.per_node or count % self.per_node == 0

    def inside_gb_s(self, size: int) -> float:
        """Return the bandwidth in GB/s from each of `size` devices of a node to the others."""
        others = min(size, self.per_node) - 1
        if self.has_switch or not others:
            return self.device.peer_gb_s
        return self.device.peer_gb_s * others / (self.per_node - 1)


def find_device(
    name: str, memory_gib: float | None = None, half_tflops: float | None = None
) -> Device:
    """Return a device by name; memory and FLOPS, if passed, override those of the table.

    A name that is not in the table requires both; all other values are those of the device with the
    nearest FLOPS.

    Raises:
        ConfigError: the name is unknown, and memory or FLOPS are missing; the message suggests the
            nearest name.
    """
    for label, value in (("--gpu-memory", memory_gib), ("--gpu-tflops", half_tflops)):
        if value is not None and value <= 0:
            raise ConfigError(f"{label} {value} must be above 0.")
    key = re.sub(r"^(nvidia|tesla|geforce|rtx|-)+(?=\w)", "", re.sub(r"[_ ]", "-", name.lower()))
    known_device = DEVICES.get(key)
    if known_device is None:
        if memory_gib is None or half_tflops is None:
            raise ConfigError(
                f"unknown GPU: --gpu {name!r} (supported: "
                f"{', '.join(DEVICES)}).{suggest(key, DEVICES)} For another GPU, pass "
                "--gpu-memory GIB and --gpu-tflops N."
            )
        tflops = half_tflops
        near = min(DEVICES.values(), key=lambda device: abs(device.half_tflops - tflops))
        known_device = replace(
            near, name=name, source=f"given by options, the rest as for {near.name}"
        )
    if memory_gib is not None:
        known_device = replace(known_device, memory_gib=memory_gib)
    return known_device if half_tflops is None else replace(known_device, half_tflops=half_tflops)


def parse_interconnect(text: str) -> float:
    """Return the bandwidth per device in Gbit/s, from the name of an interconnect or a number.

    Raises:
        ConfigError: the text is neither a known name nor a number.
    """
    if text in INTERCONNECTS:
        return INTERCONNECTS[text]
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if value <= 0:
        raise ConfigError(
            f"unknown interconnect: --interconnect {text!r} (expected: a number in Gb/s per "
            f"GPU, or one of {', '.join(INTERCONNECTS)})."
        )
    return value
