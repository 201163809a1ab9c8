"""Training objectives: plain functions (model, batch, num_items) -> loss.

An objective returns the sum of the item losses of a micro-batch divided by `num_items`. The Trainer
passes the number of items of the whole global batch, so the loss is averaged over tokens, not over
ranks or micro-batches, and every layout gets the same mean.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from torch import Tensor, nn

from bmforge.batch import IGNORE_INDEX, Batch, count_labels
from bmforge.errors import ConfigError

__all__ = [
    "Objective",
    "causal_lm",
    "check_model",
    "count_labels",
    "count_tokens",
    "rename_inputs",
]

Objective = Callable[[nn.Module, Batch, float], Tensor]


def check_model(model: nn.Module, objective: Objective) -> None:
    """Raise `ConfigError` if the default objective would silently scale a model's loss wrongly.

    transformers' models use `num_items_in_batch` if they compute the loss by their `loss_function`;
    fifteen old decoders call a loss of their own and return the mean of each micro-batch.
    """
    owner = type(model)
    if objective is not causal_lm or not hasattr(owner, "loss_function"):
        return
    try:
        source = inspect.getsource(owner.forward)
    except (OSError, TypeError):
        return  # a class without source text
    if "loss_function" not in source:
        raise ConfigError(
            f"{owner.__name__} ignores num_items_in_batch, so its loss would grow with the number "
            "of micro-batches. Open it with AutoModel.from_pretrained(directory, "
            "backend='transformers'), or give an objective of your own."
        )


def causal_lm(model: nn.Module, batch: Batch, num_items: float) -> Tensor:
    """Return the next-token loss of a bmforge or Hugging Face causal language model.

    Args:
        model: model that takes `labels` and `num_items_in_batch` and returns an output with `loss`.
        batch: keyword arguments of the model, with `labels` (B, T) not shifted.
        num_items: divisor of the summed loss.
    """
    return model(**batch, num_items_in_batch=num_items).loss


def rename_inputs(names: Mapping[str, str], objective: Objective = causal_lm) -> Objective:
    """Return `objective` for a loader whose batch keys differ from the model's arguments.

    Args:
        names: batch key -> argument of the model; other keys keep their names.
        objective: objective to wrap.
    """

    def renamed(model: nn.Module, batch: Batch, num_items: float) -> Tensor:
        inputs = {names.get(name, name): value for name, value in batch.items()}
        return objective(model, inputs, num_items)

    return renamed


def count_tokens(batch: Batch) -> int:
    """Return the number of tokens of a micro-batch: whole rows, without rows of padding only.

    If labels are not per token, it is the number of rows.
    """
    labels = batch.get("labels")
    if labels is None or labels.dim() < 2:
        return next(iter(batch.values())).shape[0]
    rows = (labels != IGNORE_INDEX).flatten(1).any(1)
    return int(rows.sum()) * labels.shape[1]
