"""Trained rows of selected tokens, which replace rows of an embedding and of its tied head.

Only the rows of the chosen tokens are trained and saved; all other rows remain those of the base
model. PEFT calls this method `trainable_token_indices`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.nn.part import AdapterModule, TensorNote, attach_part_, find_like
from bmforge.nn.random_init import copy_part_
from bmforge.shards import is_streamed, local_tensor, whole_tensor

__all__ = ["TOKENS_SLOT", "TokenRows", "attach_token_rows_", "init_trained_rows_"]

# Suffix of the child module's name, which begins with the adapter's name.
TOKENS_SLOT = "_tokens"


class TokenRows(AdapterModule):
    """Trained rows that replace the rows of some tokens in an embedding or a vocabulary head.

    Args:
        indices: token ids, in the order of the rows.
        width: number of features per row.
        like: tensor with the dtype and device to use.

    Shape:
        as an embedding: ids (...) -> (..., D); as a head: x (..., D) -> (..., V)
    """

    sharding_styles: ClassVar[frozenset[str]] = frozenset({"", "embedding"})

    def __init__(self, indices: tuple[int, ...], width: int, like: Tensor) -> None:
        super().__init__()
        self.indices = indices
        empty = torch.empty(len(indices), width, dtype=like.dtype, device=like.device)
        self.weight = nn.Parameter(empty)

    def tensor_notes(self) -> Mapping[str, TensorNote]:
        """Return the initialization of the rows; they are replicated.

        `init_trained_rows_` then sets the rows to those of the base module.
        """
        return {"weight": TensorNote("zeros")}

    def forward(self, x: Tensor) -> Tensor:
        """Return the trained rows in the dtype of x.

        Reading them by a module call lets parallel layouts replace them with their local shards.
        """
        return self.weight.to(x.dtype)

    def factors(self, x: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return two factors, (..., n) and (V, n), whose product is the change to a head's logits.

        Args:
            x: hidden states.
            matrix: weight of the head, (V, D).
        """
        numbers = torch.tensor(self.indices, device=x.device)
        low = F.linear(x, self(x) - matrix.detach()[numbers].to(x.dtype))
        return low, F.one_hot(numbers, matrix.shape[0]).t().to(x.dtype)

    def _joined(
        self, module: nn.Module, inputs: tuple[Any, ...], out: Tensor, weight: float
    ) -> Tensor:
        numbers, rows = torch.tensor(self.indices, device=out.device), self(out)
        if not isinstance(module, nn.Embedding):
            bias = getattr(module, "bias", None)
            logits = F.linear(inputs[0], rows, None if bias is None else bias[numbers])
            changed = out.index_copy(-1, numbers, logits.to(out.dtype))
        else:
            order = numbers.argsort()
            ascending = numbers[order]
            at = torch.searchsorted(ascending, inputs[0]).clamp(max=len(self.indices) - 1)
            # Some embeddings (Gemma's) scale the rows that they look up.
            scale = getattr(module, "embed_scale", 1.0)
            trained = rows[order[at]] * scale
            changed = torch.where((ascending[at] == inputs[0])[..., None], trained, out)
        return changed if weight == 1 else out + weight * (changed - out)

    def extra_repr(self) -> str:
        """Return the number of tokens as text."""
        return f"{len(self.indices)} tokens"


def attach_token_rows_(model: nn.Module, name: str, indices: Mapping[str, Any]) -> list[str]:
    """Attach trained rows to embeddings and to the layers that share their weights.

    Args:
        model: any model.
        name: name of the adapter.
        indices: dict from the name of an embedding or head to token ids.

    Returns:
        names of the modules with trained rows

    Raises:
        ConfigError: an id repeats or is not in the table, or a module is not an embedding or head.
            The model is then unchanged.
    """
    parts: dict[str, TokenRows] = {}
    tables = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    for owner, numbers in indices.items():
        module: Any = model.get_submodule(owner)
        table: Any = getattr(module, "weight", None)
        is_plain = isinstance(module, (nn.Embedding, nn.Linear)) and isinstance(table, Tensor)
        if not is_plain or table.shape[0] not in tables or is_streamed(table):
            raise ConfigError(
                f"trainable_token_indices needs an unmodified embedding or head, but {owner} is "
                f"a {type(module).__name__}. Use the name of the token embedding."
            )
        _check_indices(numbers, table.shape[0])
        width = table.shape[1]
        rows = TokenRows(tuple(numbers), width, find_like(module))
        for other, tied in model.named_modules():
            if getattr(tied, "weight", None) is table and hasattr(tied, "forward"):
                part = parts.setdefault(other, TokenRows(rows.indices, width, table))
                if part.indices != rows.indices:
                    raise ConfigError(
                        f"{owner} and {other} share one weight, but have different "
                        "trainable_token_indices. Use the same ids for both."
                    )
                part.weight = rows.weight
    slot = f"{name}{TOKENS_SLOT}"
    if taken := [owner for owner in parts if hasattr(model.get_submodule(owner), slot)]:
        raise ConfigError(f"{taken[0]} already has an attribute {slot!r}. Rename the adapter.")
    for owner, part in parts.items():
        attach_part_(model.get_submodule(owner), slot, part)
    return list(parts)


def _check_indices(numbers: Any, rows: int) -> None:
    """Raise `ConfigError` unless `numbers` is a list of distinct token ids below `rows`."""
    is_list = isinstance(numbers, (list, tuple)) and len(numbers) > 0
    if not is_list or not all(type(n) is int and 0 <= n < rows for n in numbers):
        raise ConfigError(
            f"trainable_token_indices={numbers!r} must be a list of token ids from 0 to {rows - 1}."
        )
    if len(set(numbers)) < len(numbers):
        raise ConfigError(
            f"trainable_token_indices={numbers!r} contains an id twice. Remove the duplicate."
        )


@torch.no_grad()
def init_trained_rows_(module: nn.Module, part: nn.Module) -> None:
    """Set trained rows to the base module's rows, so that outputs are initially unchanged.

    Does nothing for other adapters, or if layer or adapter are on the meta device.
    """
    if not isinstance(part, TokenRows) or part.weight.is_meta:
        return
    table: Any = module.weight
    if not local_tensor(table).is_meta:
        copy_part_(part.weight, whole_tensor(table)[list(part.indices)].to(part.weight))
