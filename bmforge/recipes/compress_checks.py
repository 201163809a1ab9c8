"""Checks before compression (teacher vocabulary, formats, widths), and size estimates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bmforge.compress import DistillConfig, measure_sizes
from bmforge.compress.distill.answers import TeacherAnswers, fingerprint_vocabulary
from bmforge.compress.matrices import find_matrices
from bmforge.compress.phases import PHASES, Phase
from bmforge.compress.prune.plan import blocks_of
from bmforge.compress.prune.sparsifier import check_pattern
from bmforge.compress.prune.structure_config import requested_sizes
from bmforge.compress.quantize import quantize
from bmforge.errors import ConfigError, DataError
from bmforge.gguf_header import is_gguf
from bmforge.logging import get_logger
from bmforge.models import AutoModel, Change
from bmforge.models.config_file import read_config_file
from bmforge.models.formats.compressed_write import check_compressed
from bmforge.models.formats.convert import find_dtype
from bmforge.models.formats.hf_format import WeightFiles
from bmforge.models.hub import find_model
from bmforge.tokenizers import AutoTokenizer

__all__ = [
    "check_compressible",
    "check_vocabularies",
    "check_widths_after",
    "describe_stored",
    "estimate_phases",
    "read_vocabulary",
    "stored_dtype",
]


def stored_dtype(directory: Path) -> torch.dtype:
    """Return the dtype of a model's floating-point weights, in which the result is saved."""
    if is_gguf(directory):
        return torch.float32
    raw = read_config_file(directory)
    named = getattr(torch, str(raw.get("dtype")).removeprefix("torch."), None)
    if "bmforge" in raw and isinstance(named, torch.dtype):  # the scales of packed layers are fp16
        return named
    return find_dtype(WeightFiles(directory))


def describe_stored(directory: Path) -> Any:
    """Build the model saved in a directory on the meta device, in the dtype of its weight files."""
    return AutoModel.describe_pretrained(directory, dtype=stored_dtype(directory))[0]


def check_vocabularies(source: Path, config: DistillConfig) -> None:
    """Check that teacher and student share a vocabulary.

    Models without a tokenizer are not checked.

    Raises:
        ConfigError: no teacher is set, or a token of the student has another id in the teacher.
    """
    if config.answers is not None:
        answers, own_vocabulary = TeacherAnswers(config.answers), read_vocabulary(source)
        if (
            answers.vocabulary
            and own_vocabulary
            and answers.vocabulary != fingerprint_vocabulary(own_vocabulary)
        ):
            raise ConfigError(
                f"distill.answers={config.answers!r} comes from a teacher with another "
                "vocabulary. Use a teacher with the same tokenizer as the model."
            )
        return
    if config.teacher is None:
        raise ConfigError(
            "distill.teacher is missing. Set it to the directory or hub id of a model."
        )
    teacher = find_model(config.teacher)
    student_vocabulary, teacher_vocabulary = read_vocabulary(source), read_vocabulary(teacher)
    if student_vocabulary is None or teacher_vocabulary is None:
        return
    other = next(
        (
            token
            for token in student_vocabulary
            if teacher_vocabulary.get(token) != student_vocabulary[token]
        ),
        None,
    )
    if other is not None:
        raise ConfigError(
            f"distill.teacher={config.teacher!r} and the model have different vocabularies: token "
            f"{other!r} has id {student_vocabulary[other]} in the model and "
            f"{teacher_vocabulary.get(other, 'no id')} in the teacher. Use a teacher with the same "
            "tokenizer."
        )


def read_vocabulary(directory: Path) -> dict[str, int] | None:
    """Return the vocabulary (token to id) of the tokenizer in a directory; None without one."""
    try:
        vocabulary: dict[str, int] = AutoTokenizer.from_pretrained(directory).get_vocab()
    except DataError as error:
        get_logger().warning(
            "the vocabularies of the teacher and the model cannot be compared (%s). Make sure "
            "that both use the same tokenizer.",
            error,
        )
        return None
    return vocabulary


def estimate_phases(source: Path, phases: Sequence[Phase]) -> Iterator[tuple[Phase, str, str]]:
    """Yield for each phase: the phase, a description of the size after it, and a note.

    The note is about sizes that are not yet known. The model is on the meta device, so no weights
    are loaded.
    """
    model: Any = describe_stored(source)
    before = measure_sizes(model)
    for phase in phases:
        note = _shrink(model, phase)
        sizes = measure_sizes(model)
        text = (
            f"{sizes.parameters:>14,} parameters {sizes.size_bytes / 1e6:>10,.1f} MB "
            f"({before.size_bytes / max(1, sizes.size_bytes):.2f}x smaller)"
        )
        yield phase, text, note


