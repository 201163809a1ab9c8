"""What a step minimises: a plain function of (model, batch, num_items).

An objective returns the sum of the item losses of a micro-batch divided by `num_items`. The Trainer
passes the number of items of the whole global batch, so the loss is averaged over tokens, not over
ranks or micro-batches, and every layout sees the same mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

__all__ = ["IGNORE_INDEX", "Objective", "causal_lm", "count_labels"]

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
    """Return how many tokens a causal language model is asked to predict in a micro-batch."""
    return int((batch["labels"][:, 1:] != IGNORE_INDEX).sum())
