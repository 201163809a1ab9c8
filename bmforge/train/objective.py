"""What a step minimises: a plain function of (model, batch, num_items).

An objective returns the sum of the item losses of a micro-batch divided by `num_items`. The Trainer
passes the number of items of the whole global batch, so the loss is averaged over tokens, not over
ranks or micro-batches, and every layout sees the same mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

__all__ = ["IGNORE_INDEX", "Objective", "causal_lm", "count_labels", "count_tokens"]

IGNORE_INDEX = -100
Batch = Mapping[str, Tensor]
Objective = Callable[[nn.Module, Batch, float], Tensor]


def causal_lm(model: nn.Module, batch: Batch, num_items: float) -> Tensor:
    """Next-token loss of a bmforge or Hugging Face causal language model.

    Args:
        model: takes `labels` and `num_items_in_batch` and returns an output with `loss`.
        batch: the model's keyword arguments, with `labels` (B, T) not shifted.
        num_items: what the summed loss is divided by.
    """
    return model(**batch, num_items_in_batch=num_items).loss


def count_labels(batch: Batch) -> int:
    """Return how many predictions the labels of a micro-batch ask for; those of -100 do not count.

    Shape:
        labels: (B, T) token ids, not shifted: the first of a row is not predicted; or (B,), one
        class per row
    """
    labels = batch["labels"]
    return int(((labels if labels.dim() == 1 else labels[:, 1:]) != IGNORE_INDEX).sum())


def count_tokens(batch: Batch) -> int:
    """Return how many tokens a micro-batch works on: whole rows, without those that only pad."""
    labels = batch["labels"]
    rows = (labels != IGNORE_INDEX).flatten(1).any(1) if labels.dim() > 1 else labels
    return int(rows.sum()) * labels.shape[1] if labels.dim() > 1 else labels.numel()
