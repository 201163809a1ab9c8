"""Estimates the step time: matrix products, memory traffic, links, bubbles and offload.

Matrix products run at a measured fraction of the device's peak FLOPS, all other operators at its
memory bandwidth. ZeRO's gathers and reductions overlap with computation as far as possible; the
collectives of tensor parallelism do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bmforge.parallel.layout import Layout
from bmforge.parallel.planner.hardware import Cluster, Device

__all__ = ["OURS", "TrainingEngine", "Times", "StepWork", "compute_time", "step_time"]

# Fraction of the nominal link or memory bandwidth that collectives and kernels reach.
_LINK, _MEMORY = 0.8, 0.8
# Fraction of the operators' reads and writes that reaches memory on an accelerator, where caches
# and fused kernels avoid the rest, and in compiled blocks. Tuned by hand to torchtitan's results
# for 8 GPUs with and without compiling, so these results do not test the planner.
_EAGER, _COMPILED = 0.66, 0.28
# Fraction of forward in a step's compute time, without and with recompute.
_FORWARD, _FORWARD_OF_RECOMPUTED = 1 / 3, 1 / 4
# AdamW reads weight, gradient and two states and writes three of them, in fp32.
_ADAM_BYTES = 28
_GRADIENT_BYTES = 4


@dataclass(frozen=True)
class StepWork:
    """Work of one process in a step.

    Args:
        flops: matrix FLOPs of one micro-batch.
        traffic_bytes: memory traffic of one micro-batch in bytes.
        micro_batches: micro-batches per step.
        block_bytes: bytes of the hidden states of a micro-batch between two blocks.
        blocks: number of blocks of the process.
        parameters: number of the process's parameters before ZeRO sharding.
        shards: number of ZeRO shards.
        offloaded: fraction of the optimizer states that is offloaded.
        width: bytes per element of the compute dtype.
        ranks: total compute time of all pipeline ranks divided by that of this rank; None for
            ranks with equal work.
        trained: trained fraction of the parameters.
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
class TrainingEngine:
    """Properties of a training engine that affect the step time.

    Args:
        collectives: number of tensor-parallel gathers and scatters of hidden states per block
            in forward, backward and recomputation; an all-reduce counts as two.
        reduces_once: whether gradients are reduced only after the last micro-batch.
        gathered_bytes: additional bytes per micro-batch that tensor parallelism all-gathers, such
            as the full logits (0 for bmforge, which keeps logits sharded).
    """

    collectives: tuple[int, int, int] = (4, 4, 4)
    reduces_once: bool = False
    gathered_bytes: float = 0.0


OURS = TrainingEngine()


@dataclass(frozen=True)
class Times:
    """Step time in seconds by category; the categories add up to the total."""

    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """Step time in seconds."""
        return sum(self.parts.values())


def step_time(
    work: StepWork,
    cluster: Cluster,
    layout: Layout,
    precision: str,
    *,
    recompute: bool = False,
    compiled: bool = False,
    stages_per_rank: int = 1,
    engine: TrainingEngine = OURS,
) -> Times:
    """Estimate the time of one optimizer step.

    Args:
        work: work of one process.
        cluster: devices and network.
        layout: degrees of parallelism.
        precision: fp32, bf16 or fp16.
        recompute: whether blocks are recomputed in backward.
        compiled: whether blocks are compiled.
        stages_per_rank: pipeline stages per rank; more stages shorten the bubble.
        engine: training engine whose collectives are counted.
    """
    device, count = cluster.device, work.micro_batches
    products = _product_time(work.flops, device, precision)
    moved = _traffic_time(work.traffic_bytes, device, compiled)
    tensor = _tensor_time(work, cluster, layout, engine, recompute)
    per_batch = products + moved + tensor
    gathers, reduction = _zero_times(work, cluster, layout)
    forward = _FORWARD_OF_RECOMPUTED if recompute else _FORWARD
    piped = layout.pp > 1
    again = gathers if layout.zero == 3 else 0.0
    ahead, behind = per_batch * forward, per_batch * (1 - forward)
    unreduced = max(0.0, gathers - ahead) + max(0.0, again - behind)
    reduced = max(0.0, gathers - ahead) + max(0.0, again + reduction - behind)
    if piped:
        sharding = unreduced * (count if layout.zero == 3 else 1) + reduction
    else:
        first = unreduced if engine.reduces_once else reduced
        sharding = first * (count - 1) + reduced
    ranks = layout.pp if work.ranks is None else work.ranks
    bubble = (ranks - 1) / stages_per_rank * per_batch
    local = work.parameters * work.trained / work.shards
    on_device = local * (1 - work.offloaded) * _ADAM_BYTES / (device.memory_gb_s * 1e9 * _MEMORY)
    times = {
        "products": products * count,
        "memory traffic": moved * count,
        "tensor parallel": tensor * count,
        "sharding": sharding,
        "bubble": bubble + (_stage_link_time(work, cluster, layout) * count if piped else 0.0),
        "optimizer": on_device,
        "offload": max(0.0, _offload_time(work, cluster) - per_batch * count),
    }
    return Times(times)


