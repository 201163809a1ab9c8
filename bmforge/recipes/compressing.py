"""Compression inside of a run: what a phase puts into the model that the run trains."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bmforge.compress import CompressConfig, Compression, compress
from bmforge.compress.distill import DistillConfig, TeacherAnswers, write_answers
from bmforge.data.sources.files import read_documents
from bmforge.errors import ConfigError, DataError
from bmforge.logging import track
from bmforge.models import AutoModel, Model
from bmforge.models.config import read_config_file
from bmforge.models.hub import find_model
from bmforge.models.quantize import quantize_
from bmforge.parallel import STAGE_AXES, World, axis_size, parallelize, run_on_first
from bmforge.recipes.small import read_vocabulary
from bmforge.tokenizers import AutoTokenizer
from bmforge.train import OptimGroup, TrainConfig, Trainer, causal_lm

__all__ = [
    "CalibrationConfig",
    "PhaseConfig",
    "asks_teacher",
    "attach_phase",
    "finish_phase",
    "has_phase",
    "keep_answers",
    "read_calibration",
    "settle_train",
]


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig:
    """Real texts that methods look at.

    Args:
        texts: files or directories.
        rows: how many rows of tokens.
        seq_len: tokens of a row.
        batch_size: rows that go through the model at once.
    """

    texts: tuple[str, ...] = ()
    rows: int = 128
    seq_len: int = 512
    batch_size: int = 8

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("rows", "seq_len", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"calibration.{name}={getattr(self, name)} must be at least 1.")


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """What a run does to its model beside training it.

    Args:
        config: what is done.
        calibration: texts for it.
        answers: train nothing: ask the teacher about the run's rows, and keep its answers there.
        answer_count: how many of the likeliest tokens at every position.
    """

    config: CompressConfig = field(default_factory=CompressConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    answers: Path | None = None
    answer_count: int = 32


def read_calibration(
    model: Any, directory: Path, config: CalibrationConfig
) -> list[dict[str, Tensor]]:
    """Return rows of tokens of the texts, in batches.

    Args:
        model: whose arguments they are.
        directory: with its tokenizer.
        config: which texts.

    Raises:
        ConfigError: no texts are named, or rows are longer than the model's positions.
        DataError: the texts have too few tokens.
    """
    if not config.texts:
        raise ConfigError(
            "calibration.texts names no texts, and something in the recipe chooses by what goes "
            'through the model: give calibration.texts = ["file or directory"].'
        )
    limit = getattr(model, "position_limit", None)
    if limit is not None and config.seq_len > limit:
        raise ConfigError(
            f"calibration.seq_len={config.seq_len} is more than the model's {limit} positions."
        )
    tokenizer = AutoTokenizer.from_pretrained(directory)
    wanted, ids = config.rows * config.seq_len, list[int]()
    for document in read_documents(config.texts):
        ids += tokenizer.encode(document.text)
        if len(ids) >= wanted:
            break
    if len(ids) < wanted:
        raise DataError(
            f"calibration.texts have {len(ids):,} tokens; rows={config.rows} of seq_len="
            f"{config.seq_len} need {wanted:,}. Name more texts, or ask for fewer or shorter rows."
        )
    rows = torch.tensor(ids[:wanted]).view(config.rows, config.seq_len)
    return [make_inputs(model, part) for part in rows.split(config.batch_size)]


def make_inputs(model: Any, rows: Tensor) -> dict[str, Tensor]:
    """Return a model's arguments for rows of tokens; a decoder beside an encoder gets them too."""
    if model.traits.reads == "apart":
        return {"input_ids": rows, "labels": rows}
    if model.traits.reads == "left" and model.traits.writes:
        return {"input_ids": rows, "labels": rows}
    return {"input_ids": rows}


def attach_phase(model: Model, config: Any, mesh: DeviceMesh) -> Compression | None:
    """Put what a run's phase does into its model, which has its weights and is not laid out yet.

    Args:
        model: of the run.
        config: of the run; one without `compress` does nothing.
        mesh: of the run.

    Raises:
        ConfigError: what does not fit the model or the layout.
    """
    told: PhaseConfig | None = getattr(config, "compress", None)
    if told is None:
        return None
    if config.adapter.kind is not None or config.freeze_base:
        raise ConfigError(
            "a phase of compression trains the model itself: leave adapter and freeze_base out."
        )
    if axis_size(mesh, *STAGE_AXES) > 1:
        raise ConfigError(
            "a phase of compression ends in a small model, which no process of a pipeline has "
            "whole: use layout.pp=1."
        )
    batches = None
    if told.config.is_calibrated:
        batches = read_calibration(model, find_model(config.init_from), told.calibration)
    teacher = None if told.config.distill is None else _open_teacher(model, config, mesh)
    return compress(model, told.config, teacher=teacher, batches=batches)


