"""Prepares a corpus on many machines with datatrove; converts filters to and from datatrove's.

The shards of a stage are distributed over the tasks of a datatrove run; each task writes its
results into the folder of the stage. After each such run, one process adds the results to the
journal, and runs the following stages that need all documents at once. So the output is
byte-identical to that of `prepare` on one machine, and the same call resumes after an interruption.
All machines must see the same files under the same paths.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bmforge.data.clean.drop import Drop, cut_excerpt
from bmforge.data.clean.filter_step import RuleFilter
from bmforge.data.prepare.documents import DocumentStage
from bmforge.data.prepare.engine import Limits, SkippedEntry, StagePart, Work, run_parts
from bmforge.data.prepare.journal import Journal
from bmforge.data.prepare.record import RECORD_NAME, PrepareConfig, PrepareReport
from bmforge.data.prepare.run import Paths, plan_work, prepare, work_dir
from bmforge.data.prepare.stages import StageKeys, make_keys, run_stages
from bmforge.data.sources.document import Document
from bmforge.errors import ConfigError, DataError, MissingDependencyError, suggest
from bmforge.files import replace_file

__all__ = ["ClusterConfig", "make_filter", "make_step", "run_on_cluster"]

_EXECUTORS = ("local", "ray", "slurm")
_SPREAD = ("documents", "sketches", "encode")  # stages that run in parallel tasks
_DONE = "{:06d}.done"


@dataclass(frozen=True)
class ClusterConfig:
    """Settings of data preparation on a cluster.

    Args:
        inputs: files or directories; None for the demo corpus (`python_topics`).
        out_dir: output directory, on a file system that all machines share.
        prepare: settings as for `prepare`; if `workers` is above 0, each task runs a worker
            process, so that the time and memory limits apply.
        steps: additional steps, run after those of `prepare`.
        tasks: largest number of datatrove tasks per stage; a task processes several shards if there
            are more shards than tasks.
        at_once: number of concurrent tasks; -1 for the number of cores, or no limit for a job
            queue.
        options: further arguments of the executor, such as partition, time and mem_per_cpu_gb for
            Slurm.
    """

    inputs: Paths | None
    out_dir: str | os.PathLike[str]
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    steps: tuple[DocumentStage, ...] = ()
    tasks: int = 1000
    at_once: int = -1
    options: Mapping[str, Any] = field(default_factory=dict)


def run_on_cluster(
    config: ClusterConfig, executor: Literal["local", "ray", "slurm"] = "local"
) -> PrepareReport | None:
    """Prepare a corpus with datatrove's executors.

    Args:
        config: inputs, output and settings.
        executor: ``"local"`` for processes of this machine, ``"ray"`` for a Ray cluster, or
            ``"slurm"``, which submits a chain of dependent jobs.

    Returns:
        the report; None for Slurm, where `prepare` with the same settings returns it afterwards.

    Raises:
        ConfigError: the executor is unknown, or settings contradict each other.
        MissingDependencyError: the extra ``cluster`` is not installed.
        DataError: a task failed; its log is in ``OUT.cluster``.
    """
    if executor not in _EXECUTORS:
        raise ConfigError(
            f"unknown executor: executor={executor!r} (supported: "
            f"{', '.join(_EXECUTORS)}).{suggest(executor, _EXECUTORS)}"
        )
    if config.tasks < 1:
        raise ConfigError(f"tasks={config.tasks} must be at least 1.")
    make = _find_executor(executor)
    if (Path(config.out_dir) / RECORD_NAME).exists():
        return prepare(config.inputs, config.out_dir, config.prepare, steps=config.steps)
    job = _Job(config)
    keys = job.keys()
    stages = [stage for stage in _SPREAD if keys.of(stage)]
    tasks = min(len(keys.documents), config.tasks)
    if executor == "slurm":
        before = None
        for stage in stages:
            before = _make(make, config, _ShardStep(job, stage), tasks, before)
            before = _make(make, config, _JournalStep(job, stage, stage == stages[-1]), 1, before)
        assert before is not None
        before.run()  # this also submits the jobs that it depends on
        return None
    for stage in stages:
        _make(make, config, _ShardStep(job, stage), tasks).run()
        job.join()
        job.check(stage)
    return prepare(config.inputs, config.out_dir, config.prepare, steps=config.steps)


def _make(
    make: Callable[..., Any],
    config: ClusterConfig,
    run: _ShardStep | _JournalStep,
    tasks: int,
    before: Any = None,
) -> Any:
    """Create a datatrove executor that runs the step `run` after the executor `before`."""
    # The name contains a hash of the settings, so that results of other settings are not reused.
    name = f"{type(run).__name__.strip('_').lower()}-{run.stage}-{run.job.name(run.stage)}"
    options = dict(config.options)
    if before is not None:
        options["depends"] = before
    return make(
        pipeline=[run],
        tasks=tasks,
        workers=config.at_once,
        logging_dir=str(_log_dir(config) / name),
        **options,
    )


def _log_dir(config: ClusterConfig) -> Path:
    """Return the log directory, next to the corpus because the work directory is removed."""
    out = Path(config.out_dir)
    return out.with_name(f"{out.name}.cluster")


def _find_executor(name: str) -> Any:
    try:
        from datatrove import executor
    except ImportError as error:
        raise MissingDependencyError(
            "datatrove", "cluster", "data preparation on a cluster"
        ) from error
    if name == "ray":
        try:
            from datatrove.executor.ray import RayPipelineExecutor
        except ImportError as error:
            raise MissingDependencyError("ray", "cluster", "data preparation on Ray") from error
        return RayPipelineExecutor
    executor_class = (
        executor.SlurmPipelineExecutor if name == "slurm" else executor.LocalPipelineExecutor
    )
    return executor_class


@dataclass(frozen=True)
class _Job:
    """Cluster job; every task derives the same plan and stage keys from its settings."""

    config: ClusterConfig

    def _open(self) -> tuple[Any, ...]:
        config = self.config
        return plan_work(config.inputs, config.out_dir, config.prepare, config.steps)

    def keys(self) -> StageKeys:
        """Return the keys of all stages, computed from the saved plan."""
        plan, steps, tokenizer = self._open()
        return make_keys(plan, self.config.prepare, steps, tokenizer)

    def name(self, stage: str) -> str:
        """Return the name of a stage's datatrove run, which changes with the stage's settings."""
        return self.keys().of(stage)[-1][:12]

    def spread(self, stage: str, rank: int, world: int) -> None:
        """Process the shards of a stage that are assigned to task `rank`; write the results."""
        plan, steps, tokenizer = self._open()
        config = self.config.prepare
        keys = make_keys(plan, config, steps, tokenizer)
        with Journal(work_dir(self.config.out_dir), for_reading=True, trusting=True) as journal:
            runner = _TaskShare(stage, rank, world, keys.of(stage), journal.folder(stage))
            try:
                run_stages(plan, config, steps, tokenizer, journal, runner)
            except _StoppedError:
                return

    def join(self) -> None:
        """Add the tasks' results to the journal; run the stages before the next parallel stage."""
        plan, steps, tokenizer = self._open()
        config = self.config.prepare
        keys = make_keys(plan, config, steps, tokenizer)
        with Journal(work_dir(self.config.out_dir)) as journal:
            for stage in _SPREAD:
                for number, key in enumerate(keys.of(stage)):
                    done = _read_done(journal.folder(stage), number, key)
                    if done is not None and journal.find(stage, number, key) is None:
                        journal.add(stage, number, key, done["files"], done["result"])
            try:
                run_stages(plan, config, steps, tokenizer, journal, _stop)
            except _StoppedError:
                return

    def check(self, stage: str) -> None:
        """Raise `DataError` if some shards of a stage are unfinished."""
        keys = self.keys().of(stage)
        with Journal(work_dir(self.config.out_dir), for_reading=True, trusting=True) as journal:
            left = [n for n, key in enumerate(keys) if journal.find(stage, n, key) is None]
        if left:
            raise DataError(
                f"{len(left)} of {len(keys)} parts of stage {stage!r} are not finished, "
                f"starting with part {left[0]}. See the logs in "
                f"{str(_log_dir(self.config))!r}."
            )


