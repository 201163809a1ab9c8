"""Estimates memory and step time of a training configuration on given machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from torch import nn

from bmforge.errors import ConfigError
from bmforge.parallel.layout import Layout
from bmforge.parallel.pipeline.replay import replay
from bmforge.parallel.pipeline.schedules import schedule_problems, write_schedule
from bmforge.parallel.planner.fake_op_cache import FakeOpCache
from bmforge.parallel.planner.hardware import Cluster
from bmforge.parallel.planner.peak import (
    Memory,
    Share,
    count_parameters,
    count_work,
    peak_memory,
)
from bmforge.parallel.planner.ranks import Rank, cut_ranks
from bmforge.parallel.planner.step_time import (
    OURS,
    StepWork,
    Times,
    TrainingEngine,
    compute_time,
    step_time,
)
from bmforge.parallel.planner.trace import BLOCKS, Setting, StepTrace, trace_step
from bmforge.parallel.planner.trace_cache import TraceStore
from bmforge.parallel.planner.workload import Resident, Workload

__all__ = ["TrainingSetup", "Estimator", "PlanRequest", "PlanRow"]

# This many shards suffice to show the gathers of ZeRO and their order.
_SHARDS_TRACED = 2
# AdamW's fp32 states, master weights and the transferred gradient: host bytes per parameter.
_HOST_BYTES = 16


@dataclass(frozen=True)
class PlanRequest:
    """Model, machines and constraints of a plan.

    Args:
        workload: model and its batches.
        cluster: machines of the run.
        batch: global batch size in sequences.
        precision: fp32, bf16 or fp16.
        offload: allow offloading optimizer states to the host.
        compiled: whether blocks are compiled.
        residents: frozen models and buffers in memory in addition to the trained model.
    """

    workload: Workload
    cluster: Cluster
    batch: int
    precision: str = "bf16"
    offload: bool = True
    compiled: bool = False
    residents: tuple[Resident, ...] = ()

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a batch size below 1."""
        if self.batch < 1:
            raise ConfigError(f"--batch {self.batch} must be at least 1.")


@dataclass(frozen=True)
class TrainingSetup:
    """One training configuration.

    Args:
        layout: degrees of parallelism.
        rows: number of sequences in a micro-batch.
        recompute: whether blocks are recomputed in backward.
        offloaded: fraction of the optimizer states that is offloaded to the host.
    """

    layout: Layout
    rows: int
    recompute: bool = False
    offloaded: float = 0.0


@dataclass(frozen=True)
class PlanRow:
    """Estimate of a configuration.

    Args:
        choice: configuration.
        memory: peak memory of the process with the highest peak; a lower bound if `traced` is
            False.
        short_bytes: missing device memory in bytes; negative if the configuration fits.
        times: step time by category.
        tokens_per_s: tokens per second of all devices together.
        micro_batches: micro-batches per step.
        host_short_bytes: missing host memory of a node in bytes.
        traced: False if the parameters and optimizer states already do not fit, in which case
            nothing is traced.
    """

    choice: TrainingSetup
    memory: Memory
    short_bytes: float
    times: Times
    tokens_per_s: float
    micro_batches: int
    host_short_bytes: float = 0.0
    traced: bool = True

    @property
    def fits(self) -> bool:
        """True if device and host memory suffice."""
        return self.short_bytes <= 0 and self.host_short_bytes <= 0

    def hours(self, tokens: float) -> float:
        """Return the wall-clock hours of training on a number of tokens."""
        return tokens / self.tokens_per_s / 3600


