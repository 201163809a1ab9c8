"""Trained rows behind a table of tokens: what soft prompts are looked up in.

Ids from the table's own number of rows on are rows of `table.prompt`, a child of it, where there is
one. So a prompt is ids like any others wherever tokens go: batches, masks, positions, caches.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bmforge.nn.part import TensorNote

__all__ = ["Prompt", "count_ids", "look_up"]


class Prompt(nn.Module):
    """Rows behind those of a table of tokens; put one at `table.prompt`.

    Args:
        length: P.
        width: features of a row, the table's.
        std: of freshly drawn rows.

    Attributes:
        is_delta: it came beside a finished model: files of that one need not have its tensors.
        share: with 0 nobody puts its ids in front of a text.

    Shape:
        rows: any, integers below P -> (..., D)
    """

    is_delta: bool = False
    share: float = 1.0

    def __init__(self, length: int, width: int, std: float = 0.02) -> None:
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(torch.zeros(length, width))

    def tensor_notes(self) -> Mapping[str, TensorNote]:
        """Every process has all rows."""
        return {"weight": TensorNote(self.std)}

    def forward(self, rows: Tensor) -> Tensor:
        """Look rows up."""
        return nn.functional.embedding(rows, self.weight)

    def extra_repr(self) -> str:
        """Show the sizes."""
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}"


def count_ids(table: nn.Embedding) -> int:
    """Return how many ids a table answers: its rows and its prompt's."""
    prompt = getattr(table, "prompt", None)
    return table.num_embeddings + (0 if prompt is None else prompt.weight.shape[0])


def look_up(table: nn.Embedding, ids: Tensor) -> Tensor:
    """Embed ids: rows of the table and, from its number of rows on, of its prompt.

    Shape:
        ids: any, below `count_ids` -> (..., D)
    """
    prompt = getattr(table, "prompt", None)
    if prompt is None:
        return table(ids)
    behind = ids - table.num_embeddings
    own = table(ids.where(behind < 0, 0))
    trained = prompt(behind.clamp(min=0)).to(own.dtype)
    return torch.where((behind < 0)[..., None], own, trained)