@dataclass(frozen=True)
class _ShardStep:
    """Pipeline step for datatrove that processes the shards of a stage assigned to one task."""

    job: _Job
    stage: str

    def __call__(self, data: Any, rank: int = 0, world_size: int = 1) -> None:
        """Process the shards of one rank."""
        self.job.spread(self.stage, rank, world_size)


@dataclass(frozen=True)
class _JournalStep:
    """Pipeline step for datatrove that adds the tasks' results of a stage to the journal."""

    job: _Job
    stage: str
    is_last: bool = False

    def __call__(self, data: Any, rank: int = 0, world_size: int = 1) -> None:
        """Collect the tasks' results; after the last stage, finish the corpus."""
        self.job.join()
        if self.is_last:
            config = self.job.config
            prepare(config.inputs, config.out_dir, config.prepare, steps=config.steps)


class _StoppedError(Exception):
    """Raised to stop a task at a stage whose remaining shards are processed by other tasks."""


def _stop(
    stage: str,
    run: Work,
    parts: Sequence[StagePart],
    config: PrepareConfig,
    on_skip: Callable[[int, SkippedEntry], None],
) -> Iterator[tuple[int, Any]]:
    if parts:
        raise _StoppedError(stage)
    yield from ()


@dataclass(frozen=True)
class _TaskShare:
    """Processes the shards of one stage that are assigned to this task, then stops the task."""

    stage: str
    rank: int
    world: int
    keys: Sequence[str]
    folder: Path

    def __call__(
        self,
        stage: str,
        run: Work,
        parts: Sequence[StagePart],
        config: PrepareConfig,
        on_skip: Callable[[int, SkippedEntry], None],
    ) -> Iterator[tuple[int, Any]]:
        if stage != self.stage:
            if parts:
                raise DataError(
                    f"stage {stage!r} is not finished, but stage {self.stage!r} requires its "
                    f"output. Run {stage!r} first."
                )
            return
        own_parts = [
            part
            for part in parts
            if part.number % self.world == self.rank
            and _read_done(self.folder, part.number, self.keys[part.number]) is None
        ]
        execution = config.execution
        limits = Limits(execution.document_seconds, execution.worker_memory_bytes)
        # Skipped entries are recorded in the result of the part that is run without them.
        for number, result in run_parts(
            run, own_parts, min(execution.workers, 1), limits, _ignore_skip
        ):
            files = result.pop("files")
            record = {"key": self.keys[number], "files": files, "result": result}
            replace_file(self.folder / _DONE.format(number), json.dumps(record))
        raise _StoppedError(stage)
        yield


