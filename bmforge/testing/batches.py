"""Random inputs and labels for any model, by head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Batch", "make_batch", "make_labels"]

Batch = dict[str, Tensor]


def make_batch(model: Any, batch: int = 2, length: int = 12, seed: int = 1) -> Tensor:
    """Return random token ids, (batch, length), except the vocabulary's last id (padding)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size - 1, (batch, length), generator=generator)


def make_labels(model: Any, inputs: Batch, seed: int = 2) -> Batch:
    """Return a dict with the labels that the model's loss needs, as keyword arguments.

    Some labels are -100, to test that they are ignored.
    """
    config = model.config
    generator = torch.Generator().manual_seed(seed)
    first = next(iter(inputs.values()))
    rows = first.shape[0]
    if config.head == "question_answering":
        spans = torch.randint(first.shape[1], (2, rows), generator=generator)
        return {"start_positions": spans[0], "end_positions": spans[1]}
    if config.head in ("sequence_classification", "image_classification"):
        return {"labels": torch.randint(config.num_labels, (rows,), generator=generator)}
    classes = config.num_labels if config.head == "token_classification" else config.vocab_size
    shape = (rows, 7) if config.head == "sequence_to_sequence" else tuple(first.shape)
    labels = torch.randint(classes, shape, generator=generator)
    labels[0, :4] = -100
    return {"labels": labels}
