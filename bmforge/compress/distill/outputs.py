"""Compares the outputs of student and teacher: class logits, answer spans and full token logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.batch import IGNORE_INDEX
from bmforge.compress.distill.capture import Recorder
from bmforge.compress.distill.losses import compare_logits
from bmforge.compress.distill.tokens import shifts_labels
from bmforge.errors import ConfigError

__all__ = ["compare_outputs"]


def compare_outputs(
    student: Recorder, teacher: Recorder, model: nn.Module, temperature: float, num_items: float
) -> Tensor:
    """Return KL(teacher || student) times T^2 of the output logits, averaged over items.

    Args:
        student, teacher: recorders of one call of each model.
        model: student model.
        temperature: distillation temperature T.
        num_items: divisor of the sum over samples or tokens.

    Raises:
        ConfigError: student or teacher returned no logits.
    """
    student_output, teacher_output = student.output, teacher.output
    logits = _logits_of(student_output), _logits_of(teacher_output)
    if logits[0] is None or logits[1] is None:
        return _compare_spans(student_output, teacher_output, temperature) / num_items
    losses = compare_logits(logits[0], logits[1], temperature)
    return (losses * _label_mask(student, model, losses)).sum() / num_items


def _logits_of(output: Any) -> Tensor | None:
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else None


def _compare_spans(student: Any, teacher: Any, temperature: float) -> Tensor:
    """Return the mean of the two losses of start and end logits, summed over the samples."""
    total: Tensor | None = None
    for name in ("start_logits", "end_logits"):
        student_logits, teacher_logits = getattr(student, name, None), getattr(teacher, name, None)
        if student_logits is None or teacher_logits is None:
            raise ConfigError(
                f"kind='logits' is not supported for a {type(student).__name__}, because it "
                "returns no logits. Use a model that returns logits, or a bmforge model with a "
                "head."
            )
        both = compare_logits(student_logits, teacher_logits, temperature).sum() / 2
        total = both if total is None else total + both
    assert total is not None
    return total


def _label_mask(recorder: Recorder, model: nn.Module, losses: Tensor) -> Tensor:
    """Return a mask that is 1 for the samples or tokens with a label."""
    labels = recorder.inputs.get("labels")
    if labels is None or labels.is_floating_point() or labels.dim() != losses.dim():
        return torch.ones_like(losses)
    if labels.dim() == 2 and shifts_labels(model):
        labels = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    return (labels != IGNORE_INDEX).to(losses)
