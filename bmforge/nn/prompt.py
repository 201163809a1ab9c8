"""Soft prompts: trained rows that extend a token embedding.

Token ids beyond the embedding's last row select rows of its optional child `table.prompt`. Batches,
masks, positions and caches therefore treat the ids of a prompt like any other ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.nn.adapter_selection import weight_of
from bmforge.nn.part import TensorNote

__all__ = ["ExtraEmbeddings", "count_ids", "has_prompt", "look_up", "prompt_ids", "with_prompt"]


class ExtraEmbeddings(nn.Module):
    """Soft prompt: trained rows that extend a token embedding; assign it to `table.prompt`.

    Args:
        length: number P of virtual tokens.
        width: embedding width D.
        std: standard deviation of the initialization.

    Attributes:
        is_delta: True if the prompt was attached to an existing model, whose files do not
            contain it.
        adapter_weight: 1, or 0 to disable the prompt, unless the call selects otherwise.

    Shape:
        rows: (...), integers below P -> (..., D)
    """

    is_delta: bool = False
    adapter_weight: float = 1.0

    def __init__(self, length: int, width: int, std: float = 0.02) -> None:
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(torch.zeros(length, width))

    def tensor_notes(self) -> Mapping[str, TensorNote]:
        """Return the initialization of the rows, N(0, std^2); they are replicated."""
        return {"weight": TensorNote(self.std)}

    def forward(self, rows: Tensor) -> Tensor:
        """Look up prompt rows by their index."""
        return F.embedding(rows, self.weight)

    def extra_repr(self) -> str:
        """Return the sizes as text."""
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}"


def count_ids(table: nn.Embedding) -> int:
    """Return the number of valid ids of an embedding: its own rows plus those of its prompt."""
    prompt = getattr(table, "prompt", None)
    return table.num_embeddings + (0 if prompt is None else prompt.weight.shape[0])


def look_up(table: nn.Embedding, ids: Tensor) -> Tensor:
    """Embed token ids; ids beyond the table's rows select rows of its soft prompt.

    Shape:
        ids: (...), integers below `count_ids` -> (..., D)
    """
    prompt = getattr(table, "prompt", None)
    if prompt is None:
        return table(ids)
    behind = ids - table.num_embeddings
    own = table(ids.where(behind < 0, 0))
    trained = prompt(behind.clamp(min=0)).to(own.dtype)
    return torch.where((behind < 0)[..., None], own, trained)


def has_prompt(table: nn.Embedding, ids: Tensor) -> bool:
    """Return True if any id selects a row of the soft prompt.

    The result is always True for ids on the meta device.
    """
    return ids.is_meta or bool((ids >= table.num_embeddings).any())  # meta: assume that one does


def prompt_ids(table: nn.Embedding, ids: Tensor) -> Tensor:
    """Prepend the ids of the soft prompt to token ids: (B, T) -> (B, P + T)."""
    rows = torch.arange(table.num_embeddings, count_ids(table), device=ids.device, dtype=ids.dtype)
    return torch.cat((rows.expand(ids.shape[0], -1), ids), 1)


def with_prompt(
    table: Any, ids: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None, int]:
    """Prepend the soft prompt to ids and mask; return both and the number of prompt rows.

    Inputs that already contain the prompt, and inputs of a model without one, are returned
    unchanged.

    Args:
        table: token embedding; None or another module if the model has no token embedding.
        ids: token ids.
        mask: 1 for tokens, 0 for padding.

    Shape:
        ids, mask: (B, T) -> (B, P + T)
    """
    prompt = getattr(table, "prompt", None)
    if prompt is None or not prompt.is_delta or weight_of(prompt) == 0:
        return ids, mask, 0
    if ids.dim() != 2 or ids.is_floating_point() or has_prompt(table, ids):
        return ids, mask, 0
    length = prompt.weight.shape[0]
    padded = None if mask is None or mask.shape != ids.shape else F.pad(mask, (length, 0), value=1)
    return prompt_ids(table, ids), mask if padded is None else padded, length
