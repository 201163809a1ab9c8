"""How long a step takes: products, memory traffic, links, the pipeline's bubble, offloading.

Products run at the device's measured part of its peak, everything else at the speed of its memory.
ZeRO's gathers and reductions hide behind computing as far as they can; tensor parallelism's do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bmforge.parallel.layout import Layout
from bmforge.parallel.planner.hardware import Cluster, Device

__all__ = ["OURS", "Engine", "Times", "Work", "compute_time", "step_time"]

# What of a link's or a memory's nominal bandwidth collectives and kernels get.
_LINK, _MEMORY = 0.8, 0.8
# What is left of the operators' reads and writes on an accelerator, whose caches and fused kernels
# spare some, and in compiled blocks. Set by hand between torchtitan's rows for 8 GPUs with and
# without compiling, which are therefore no test of the planner.
_EAGER, _COMPILED = 0.66, 0.28
# Share of forward in a step's computing, without and with recompute.
_FORWARD, _FORWARD_OF_RECOMPUTED = 1 / 3, 1 / 4
# AdamW reads weight, gradient and two states and writes three of them, in fp32.
_ADAM_BYTES = 28
_GRADIENT_BYTES = 4


@dataclass(frozen=True)
class Work:
    """What one process does in a step.

    Args:
        flops, traffic_bytes: of one micro-batch through its blocks and ends.
        micro_batches: per step.
        block_bytes: hidden states of a micro-batch between two blocks.
        blocks: how many it runs.
        parameters: numbers it computes with, before ZeRO shards them.
        shards: over how many processes ZeRO shards.
        offloaded: fraction of the optimizer that is off the device.
        width: bytes of a number in computing.
        ranks: what all ranks of the pipeline compute, over what this one does; None is as many as
            there are, all of them doing as much.
        trained: part of the parameters that is trained.
    """

    flops: float
    traffic_bytes: float
    micro_batches: int
    block_bytes: float
    blocks: float
    parameters: float
    shards: int
    offloaded: float = 0.0
    width: int = 2
    ranks: float | None = None
    trained: float = 1.0


@dataclass(frozen=True)
class Engine:
    """What an engine does its own way; for comparing with figures of others than ours.

    Args:
        collectives: gathers and scatters of hidden states that tensor parallelism makes per block
            in forward, in backward and in recomputing; a sum of them counts as two.
        reduces_once: gradients are reduced with the last micro-batch only.
        gathered_bytes: of a micro-batch that tensor parallelism gathers beside these, as whole
            logits; ours are never whole.
    """

    collectives: tuple[int, int, int] = (4, 4, 4)
    reduces_once: bool = False
    gathered_bytes: float = 0.0


OURS = Engine()


@dataclass(frozen=True)
class Times:
    """Seconds of a step by what they are spent on; they add up to the step."""

    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """The step."""
        return sum(self.parts.values())


def step_time(
    work: Work,
    cluster: Cluster,
    layout: Layout,
    precision: str,
    *,
    recompute: bool = False,
    compiled: bool = False,
    stages_per_rank: int = 1,
    engine: Engine = OURS,
) -> Times:
    """Return the time of one optimizer step."""
    device, count = cluster.device, work.micro_batches
    products = _product_time(work.flops, device, precision)
    moved = _traffic_time(work.traffic_bytes, device, compiled)
    tensor = _tensor_time(work, cluster, layout, engine, recompute)
    one = products + moved + tensor
    gathers, reduction = _zero_times(work, cluster, layout)
    forward = _FORWARD_OF_RECOMPUTED if recompute else _FORWARD
    piped = layout.pp > 1
    again = gathers if layout.zero == 3 else 0.0
    ahead, behind = one * forward, one * (1 - forward)
    unreduced = max(0.0, gathers - ahead) + max(0.0, again - behind)
    reduced = max(0.0, gathers - ahead) + max(0.0, again + reduction - behind)
    if piped:
        sharding = unreduced * (count if layout.zero == 3 else 1) + reduction
    else:
        first = unreduced if engine.reduces_once else reduced
        sharding = first * (count - 1) + reduced
    ranks = layout.pp if work.ranks is None else work.ranks
    bubble = (ranks - 1) / stages_per_rank * one
    local = work.parameters * work.trained / work.shards
    on_device = local * (1 - work.offloaded) * _ADAM_BYTES / (device.memory_gb_s * 1e9 * _MEMORY)
    times = {
        "products": products * count,
        "memory traffic": moved * count,
        "tensor parallel": tensor * count,
        "sharding": sharding,
        "bubble": bubble + (_stage_link_time(work, cluster, layout) * count if piped else 0.0),
        "optimizer": on_device,
        "offload": max(0.0, _offload_time(work, cluster) - one * count),
    }
    return Times(times)


def compute_time(
    flops: float, traffic_bytes: float, cluster: Cluster, precision: str, compiled: bool
) -> float:
    """Return the time of products and memory traffic."""
    products = _product_time(flops, cluster.device, precision)
    return products + _traffic_time(traffic_bytes, cluster.device, compiled)


def _product_time(flops: float, device: Device, precision: str) -> float:
    return flops / (device.peak_flops(precision) * device.reached(precision))


def _traffic_time(traffic_bytes: float, device: Device, compiled: bool) -> float:
    share = _COMPILED if compiled else _EAGER
    return traffic_bytes * share / (device.memory_gb_s * 1e9 * _MEMORY)


def _tensor_time(
    work: Work, cluster: Cluster, layout: Layout, engine: Engine, recompute: bool
) -> float:
    """Nothing is computed while hidden states are gathered and scattered."""
    if layout.tp == 1:
        return 0.0
    forward, backward, again = engine.collectives
    number = forward + backward + (again if recompute else 0)
    size = number * work.blocks * work.block_bytes + engine.gathered_bytes
    return (layout.tp - 1) / layout.tp * size / _bandwidth(cluster, layout.tp)


def _bandwidth(cluster: Cluster, size: int) -> float:
    """Bytes per second of a ring of neighbours."""
    network = cluster.network_gbit_s / 8 * 1e9
    inside = cluster.inside_gb_s(size) * 1e9
    return _LINK * (inside if size <= cluster.per_node else min(network, inside))


def _zero_times(work: Work, cluster: Cluster, layout: Layout) -> tuple[float, float]:
    """Return the time of gathering all weights once, and of reducing all gradients once."""
    size = work.shards if layout.zero else cluster.count // (layout.tp * layout.pp)
    if size == 1:
        return 0.0, 0.0
    inner = layout.tp
    here = max(1, min(size, cluster.per_node // inner))  # of a group, in one node
    nodes = -(-size // here)
    network = cluster.network_gbit_s / 8 * 1e9 * here * _LINK
    inside = cluster.inside_gb_s(here) * 1e9 * _LINK
    per_byte = max((size - 1) / size / inside, (nodes - 1) / nodes / network)
    weights = work.parameters * work.width * per_byte
    gradients = work.parameters * work.trained * _GRADIENT_BYTES * per_byte
    if layout.zero == 0:
        return 0.0, 2 * gradients
    return weights, gradients


def _stage_link_time(work: Work, cluster: Cluster, layout: Layout) -> float:
    """Hidden states to the next stage and gradients back; each tensor process sends its part."""
    size = layout.tp * work.shards
    bandwidth = _bandwidth(cluster, cluster.per_node + 1 if size * 2 > cluster.per_node else 2)
    return 2 * work.block_bytes / layout.tp / bandwidth


def _offload_time(work: Work, cluster: Cluster) -> float:
    """Gradients out, weights in, and AdamW on the host, each beside the others."""
    local = work.parameters * work.trained / work.shards * work.offloaded
    out = local * _GRADIENT_BYTES / (cluster.device.host_gb_s * 1e9 * _LINK)
    beside = min(cluster.per_node, cluster.count)
    stepping = local * _ADAM_BYTES / (cluster.host_gb_s * 1e9 / beside)
    return max(out, stepping)