def check_compressible(source: Path, phases: Sequence[Phase]) -> None:
    """Check that the compressed model can be written for vLLM and transformers.

    Raises:
        ConfigError: nothing is quantized, or the format does not support a method.
    """
    config = phases[-1].config
    if config.quantize is None:
        raise ConfigError(
            'format="compressed-tensors" needs a quantized model. Set quantize, or leave the '
            "format out."
        )
    if config.quantize.is_auto:
        raise ConfigError(
            'format="compressed-tensors" supports only one scheme for all layers. Choose a '
            'scheme other than "auto".'
        )
    if any(phase.config.moefy is not None for phase in phases):
        raise ConfigError(
            'format="compressed-tensors" does not support the experts and routers of moefy. '
            "Remove the format."
        )
    model: Any = describe_stored(source)
    for phase in phases:
        _shrink(model, phase)
    check_compressed(model)


def changeable_fields(begun: Sequence[Phase]) -> frozenset[str]:
    """Return the recipe fields that may change when a compression is resumed.

    These are the fields of phases that have not begun, so that after an error in a later phase the
    trained phases can be kept.

    Args:
        begun: phases that have begun.
    """
    names = {phase.name for phase in begun}
    later = [name for name in PHASES if name not in names]
    fields = {f"compress.{part}" for name in later for part in PHASES[name]}
    fields |= {f"steps.{name}" for name in later}
    if not any(phase.config.is_calibrated for phase in begun):
        fields.add("calibration")
    return frozenset(fields)


def check_widths_after(source: Path, phases: Sequence[Phase]) -> None:
    """Check that later phases can quantize and prune the widths that structured pruning produces.

    Raises:
        ConfigError: `structure.multiple_of`, or the size of heads, does not fit a later phase.
    """
    structure = next((p.config.structure for p in phases if p.config.structure is not None), None)
    if structure is None or not structure.chooses_widths:
        return
    step, cause = 1, ""
    for phase in phases:
        quantize_config, prune_config = phase.config.quantize, phase.config.prune
        if prune_config is not None and prune_config.pattern != "free":
            step, cause = math.lcm(step, 4), f"prune.pattern={prune_config.pattern!r}"
        if quantize_config is not None and not quantize_config.is_auto:
            spec = quantize_config.used_spec
            step = math.lcm(step, spec.group_size or (32 if spec.bits == 4 else 4))
            cause = f"quantize.scheme={quantize_config.scheme!r}"
    if structure.multiple_of % step:
        raise ConfigError(
            f"{cause} needs layer sizes that are multiples of {step}, but "
            f"structure.multiple_of={structure.multiple_of} allows other sizes. Set "
            f"structure.multiple_of={step}."
        )
    model: Any = describe_stored(source)
    widths = {b.spec.attn.head_dim for b in blocks_of(model).values() if b.spec.attn is not None}
    selections = [
        c.where for p in phases for c in (p.config.quantize, p.config.prune) if c is not None
    ]
    if any(width % step for width in widths) and not all(selections):
        raise ConfigError(
            f"{cause} needs layer sizes divisible by {step}, but structure prunes heads of "
            f"{min(widths)} channels. Set `where` of quantize and prune to the layers other than "
            "o_proj, or use a scheme with smaller groups."
        )


def _shrink(model: Any, phase: Phase) -> str:
    """Apply the layer sizes and the quantization of a phase to a model on the meta device.

    Return a note on sizes that only the phase itself determines; "" if there are none.
    """
    config = phase.config
    if config.structure is not None:
        if config.structure.target != "sizes":
            ratio = config.structure.keep_ratio
            return f"; {ratio:.0%} of the {config.structure.target} of the blocks remain"
        for name, sizes in requested_sizes(model, config.structure).items():
            new_sizes = {k: v for k, v in dataclasses.asdict(sizes).items() if v is not None}
            model.change_(Change("resize", (name,), new_sizes))
        others = [n for n in ("hidden_size", "num_layers") if getattr(config.structure, n)]
        if others:
            return f"; reduced further by {' and '.join(others)}"
    if config.moefy is not None:
        return f"; MLPs split into {config.moefy.num_experts} experts with routers"
    if config.prune is not None:
        check_pattern(find_matrices(model, config.prune.where), config.prune)
    if config.quantize is not None:
        if config.quantize.is_auto:
            return f"; about {config.quantize.average_bits} bits per quantized weight"
        quantize(model, config.quantize.used_spec, where=config.quantize.where)
    return ""