@dataclass
class Estimator:
    """Estimates the configurations of one request and caches their traces.

    Args:
        request: model, machines and constraints.
        exact_shards: trace with the real number of shards, for comparison with measured runs.
        engine: engine whose times are estimated, for comparison with published results.
        traces: existing traces of the same workload, for example from another estimator.
        store: trace cache on disk; if None, traces are not cached on disk.
    """

    request: PlanRequest
    exact_shards: bool = False
    engine: TrainingEngine = OURS
    traces: dict[Setting, StepTrace] = field(default_factory=dict)
    store: TraceStore | None = None
    _outcomes: FakeOpCache = field(default_factory=FakeOpCache)
    _counts: tuple[float, float] | None = None
    _model: nn.Module | None = None
    _ranks: dict[Layout, tuple[Rank, ...]] = field(default_factory=dict)

    def estimate(self, choice: TrainingSetup) -> PlanRow:
        """Return memory and step time of one configuration, even if it does not fit.

        Raises:
            ConfigError: the layout does not fit the model, the batch or the number of devices.
        """
        request, layout = self.request, choice.layout
        cluster, workload = request.cluster, request.workload
        layout.check(cluster.count)
        shards, replicas = self.shards(layout)
        count = self._micro_batches(choice, replicas)
        ranks = self._cut(layout)
        setting = self._setting(choice, shards, count)
        trace = self._trace(setting)
        # The trace has a few shards only, so the sizes of shards are scaled to those of the run.
        ratio = setting.shards / shards if layout.zero else 1.0
        memory = self._memory(trace, choice, count, ratio, ranks)
        unused = memory.parts["gradients"] + memory.parts["activations"]  # free between steps
        memory = Memory({**memory.parts, **self._residents(layout, shards, unused)})
        times, trained = self._times(trace, choice, count, shards, ranks)
        beside = min(cluster.per_node, cluster.count)
        # The processes of a node share its host memory.
        host = _HOST_BYTES * trained / shards * choice.offloaded * beside
        host += beside * self._offloaded_bytes(layout, shards)
        return PlanRow(
            choice,
            memory,
            memory.total - cluster.device.memory_bytes,
            times,
            request.batch * workload.row_tokens / times.total,
            count,
            host - cluster.host_memory_gib * 2**30 if host else 0.0,
        )

    def _trace(self, setting: Setting) -> StepTrace:
        if setting not in self.traces:
            workload = self.request.workload
            trace = None if self.store is None else self.store.read(workload, setting)
            if trace is None:
                trace = trace_step(workload, setting, self._outcomes)
                if self.store is not None:
                    self.store.write(workload, setting, trace)
            self.traces[setting] = trace
        return self.traces[setting]

    def _residents(self, layout: Layout, shards: int, unused: float) -> dict[str, float]:
        """Return the bytes that every frozen model and buffer adds to a process's peak memory.

        Args:
            layout: layout of the run.
            shards: number of shards of the trained model.
            unused: bytes of gradients and activations in the peak. They are free between steps,
                when offloaded models are on the device.
        """
        parts = shards * layout.tp * layout.pp
        return {
            resident.name: max(0.0, resident.bytes_per_process(parts) - unused)
            if resident.is_offloaded
            else resident.bytes_per_process(parts)
            for resident in self.request.residents
        }

    def _offloaded_bytes(self, layout: Layout, shards: int) -> float:
        """Return the host memory of a process for offloaded frozen models."""
        parts = shards * layout.tp * layout.pp
        offloaded = (each for each in self.request.residents if each.is_offloaded)
        return sum(each.bytes_per_process(parts) for each in offloaded)

    def _cut(self, layout: Layout) -> tuple[Rank, ...]:
        """Return the blocks and other modules of each pipeline rank."""
        if self._model is None:
            self._model = self.request.workload.whole()
        # Only these options change the stages, so all other layouts share the result.
        alike = Layout(
            zero=0,
            pp=layout.pp,
            pp_schedule=layout.pp_schedule,
            pp_stages_per_rank=layout.pp_stages_per_rank,
            pp_cut=layout.pp_cut,
            pp_balance=layout.pp_balance,
        )
        if alike not in self._ranks:
            self._ranks[alike] = cut_ranks(self._model, alike, self.request.workload.order)
        return self._ranks[alike]

    def shards(self, layout: Layout) -> tuple[int, int]:
        """Return the number of ZeRO shards and the number of data-parallel processes."""
        processes = self.request.cluster.count // (layout.tp * layout.pp * layout.cp)
        if layout.zero == 0:
            return 1, processes
        return processes // layout.dp_replicate * layout.cp, processes

    def _micro_batches(self, choice: TrainingSetup, replicas: int) -> int:
        batch = self.request.batch
        if batch % (replicas * choice.rows):
            raise ConfigError(
                f"a batch of {batch} sequences does not divide into {replicas} data-parallel "
                f"processes with micro-batches of {choice.rows} sequences. Use a multiple of "
                f"{replicas * choice.rows} sequences."
            )
        return batch // (replicas * choice.rows)

    def _setting(self, choice: TrainingSetup, shards: int, count: int) -> Setting:
        layout = choice.layout
        size = shards if layout.zero else self.shards(layout)[1] * layout.cp
        if not self.exact_shards:
            size = min(size, _SHARDS_TRACED * layout.cp)
        # Without the options that do not change a process's trace, so that more layouts share a
        # trace.
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

    def _memory(
        self,
        trace: StepTrace,
        choice: TrainingSetup,
        count: int,
        ratio: float,
        ranks: Sequence[Rank],
    ) -> Memory:
        """Return the memory of the pipeline rank with the highest peak."""
        shares: dict[Any, Share] = {}
        alive = _in_flight(choice.layout, count) if len(ranks) > 1 else (1.0,)
        # Among equal ranks, the one with most micro-batches in flight needs most memory.
        for rank, number in sorted(zip(ranks, alive, strict=True), key=lambda pair: pair[1]):
            shares[rank.first, rank.last, str(rank.counts)] = Share(
                rank.counts,
                number,
                rank.first,
                rank.last,
                ratio,
                choice.offloaded,
                half=self.request.precision != "fp32",
                gradients_leave=not self.request.cluster.device.is_host,
            )
        peaks = [peak_memory(trace, share) for share in shares.values()]
        return max(peaks, key=lambda memory: memory.total)

    def _times(
        self,
        trace: StepTrace,
        choice: TrainingSetup,
        count: int,
        shards: int,
        ranks: Sequence[Rank],
    ) -> tuple[Times, float]:
        """Return the slowest rank's times, and the largest trained parameter count of any rank."""
        layout, request = choice.layout, self.request
        work = [count_work(trace, rank.counts, rank.last) for rank in ranks]
        seconds = [
            compute_time(*each, request.cluster, request.precision, request.compiled)
            for each in work
        ]
        slowest = seconds.index(max(seconds))
        numbers, trained = zip(
            *(count_parameters(trace, rank.counts, rank.first + rank.last) for rank in ranks),
            strict=True,
        )
        width = 4 if request.precision == "fp32" else 2
        tokens = choice.rows * request.workload.row_tokens / layout.cp
        work_of_slowest = StepWork(
            *work[slowest],
            count,
            tokens * request.workload.hidden_size * width,
            ranks[slowest].blocks,
            max(numbers),
            shards,
            choice.offloaded,
            width,
            ranks=sum(seconds) / seconds[slowest],
            trained=max(trained) / max(numbers),
        )
        times = step_time(
            work_of_slowest,
            request.cluster,
            layout,
            request.precision,
            recompute=choice.recompute,
            compiled=request.compiled,
            stages_per_rank=layout.pp_stages_per_rank or 1,
            engine=self.engine,
        )
        return times, max(trained)

    def least_static(self, choice: TrainingSetup) -> float:
        """Return the bytes of the parameters and optimizer states; this needs no trace."""
        if self._counts is None:
            self._counts = _count(self.request.workload)
        layout = choice.layout
        shards, _ = self.shards(layout)
        total, trained = (count / layout.pp / layout.tp for count in self._counts)
        width = 4 if self.request.precision == "fp32" else 2
        # Frozen weights may be stored in the compute dtype, or quantized to as little as 4 bits.
        least = (total - trained) * 0.5 + trained * 12 - trained * 8 * choice.offloaded
        least = (least - trained * (4 - width) * choice.offloaded) / shards
        if layout.zero != 3 and (shards > 1 or width == 2):
            least += trained * width  # gathered from forward to backward
        if layout.pp > 1 and (shards > 1 or width == 2):
            least += trained * 4  # unsharded gradients until the end of the step
        return least