def compute_time(
    flops: float, traffic_bytes: float, cluster: Cluster, precision: str, compiled: bool
) -> float:
    """Return the seconds spent on matrix products and memory traffic."""
    products = _product_time(flops, cluster.device, precision)
    return products + _traffic_time(traffic_bytes, cluster.device, compiled)


def _product_time(flops: float, device: Device, precision: str) -> float:
    return flops / (device.peak_flops(precision) * device.reached(precision))


def _traffic_time(traffic_bytes: float, device: Device, compiled: bool) -> float:
    share = _COMPILED if compiled else _EAGER
    return traffic_bytes * share / (device.memory_gb_s * 1e9 * _MEMORY)


def _tensor_time(
    work: StepWork, cluster: Cluster, layout: Layout, engine: TrainingEngine, recompute: bool
) -> float:
    """Return the seconds of tensor-parallel collectives, which do not overlap with computation."""
    if layout.tp == 1:
        return 0.0
    forward, backward, again = engine.collectives
    number = forward + backward + (again if recompute else 0)
    size = number * work.blocks * work.block_bytes + engine.gathered_bytes
    return (layout.tp - 1) / layout.tp * size / _bandwidth(cluster, layout.tp)


def _bandwidth(cluster: Cluster, size: int) -> float:
    """Return the ring bandwidth of `size` devices in bytes per second."""
    network = cluster.network_gbit_s / 8 * 1e9
    inside = cluster.inside_gb_s(size) * 1e9
    return _LINK * (inside if size <= cluster.per_node else min(network, inside))


def _zero_times(work: StepWork, cluster: Cluster, layout: Layout) -> tuple[float, float]:
    """Return the seconds to gather all weights once, and to reduce all gradients once."""
    size = work.shards if layout.zero else cluster.count // (layout.tp * layout.pp)
    if size == 1:
        return 0.0, 0.0
    inner = layout.tp
    in_node = max(1, min(size, cluster.per_node // inner))  # ranks of a group in one node
    nodes = -(-size // in_node)
    network = cluster.network_gbit_s / 8 * 1e9 * in_node * _LINK
    inside = cluster.inside_gb_s(in_node) * 1e9 * _LINK
    per_byte = max((size - 1) / size / inside, (nodes - 1) / nodes / network)
    weights = work.parameters * work.width * per_byte
    gradients = work.parameters * work.trained * _GRADIENT_BYTES * per_byte
    if layout.zero == 0:
        return 0.0, 2 * gradients
    return weights, gradients


def _stage_link_time(work: StepWork, cluster: Cluster, layout: Layout) -> float:
    """Return the seconds to send hidden states and gradients between pipeline stages.

    Each tensor-parallel rank sends a slice of them.
    """
    size = layout.tp * work.shards
    bandwidth = _bandwidth(cluster, cluster.per_node + 1 if size * 2 > cluster.per_node else 2)
    return 2 * work.block_bytes / layout.tp / bandwidth


def _offload_time(work: StepWork, cluster: Cluster) -> float:
    """Return the seconds of optimizer offload, whose copies overlap with AdamW."""
    local = work.parameters * work.trained / work.shards * work.offloaded
    out = local * _GRADIENT_BYTES / (cluster.device.host_gb_s * 1e9 * _LINK)
    beside = min(cluster.per_node, cluster.count)
    stepping = local * _ADAM_BYTES / (cluster.host_gb_s * 1e9 / beside)
    return max(out, stepping)
