"""Computes token weights for distillation losses on hidden states and attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.batch import IGNORE_INDEX
from bmforge.compress.distill.capture import Recorder

__all__ = ["shifts_labels", "spread_items"]


def spread_items(
    recorder: Recorder, model: nn.Module, module_name: str, shape: tuple[int, int] | torch.Size
) -> Tensor:
    """Return a weight per token; the weights sum to the number of items.

    In decoders, a token that predicts a label has weight 1. In encoders and classifiers, the number
    of a sequence's labels is distributed evenly over its tokens, so that unmasked tokens are
    trained as well.

    Args:
        recorder: recorder of the student's call.
        model: student model.
        module_name: name of the module whose tokens are weighted.
        shape: (B, T).

    Shape:
        returns (B, T)
    """
    rows, length = shape
    labels = _labels_of(recorder, rows)
    in_encoder = "encoder" in module_name.split(".")
    fits = labels.dim() == 2 and labels.shape[1] == length
    if fits and not in_encoder and _predicts_in_place(model):
        if shifts_labels(model):
            labels = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        return (labels != IGNORE_INDEX).double()
    if labels.dim() == 2 and not labels.is_floating_point():
        if fits and not in_encoder and shifts_labels(model):
            labels = labels[:, 1:]
        items = (labels != IGNORE_INDEX).sum(1)
    else:
        is_class = labels.dim() == 1 and not labels.is_floating_point()
        items = (labels != IGNORE_INDEX) if is_class else torch.ones(rows, device=labels.device)
    real = _real_tokens(recorder, rows, length, labels.device)
    return real * (items.double() / real.sum(1).clamp(min=1))[:, None]


def _labels_of(recorder: Recorder, rows: int) -> Tensor:
    """Return the labels of the call; without labels (question answering), one zero per sequence."""
    labels = recorder.inputs.get("labels")
    return torch.zeros(rows, dtype=torch.long) if labels is None else labels


def _real_tokens(recorder: Recorder, rows: int, length: int, device: Any) -> Tensor:
    mask = recorder.inputs.get("attention_mask")
    if mask is None or mask.dim() != 2 or tuple(mask.shape) != (rows, length):
        return torch.ones(rows, length, dtype=torch.float64, device=device)
    return (mask != 0).to(device).double()


def _predicts_in_place(model: nn.Module) -> bool:
    """Return True if every position of the last stack predicts a token, as in decoders."""
    traits = getattr(model, "traits", None)
    if traits is None:
        return shifts_labels(model)
    return traits.attention != "bidirectional"


def shifts_labels(model: nn.Module) -> bool:
    """Return True if position t predicts label t + 1, by the model's attribute or class name."""
    config = getattr(model, "config", None)
    if hasattr(model, "shifts_labels"):
        return bool(model.shifts_labels) and getattr(config, "head", "") == "language_model"
    name = type(model).__name__
    return name.endswith(("LMHeadModel", "ForCausalLM"))
