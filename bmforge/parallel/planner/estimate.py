"""What one way of running a model on given machines comes to: memory by part, time by part."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from bmforge.errors import ConfigError
from bmforge.parallel.layout import Layout
from bmforge.parallel.pipeline.replay import replay
from bmforge.parallel.pipeline.schedules import problems, write_schedule
from bmforge.parallel.planner.hardware import Cluster
from bmforge.parallel.planner.peak import (
    Memory,
    Share,
    count_parameters,
    count_work,
    peak_memory,
)
from bmforge.parallel.planner.step_time import OURS, Engine, Times, Work, step_time
from bmforge.parallel.planner.trace import BLOCKS, Setting, StepTrace, trace_step
from bmforge.parallel.planner.workload import Workload

__all__ = ["Choice", "Estimator", "Request", "Row"]

# ZeRO needs no more shards than this to show what it gathers and when.
_SHARDS_TRACED = 2
# AdamW's fp32 states and master weights, and the gradient on its way: host bytes per parameter.
_HOST_BYTES = 16


@dataclass(frozen=True)
class Request:
    """What is asked.

    Args:
        workload: the model and its rows.
        cluster: the machines.
        batch: rows of a step over all devices.
        precision: fp32, bf16 or fp16.
        offload: may the optimizer's states leave the devices.
        compiled: blocks are compiled.
    """

    workload: Workload
    cluster: Cluster
    batch: int
    precision: str = "bf16"
    offload: bool = True
    compiled: bool = False

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a batch that is none."""
        if self.batch < 1:
            raise ConfigError(f"--batch {self.batch} must be at least 1 row.")


@dataclass(frozen=True)
class Choice:
    """One way to run it.

    Args:
        layout: which axes.
        rows: of a micro-batch.
        recompute: blocks are recomputed in backward.
        offloaded: fraction of the optimizer that is on the host.
    """

    layout: Layout
    rows: int
    recompute: bool = False
    offloaded: float = 0.0


@dataclass(frozen=True)
class Row:
    """What a choice comes to.

    Args:
        choice: the choice.
        memory: at the fullest moment of the fullest process; a lower bound where `traced` is off.
        short_bytes: what is missing on the device; negative where it fits.
        times: of a step.
        tokens_per_s: of all devices together.
        micro_batches: per step.
        host_short_bytes: what is missing in a node's host memory.
        traced: off where parameters and states alone do not fit, so nothing was traced.
    """

    choice: Choice
    memory: Memory
    short_bytes: float
    times: Times
    tokens_per_s: float
    micro_batches: int
    host_short_bytes: float = 0.0
    traced: bool = True

    @property
    def fits(self) -> bool:
        """Whether device and host have room."""
        return self.short_bytes <= 0 and self.host_short_bytes <= 0

    def hours(self, tokens: float) -> float:
        """Return wall-clock hours for so many tokens."""
        return tokens / self.tokens_per_s / 3600


