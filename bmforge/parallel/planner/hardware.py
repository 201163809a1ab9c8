"""The machines of a plan: GPUs by name, with figures given by hand, and their interconnect."""

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
