"""What every room understands by a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:  # what needs no tensors, as preparing a corpus, does not load torch
    from torch import Tensor

__all__ = ["IGNORE_INDEX", "Batch", "count_labels"]

# A label that asks for nothing.
IGNORE_INDEX = -100

# The arguments of a model by name.
Batch: TypeAlias = "Mapping[str, Tensor]"


def count_labels(batch: Batch, model: Any = None) -> int:
    """Return how many predictions the labels of a micro-batch ask for; those of -100 do not count.

    Args:
        batch: the model's arguments.
        model: one that has `count_items` (all of bmforge's) is asked; any other is taken for a
            language model that shifts its labels, or a classifier of rows.

    Shape:
        labels: (B, T) token ids, not shifted: the first of a row is not predicted; or (B,), one
        class per row
    """
    count = getattr(model, "count_items", None)
    if count is not None:
        return int(count(batch))
    labels = batch["labels"]
    return int(((labels if labels.dim() == 1 else labels[:, 1:]) != IGNORE_INDEX).sum())