def _open_teacher(model: Model, config: Any, mesh: DeviceMesh) -> Model | TeacherAnswers:
    """Open the teacher, laid out as the student will be, or whole where it is packed."""
    told = config.compress.config.distill
    if told.answers is not None:
        return TeacherAnswers(told.answers)
    teacher, _ = _read_teacher(told, model.config.head)
    if told.teacher_quantize is not None:
        return teacher
    return parallelize(teacher, config.layout, mesh=mesh, precision=config.train.precision)


def _read_teacher(told: DistillConfig, head: str) -> tuple[Model, Path]:
    """Return the teacher, whole, with a student's head where it has such, and its directory."""
    if told.teacher is None:
        raise ConfigError("distill.teacher is missing: name its directory or hub id.")
    directory = find_model(told.teacher)
    family = AutoModel.family_of(read_config_file(directory))
    named: dict[str, Any] = {"head": head} if head in family.config_class.heads else {}
    teacher = family.from_pretrained(directory, **named)
    if told.teacher_quantize is not None:
        teacher = quantize_(teacher, told.teacher_quantize)
    return teacher, directory


def asks_teacher(config: Any) -> bool:
    """Tell whether a run only asks a teacher about its rows."""
    return has_phase(config) and config.compress.answers is not None


def keep_answers(config: Any, data: Any, world: World) -> Model:
    """Ask the teacher about the rows of a run's steps, and keep its answers; return the teacher.

    Args:
        config: of the run.
        data: what the run reads.
        world: the processes.

    Raises:
        ConfigError: several processes, a task whose batches are not the model's own arguments, a
            loss on what is inside the teacher, or a teacher that cannot be asked.
    """
    told: PhaseConfig = config.compress
    distill = told.config.distill
    if world.size > 1:
        raise ConfigError(
            f"{world.size} processes were started: one asks the teacher, and its answers serve on "
            "any number of them."
        )
    if data.objective is not causal_lm:
        raise ConfigError(
            "answers are kept for tasks that hand a model its own arguments, such as pretrain: "
            "give the teacher itself (distill.teacher)."
        )
    if distill is None or distill.looks_inside:
        raise ConfigError(
            "kept answers say nothing of what is inside the teacher: let distill.losses be logits "
            '(kind="logits") alone.'
        )
    assert told.answers is not None
    teacher, directory = _read_teacher(distill, config.model.head)
    steps = track(range(config.train.steps), "ask the teacher")
    try:
        write_answers(
            teacher.to(world.device),
            (batch for _ in steps for batch in next(data.loader)),
            told.answers,
            count=told.answer_count,
            temperature=distill.losses[0].temperature,
            vocabulary=read_vocabulary(directory),
        )
    finally:
        if data.close is not None:
            data.close()
    return teacher


def settle_train(train: TrainConfig, job: Compression | None) -> TrainConfig:
    """Return a run's loop with the groups of parameters that its methods want trained otherwise."""
    if job is None or not (wanted := job.optim_groups()):
        return train
    groups = tuple(OptimGroup(glob, **settings) for glob, settings in wanted.items())
    optim = dataclasses.replace(train.optim, groups=(*train.optim.groups, *groups))
    return dataclasses.replace(train, optim=optim)


def has_phase(config: Any) -> bool:
    """Tell whether a run makes its model small."""
    return getattr(config, "compress", None) is not None


def finish_phase(trainer: Trainer, run_dir: Path) -> Any:
    """Finish what a run's phase does, and keep what is said of it; return the small model.

    Of a run without a phase it is the model that was trained.

    Comm: every process calls it.
    """
    job = next((one for one in trainer.callbacks if isinstance(one, Compression)), None)
    if job is None:
        return trainer.model
    report = job.finish_()
    run_on_first(lambda: report.save(run_dir / "compression"))
    small: Any = job.model
    small.provenance = trainer.model.provenance
    return small