def _ignore_skip(number: int, skip: SkippedEntry) -> None:
    """Do nothing: skipped entries are recorded in the result of their shard."""


def _read_done(folder: Path, number: int, key: str) -> Any | None:
    """Read a task's result for a shard; None if it is outdated or one of its files is missing."""
    path = folder / _DONE.format(number)
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    is_whole = record["key"] == key and all((folder / name).is_file() for name in record["files"])
    return record if is_whole else None


def make_step(filter: Any) -> DocumentStage:
    """Convert a datatrove filter into a step of `prepare`.

    Args:
        filter: object with a method ``filter`` that returns True to keep a document, or a pair
            of True or False and a reason, such as datatrove's `BaseFilter`.
    """
    name = str(getattr(filter, "name", type(filter).__name__))
    plain = "_".join("".join(c if c.isalnum() else " " for c in name).lower().split())
    return DocumentStage(f"datatrove {plain}", _Filter(filter, plain))


@dataclass(frozen=True)
class _Filter:
    filter: Any
    name: str

    def __call__(self, document: Document) -> Document | Drop:
        from datatrove.data import Document as Theirs

        fields = {"url": document.url, "date": document.date, "language": document.language}
        metadata = {name: value for name, value in fields.items() if value}
        verdict = self.filter.filter(Theirs(text=document.text, id=document.id, metadata=metadata))
        stays, reason = verdict if isinstance(verdict, tuple) else (verdict, "")
        if stays:
            return document
        rule = f"datatrove.{self.name}" + (f".{reason}" if reason else "")
        return Drop(rule, None, None, cut_excerpt(document.text))


def make_filter(rules: str = "mixed") -> Callable[..., Iterator[Any]]:
    """Convert filter rules into a pipeline step for datatrove; the reasons for dropping are not
    recorded.

    Args:
        rules: ``"english"``, ``"chinese"`` or ``"mixed"``.
    """
    return _Rules(RuleFilter(rules))


@dataclass(frozen=True)
class _Rules:
    judge: RuleFilter

    def __call__(self, data: Iterable[Any], rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        """Yield the documents that pass the rules, with the text that the rules keep."""
        for item in data:
            judged = self.judge(Document(item.text, str(item.id)))
            if isinstance(judged, Document):
                item.text = judged.text
                yield item