@dataclass
class Estimator:
    """Estimates choices for one request; remembers traces.

    Args:
        request: what is asked.
        exact_shards: trace as many shards as there are, for comparing with real runs.
        engine: whose times, for comparing with published ones.
        traces: made so far; those of another one for the same workload can be given.
    """

    request: Request
    exact_shards: bool = False
    engine: Engine = OURS
    traces: dict[Setting, StepTrace] = field(default_factory=dict)
    _counts: int | None = None

    def estimate(self, choice: Choice) -> Row:
        """Return memory and time of one choice, whether it fits or not.

        Raises:
            ConfigError: the layout does not fit the model, the batch or the number of devices.
        """
        request, layout = self.request, choice.layout
        cluster, workload = request.cluster, request.workload
        layout.check(cluster.count)
        shards, replicas = self.shards(layout)
        count = self._micro_batches(choice, replicas)
        setting = self._setting(choice, shards, count)
        if setting not in self.traces:
            self.traces[setting] = trace_step(workload, setting)
        trace = self.traces[setting]
        ratio = setting.shards / shards if layout.zero else 1.0
        memory = self._memory(trace, choice, count, ratio)
        times = self._times(trace, choice, count, shards)
        local = sum(count_parameters(trace, workload.depth, layout.pp))
        beside = min(cluster.per_node, cluster.count)
        host = _HOST_BYTES * local / shards * choice.offloaded * beside
        return Row(
            choice,
            memory,
            memory.total - cluster.device.memory_bytes,
            times,
            request.batch * workload.row_tokens / times.total,
            count,
            host - cluster.host_memory_gib * 2**30 if choice.offloaded else 0.0,
        )

    def shards(self, layout: Layout) -> tuple[int, int]:
        """Return over how many processes ZeRO shards, and how many work on different rows."""
        rest = self.request.cluster.count // (layout.tp * layout.pp * layout.cp)
        if layout.zero == 0:
            return 1, rest
        return rest // layout.dp_replicate * layout.cp, rest

    def _micro_batches(self, choice: Choice, replicas: int) -> int:
        batch = self.request.batch
        if batch % (replicas * choice.rows):
            raise ConfigError(
                f"--batch {batch} does not divide into {replicas} processes x {choice.rows} rows."
            )
        return batch // (replicas * choice.rows)

    def _setting(self, choice: Choice, shards: int, count: int) -> Setting:
        layout = choice.layout
        size = shards if layout.zero else self.shards(layout)[1] * layout.cp
        if not self.exact_shards:
            size = min(size, _SHARDS_TRACED * layout.cp)
        plain = Layout(
            zero=layout.zero,
            tp=layout.tp,
            cp=layout.cp,
            ep=layout.ep,
            sequence_parallel=layout.sequence_parallel,
            cp_method=layout.cp_method,
        )
        return Setting(
            plain,
            size,
            choice.rows,
            self.request.precision,
            choice.recompute,
            accumulates=count > 1,
            piped=layout.pp > 1,
            copies=self.request.cluster.device.is_host,
        )

    def _memory(self, trace: StepTrace, choice: Choice, count: int, ratio: float) -> Memory:
        """Return what the fullest rank of the pipeline has: the first or the last."""
        layout, depth = choice.layout, self.request.workload.depth
        half = self.request.precision != "fp32"
        usual = Share(
            depth,
            shard_ratio=ratio,
            offloaded=choice.offloaded,
            half=half,
            gradients_leave=not self.request.cluster.device.is_host,
        )
        if layout.pp == 1:
            return peak_memory(trace, usual)
        alive = _in_flight(layout, count)
        first = replace(usual, stages=layout.pp, in_flight=alive[0], last=False)
        last = replace(usual, stages=layout.pp, in_flight=alive[-1], first=False)
        found = [peak_memory(trace, share) for share in (first, last)]
        return max(found, key=lambda memory: memory.total)

    def _times(self, trace: StepTrace, choice: Choice, count: int, shards: int) -> Times:
        layout, workload = choice.layout, self.request.workload
        blocks = workload.depth / layout.pp
        # Stages are balanced: the last has the head, and fewer blocks for it.
        flops, traffic = (w / layout.pp for w in count_work(trace, workload.depth))
        inner, ends = count_parameters(trace, workload.depth, layout.pp)
        width = 4 if self.request.precision == "fp32" else 2
        tokens = choice.rows * workload.row_tokens / layout.cp
        work = Work(
            flops,
            traffic,
            count,
            tokens * workload.hidden_size * width,
            blocks * len([name for name in trace.parameters if name]),
            inner + ends / min(layout.pp, 2),
            shards,
            choice.offloaded,
            width,
        )
        return step_time(
            work,
            self.request.cluster,
            layout,
            self.request.precision,
            recompute=choice.recompute,
            compiled=self.request.compiled,
            stages_per_rank=layout.pp_stages_per_rank or 1,
            engine=self.engine,
        )

    def least_static(self, choice: Choice) -> float:
        """Return bytes of parameters and states alone, without tracing."""
        if self._counts is None:
            self._counts = _count(self.request.workload)
        layout = choice.layout
        shards, _ = self.shards(layout)
        here = self._counts / layout.pp / layout.tp
        kept = 12.0 * (1 - choice.offloaded)
        width = 4 if self.request.precision == "fp32" else 2
        least = here / shards * (kept + width * choice.offloaded)
        if layout.zero != 3 and (shards > 1 or width == 2):
            least += here * width  # gathered from forward to backward
        if layout.pp > 1 and (shards > 1 or width == 2):
            least += here * 4  # whole gradients until the step's end
        return least


def _count(workload: Workload) -> int:
    """Return the numbers in all blocks of all stacks."""
    usual = workload.depth - sum(count for _, count in workload.kinds)
    total = 0
    for build, count in ((workload.build, usual), *workload.kinds):
        model = build(BLOCKS)
        rules: Any = getattr(model, "layout_rules", None)
        for name in rules().stacks if callable(rules) else ():
            block = list(model.get_submodule(name).children())[1]
            total += count * sum(p.numel() for p in block.parameters())
    return total


@lru_cache(maxsize=1024)
def _in_flight(layout: Layout, count: int) -> tuple[float, ...]:
    """Return whole micro-batches alive at once on every rank of the pipeline."""
    name, size, per_rank = layout.pp_schedule, layout.pp, layout.pp_stages_per_rank
    if name == "1f1b":
        return tuple(float(min(size - rank, count)) for rank in range(size))
    fitting = (
        n for n in range(min(count, 2 * size), 8 * size) if not problems(name, size, n, per_rank)
    )
    schedule = write_schedule(name, size, next(fitting), per_rank)
    share = schedule.num_stages // size
    return tuple(peak / share for peak in replay(schedule).peak_micro_batches)
