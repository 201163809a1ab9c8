"""Helpers for calling a transformers model: supported arguments, masks, and outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.models.transformers.structure import accepted_arguments

__all__ = [
    "ForeignCache",
    "cache_argument",
    "call_arguments",
    "count_positions",
    "document_mask",
    "hidden_of",
    "ReplacedChild",
    "with_hidden",
    "wrap_encoded",
]

_CACHES = ("cache", "past_key_values", "cache_params", "state", "mems")


def cache_argument(module: nn.Module) -> str:
    """Return the name of the KV cache argument of a module's forward; "" if there is none."""
    names, _ = accepted_arguments(module)
    return next((name for name in _CACHES if name in names), "")


def call_arguments(module: nn.Module, arguments: dict[str, Any], *, cached: bool) -> dict[str, Any]:
    """Return the arguments that are not None, and `use_cache` if the module supports it.

    Args:
        module: transformers model or its base model (body).
        arguments: mapping from argument name to value; None values are dropped.
        cached: True if the call must return a KV cache for the next call.

    Raises:
        ConfigError: the forward does not accept an argument.
    """
    names, passes_on = accepted_arguments(module)
    chosen = {name: value for name, value in arguments.items() if value is not None}
    if "position_ids" in chosen and not passes_on and "position_ids" not in names:
        chosen.pop("position_ids")  # models that count positions themselves
    unknown = [name for name in chosen if name not in names and not passes_on]
    if unknown:
        raise ConfigError(
            f"a {type(module).__name__} does not support the arguments {', '.join(unknown)} "
            f"(allowed: {', '.join(sorted(names - {'self'}))}). Leave the unsupported arguments "
            "out."
        )
    if "use_cache" in names:
        chosen["use_cache"] = cached
    return chosen


def hidden_of(out: Any) -> Tensor:
    """Return the last hidden states in the output of a base model."""
    hidden = getattr(out, "last_hidden_state", None)
    return out[0] if hidden is None else hidden


def document_mask(document_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an additive causal mask for packed sequences: tokens attend within documents.

    Shape:
        document_ids: (B, T) -> (B, 1, T, T)
    """
    count = document_ids.shape[1]
    sees = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    sees = sees & torch.ones(count, count, dtype=torch.bool, device=sees.device).tril()
    mask = torch.zeros(sees.shape, dtype=dtype, device=sees.device)
    return mask.masked_fill(~sees, torch.finfo(dtype).min)


def count_positions(document_ids: Tensor) -> Tensor:
    """Return positions that restart from 0 at every document.

    Shape:
        document_ids: (B, T) -> (B, T)
    """
    places = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return places - (places * starts).cummax(1).values


class ForeignCache:
    """KV cache that wraps transformers' own cache classes.

    Attributes:
        past: cache object of transformers; None before the first call.
        length: number of cached tokens.
        step: always None, as native decoding steps do not apply.
    """

    def __init__(self) -> None:
        self.past: Any = None
        self.length = 0
        self.step: Any = None

    @property
    def size_bytes(self) -> int:
        """Size of the tensors in the cache in bytes."""
        layers = getattr(self.past, "layers", ())
        tensors = [t for layer in layers for t in vars(layer).values() if isinstance(t, Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def reorder(self, rows: Tensor) -> None:
        """Replace the cached sequences with copies of those at the batch indices `rows`."""
        self.past.reorder_cache(rows)


class _Replay(nn.Module):
    """Replacement for the base model; its `forward` returns a precomputed output."""

    def __init__(self, out: Any) -> None:
        super().__init__()
        self.out = out

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the precomputed output."""
        return self.out


class ReplacedChild:
    """Context manager: replace a submodule with a module that returns the output `out`."""

    def __init__(self, module: nn.Module, name: str, out: Any) -> None:
        owner, _, self.key = name.rpartition(".")
        self.owner, self.out = module.get_submodule(owner), out

    def __enter__(self) -> None:
        self.old = self.owner._modules[self.key]
        self.owner._modules[self.key] = _Replay(self.out)

    def __exit__(self, *error: Any) -> None:
        self.owner._modules[self.key] = self.old


def with_hidden(out: Any, hidden: Tensor) -> Any:
    """Return a copy of a base model's output with other last hidden states."""
    if hasattr(out, "items"):
        return type(out)(**{**out, "last_hidden_state": hidden})
    return (hidden, *out[1:])


def wrap_encoded(hidden: Tensor) -> Any:
    """Return the encoder's hidden states as an encoder output of transformers."""
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=hidden)
