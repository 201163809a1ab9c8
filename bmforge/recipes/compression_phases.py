"""Compression during a training run: attaches the methods of a phase to the run's model."""

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
from bmforge.data.clean.normalize import normalize_documents
from bmforge.data.sources.files import read_documents
from bmforge.errors import ConfigError, DataError
from bmforge.logging import track
from bmforge.models import AutoModel, Model
from bmforge.models.config import read_config_file
from bmforge.models.hub import find_model
from bmforge.models.quantize import quantize_
from bmforge.parallel import STAGE_AXES, World, axis_size, parallelize, run_on_first
from bmforge.recipes.compress_checks import read_vocabulary
from bmforge.tokenizers import AutoTokenizer
from bmforge.train import OptimGroup, TrainConfig, Trainer, causal_lm

__all__ = [
    "CalibrationConfig",
    "PhaseConfig",
    "only_stores_answers",
    "attach_phase",
    "check_phase",
    "finish_phase",
    "has_phase",
    "keep_answers",
    "read_calibration",
    "add_method_groups",
]


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig:
    """Calibration texts for methods that need activations of the model.

    Args:
        texts: files or directories of text.
        rows: number of sequences.
        seq_len: length of a sequence in tokens.
        batch_size: sequences per forward pass.
    """

    texts: tuple[str, ...] = ()
    rows: int = 128
    seq_len: int = 512
    batch_size: int = 8

    def __post_init__(self) -> None:
        """Raise `ConfigError` if a number is below 1."""
        for name in ("rows", "seq_len", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"calibration.{name}={getattr(self, name)} must be at least 1.")


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """Compression methods of a training run.

    Args:
        config: methods and their options.
        calibration: calibration texts.
        answers: directory for the teacher's outputs on the training data of the run; if set,
            nothing is trained.
        answer_count: number of top tokens to store for every position.
    """

    config: CompressConfig = field(default_factory=CompressConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    answers: Path | None = None
    answer_count: int = 32


def read_calibration(
    model: Any, directory: Path, config: CalibrationConfig
) -> list[dict[str, Tensor]]:
    """Return batches of token sequences of equal length from the calibration texts.

    Args:
        model: model to calibrate; may be on the meta device.
        directory: model directory with the tokenizer.
        config: calibration texts and sizes.

    Raises:
        ConfigError: no texts are given, or `seq_len` is more than the model's maximum length.
        DataError: the texts have too few tokens.
    """
    if not config.texts:
        raise ConfigError(
            "calibration.texts is empty, but the recipe needs calibration data. Set "
            'calibration.texts = ["file or directory"].'
        )
    limit = getattr(model, "position_limit", None)
    if limit is not None and config.seq_len > limit:
        raise ConfigError(
            f"calibration.seq_len={config.seq_len} is more than the model's {limit} positions. Use "
            f"at most {limit}."
        )
    tokenizer = AutoTokenizer.from_pretrained(directory)
    num_tokens, ids = config.rows * config.seq_len, list[int]()
    for document in normalize_documents(read_documents(config.texts)):
        ids += tokenizer.encode(document.text)
        if len(ids) >= num_tokens:
            break
    if len(ids) < num_tokens:
        raise DataError(
            f"calibration.texts has {len(ids):,} tokens, but rows={config.rows} of "
            f"seq_len={config.seq_len} need {num_tokens:,}. Use more texts, or reduce rows or "
            "seq_len."
        )
    rows = torch.tensor(ids[:num_tokens]).view(config.rows, config.seq_len)
    return [make_inputs(model, part) for part in rows.split(config.batch_size)]


def make_inputs(model: Any, rows: Tensor) -> dict[str, Tensor]:
    """Return token sequences as model arguments, with labels if the model generates text."""
    if model.traits.is_encoder_decoder:
        return {"input_ids": rows, "labels": rows}
    if model.traits.attention == "causal" and model.traits.can_generate:
        return {"input_ids": rows, "labels": rows}
    return {"input_ids": rows}


def attach_phase(model: Model, config: Any, mesh: DeviceMesh) -> Compression | None:
    """Attach the compression methods of a run to its loaded model, before it is parallelized.

    Args:
        model: the run's model.
        config: the run's config; without `compress`, nothing is attached.
        mesh: the run's device mesh.

    Raises:
        ConfigError: a method does not fit the model or the layout.
    """
    phase: PhaseConfig | None = getattr(config, "compress", None)
    if phase is None:
        return None
    if axis_size(mesh, *STAGE_AXES) > 1:
        raise ConfigError(
            "compression needs the whole model on each process, so it does not support "
            "pipeline parallelism. Use layout.pp=1."
        )
    batches = None
    if phase.config.is_calibrated:
        batches = read_calibration(model, find_model(config.init_from), phase.calibration)
    teacher = None if phase.config.distill is None else _open_teacher(model, config, mesh)
    return compress(model, phase.config, teacher=teacher, batches=batches)


def check_phase(config: Any) -> None:
    """Raise `ConfigError` for options that conflict with a compression phase."""
    if not has_phase(config):
        return
    if config.adapter.kind is not None or config.freeze_base:
        raise ConfigError(
            "a compression phase trains the whole model, so adapter and freeze_base are not "
            "supported. Remove them."
        )
    if config.train.load_best_model_at_end or config.train.early_stopping_patience is not None:
        raise ConfigError(
            "train.load_best_model_at_end and train.early_stopping_patience are not supported "
            "in a compression, which is complete only at the last step of a phase. Leave both "
            "out."
        )


def _open_teacher(model: Model, config: Any, mesh: DeviceMesh) -> Model | TeacherAnswers:
    """Load the distillation teacher, parallelized like the student, or unsharded if quantized."""
    distill = config.compress.config.distill
    if distill.answers is not None:
        return TeacherAnswers(distill.answers)
    teacher, _ = _read_teacher(distill, model.config.head)
    if distill.teacher_quantize is not None:
        return teacher
    return parallelize(teacher, config.layout, mesh=mesh, precision=config.train.precision)


def _read_teacher(config: DistillConfig, head: str) -> tuple[Model, Path]:
    """Return the unsharded teacher, with the student's head type if possible, and its directory."""
    if config.teacher is None:
        raise ConfigError(
            "distill.teacher is missing. Set it to the directory or hub id of a model."
        )
    directory = find_model(config.teacher)
    family = AutoModel.family_of(read_config_file(directory))
    named: dict[str, Any] = {"head": head} if head in family.config_class.heads else {}
    teacher = family.from_pretrained(directory, **named)
    if config.teacher_quantize is not None:
        teacher = quantize_(teacher, config.teacher_quantize)
    return teacher, directory


def only_stores_answers(config: Any) -> bool:
    """Return True if a run only stores the teacher's outputs and does not train."""
    return has_phase(config) and config.compress.answers is not None


def keep_answers(config: Any, data: Any, world: World) -> Model:
    """Store the teacher's top tokens for all sequences of a run; return the teacher.

    Args:
        config: the run's config.
        data: the run's data.
        world: all processes of the run.

    Raises:
        ConfigError: there are several processes, the task does not train on batches of model
            inputs, the loss uses the teacher's hidden states, or the teacher is unsuitable.
    """
    phase: PhaseConfig = config.compress
    distill = phase.config.distill
    if world.size > 1:
        raise ConfigError(
            f"{world.size} processes were started, but the teacher's outputs are "
            "computed by one process. Start one process; training with the stored "
            "outputs supports any number of processes."
        )
    if data.objective is not causal_lm:
        raise ConfigError(
            "the teacher's predictions can only be stored for tasks that train on batches of model "
            "inputs, such as pretrain. Compute them during training instead (distill.teacher)."
        )
    if distill is None or distill.looks_inside:
        raise ConfigError(
            "stored predictions of the teacher contain only logits. Set distill.losses to "
            'logits (kind="logits") only.'
        )
    assert phase.answers is not None
    teacher, directory = _read_teacher(distill, config.model.head)
    steps = track(range(config.train.steps), "ask the teacher")
    try:
        write_answers(
            teacher.to(world.device),
            (batch for _ in steps for batch in next(data.loader)),
            phase.answers,
            count=phase.answer_count,
            temperature=distill.losses[0].temperature,
            vocabulary=read_vocabulary(directory),
        )
    finally:
        if data.close is not None:
            data.close()
    return teacher


def add_method_groups(train: TrainConfig, job: Compression | None) -> TrainConfig:
    """Add the parameter groups of the compression methods to a training config."""
    if job is None or not (groups_of_glob := job.optim_groups()):
        return train
    groups = tuple(OptimGroup(glob, **settings) for glob, settings in groups_of_glob.items())
    optim = dataclasses.replace(train.optim, groups=(*train.optim.groups, *groups))
    return dataclasses.replace(train, optim=optim)


def has_phase(config: Any) -> bool:
    """Return True if a run compresses its model."""
    return getattr(config, "compress", None) is not None


def finish_phase(trainer: Trainer, run_dir: Path) -> Any:
    """Finish the compression of a run, save its report, and return the compressed model.

    Without compression the trained model is returned.

    Comm: every process calls it.
    """
    job = next(
        (callback for callback in trainer.callbacks if isinstance(callback, Compression)), None
    )
    if job is None:
        return trainer.model
    report = job.finish_()
    run_on_first(lambda: report.save(run_dir / "compression"))
    small: Any = job.model
    small.provenance = trainer.model.provenance
    return small
