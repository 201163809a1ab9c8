"""Checks, before training, that a teacher fits the student and the distillation settings."""

from __future__ import annotations

from typing import Any

from torch import nn

from bmforge.compress.distill.answers import TeacherAnswers, find_head
from bmforge.compress.distill.capture import find_attention
from bmforge.compress.distill.config import DistillConfig, DistillLoss
from bmforge.compress.distill.maps import find_pairs
from bmforge.errors import ConfigError
from bmforge.records import find_parallel_record

__all__ = ["check_answers", "check_students_layout", "check_teacher", "relation_heads"]


def check_teacher(student: nn.Module, teacher: nn.Module, config: DistillConfig) -> None:
    """Raise one `ConfigError` that lists all mismatches of vocabulary, head or depth."""
    if student is teacher:
        raise ConfigError(
            "teacher and student are the same object. Pass a copy of the model as the teacher."
        )
    problems = []
    for what in ("vocab_size", "head", "num_labels"):
        student_value, teacher_value = (
            getattr(_config(model), what, None) for model in (student, teacher)
        )
        if what == "num_labels" and not _classifies(student):
            continue
        if (
            student_value is not None
            and teacher_value is not None
            and student_value != teacher_value
        ):
            problems.append(
                f"the student has {what}={student_value!r}, but the teacher has {teacher_value!r}"
            )
    for loss in config.losses:
        if loss.kind == "logits":
            continue
        try:
            pairs = find_pairs(student, teacher, loss)
            if loss.kind != "hidden":
                problems += _attention_problems(student, teacher, loss, pairs)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(
            f"teacher and student do not match: {'; '.join(p.rstrip('.') for p in problems)}."
        )


def check_answers(student: nn.Module, answers: TeacherAnswers, config: DistillConfig) -> None:
    """Raise `ConfigError` if saved answers do not fit the student or the distillation settings."""
    find_head(student, "student")
    size = getattr(_config(student), "vocab_size", None)
    if size != answers.vocab_size:
        raise ConfigError(
            f"the student has vocab_size={size}, but the predictions were stored for "
            f"vocab_size={answers.vocab_size}. Use a teacher with the vocabulary of the student."
        )
    if config.looks_inside:
        raise ConfigError(
            "stored predictions contain only logits, not the teacher's hidden states or "
            'attention. Use only kind="logits", or pass the teacher itself.'
        )
    temperature = config.losses[0].temperature
    if temperature != answers.temperature:
        raise ConfigError(
            f"the predictions were stored at temperature={answers.temperature}, but the loss "
            f"uses {temperature}. Use the same temperature, or store the predictions again."
        )


def _classifies(model: nn.Module) -> bool:
    head = getattr(_config(model), "head", "")
    return isinstance(head, str) and head.endswith("classification")


def _attention_problems(
    student: nn.Module, teacher: nn.Module, loss: DistillLoss, pairs: list[tuple[str, str]]
) -> list[str]:
    problems = []
    for student_name, teacher_name in pairs:
        own_attention, others = (
            find_attention(student, student_name),
            find_attention(teacher, teacher_name),
        )
        if loss.kind == "attention" and own_attention.num_heads != others.num_heads:
            problems.append(
                f"{student_name} has {own_attention.num_heads} heads, but the teacher's "
                f'{teacher_name} has {others.num_heads}: use kind="relation"'
            )
        if loss.kind == "value" and _value_width(own_attention) != _value_width(others):
            problems.append(
                f"{student_name} has values of {_value_width(own_attention)} channels, but "
                f"the teacher's {teacher_name} of {_value_width(others)}: use "
                'kind="relation"'
            )
        if loss.kind == "relation":
            heads = relation_heads(loss, own_attention)
            widths = [_width(attn, loss.of) for attn in (own_attention, others)]
            if any(width % heads for width in widths):
                problems.append(
                    f"relation_heads={heads} does not divide the {widths[0]} channels of "
                    f"{student_name} and the {widths[1]} channels of the teacher's "
                    f"{teacher_name}"
                )
    return problems


def _width(attn: Any, of: str) -> int:
    return int(getattr(attn, f"{of[0]}_proj").out_features)


def _value_width(attn: Any) -> int:
    return _width(attn, "value")


def relation_heads(loss: DistillLoss, attn: Any) -> int:
    """Return the number of relation heads; the student's number of heads if it is not configured.

    Args:
        loss: relation loss.
        attn: attention module of the student, sharded or not.
    """
    if loss.relation_heads:
        return loss.relation_heads
    if loss.of == "query":
        return int(attn.num_heads)
    return int(attn.k_proj.out_features // attn.head_dim)


def check_students_layout(
    student: nn.Module, teacher: nn.Module, config: DistillConfig, has_answers: bool = False
) -> None:
    """Raise `ConfigError` if the parallel layout does not support the distillation losses."""
    record, other = find_parallel_record(student), find_parallel_record(teacher)
    is_cut = any(getattr(m, "token_cut", None) is not None for m in student.modules())
    is_cut |= find_head(student, "student").vocab is not None if has_answers else False
    if has_answers and (is_cut or (record is not None and record.pipeline is not None)):
        raise ConfigError(
            "stored predictions are for whole sequences and the whole vocabulary. Use a layout "
            "with tp=1, cp=1 and pp=1, or pass the teacher itself."
        )
    if other is not None and other.pipeline is not None:
        raise ConfigError(
            "the teacher is split into pipeline stages. Pass a teacher that is whole on every "
            "process; to save memory, stream or quantize it."
        )
    if not config.looks_inside:
        return
    if record is not None and record.pipeline is not None:
        raise ConfigError(
            "the student is split into pipeline stages, so its internal tensors cannot be "
            'compared. Use a layout with pp=1, or only kind="logits".'
        )
    layout = None if record is None else record.layout
    is_hidden = any(loss.kind == "hidden" for loss in config.losses)
    if is_hidden and getattr(layout, "sequence_parallel", False):
        raise ConfigError(
            "sequence_parallel=True divides hidden states over processes, so they cannot "
            "be compared with the teacher's. Leave out sequence_parallel or the "
            "hidden-state loss."
        )
    if any(getattr(module, "token_cut", None) is not None for module in student.modules()):
        raise ConfigError(
            "the tokens of a sequence are divided over processes (cp), so internal tensors cannot "
            'be compared. Use cp=1, or only kind="logits".'
        )


def _config(model: nn.Module) -> Any:
    return getattr(model, "config", None)
