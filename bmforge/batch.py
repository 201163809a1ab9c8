"""The type of a batch, shared by data, models and training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:  # preparing a corpus needs no tensors and does not import torch
    from torch import Tensor

__all__ = ["IGNORE_INDEX", "Batch", "count_labels"]

# Label of a token that is excluded from the loss, as in torch and transformers.
IGNORE_INDEX = -100

# Keyword arguments of a model.
Batch: TypeAlias = "Mapping[str, Tensor]"


def count_labels(batch: Batch, model: Any = None) -> int:
    """Count the labels of a micro-batch that contribute to the loss (not -100).

    Args:
        batch: keyword arguments of the model.
        model: model whose method `count_items` counts the labels; all models of bmforge have
            this method. For other models, labels are counted as for a causal language model that
            shifts them, or for a sequence classifier.

    Shape:
        labels: (B, T) token ids, not shifted, so the first token of a sequence is not counted;
            or (B,), one class per sequence
    """
    count = getattr(model, "count_items", None)
    if count is not None:
        return int(count(batch))
    labels = batch["labels"]
    return int(((labels if labels.dim() == 1 else labels[:, 1:]) != IGNORE_INDEX).sum())