def _count(workload: Workload) -> tuple[float, float]:
    """Return the total and the trained number of parameters in the blocks of all stacks."""
    usual = workload.depth - sum(count for _, count in workload.kinds)
    total = trained = 0
    for build, count in ((workload.build, usual), *workload.kinds):
        model = build(BLOCKS)
        rules: Any = getattr(model, "layout_rules", None)
        for name in rules().stacks if callable(rules) else ():
            block = list(model.get_submodule(name).children())[1]
            total += count * sum(p.numel() for p in block.parameters())
            trained += count * sum(p.numel() for p in block.parameters() if p.requires_grad)
    return total, trained


@lru_cache(maxsize=1024)
def _in_flight(layout: Layout, count: int) -> tuple[float, ...]:
    """Return the number of micro-batches in flight on every pipeline rank."""
    name, size, per_rank = layout.pp_schedule, layout.pp, layout.pp_stages_per_rank
    if name == "1f1b":
        return tuple(float(min(size - rank, count)) for rank in range(size))
    fitting = (
        n
        for n in range(min(count, 2 * size), 8 * size)
        if not schedule_problems(name, size, n, per_rank)
    )
    schedule = write_schedule(name, size, next(fitting), per_rank)
    share = schedule.num_stages // size
    return tuple(peak / share for peak in replay(schedule).peak_micro_batches)
