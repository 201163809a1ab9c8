"""Inputs and options of a model's forward call, and its attention masks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from bmforge.infer.cache import KVCache

__all__ = ["CallOptions", "TextInputs", "lengths_to_mask", "one_of", "expand_mask"]

# Arguments that ModelCenter accepted without using them.
_UNUSED = (
    *("head_mask", "decoder_head_mask", "cross_attn_head_mask"),
    *("encoder_hidden_states", "encoder_attention_mask", "output_attentions"),
    *("output_decoder_attentions", "output_decoder_hidden_states"),
)


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """Keyword arguments of `forward` that all language models have.

    Args:
        use_cache: return a KV cache.
        past_key_values: KV cache of an earlier call; it is extended in place.
        inputs_embeds: embeddings instead of token ids.
        output_logits: compute logits now (True), never (False) or when they are read (None).
        output_hidden_states: return the hidden states of all layers.
        return_dict: return a `ModelOutput` instead of a tuple.
        return_logits: return only the logits, as early versions did.
    """

    use_cache: bool = False
    past_key_values: KVCache | None = None
    inputs_embeds: Tensor | None = None
    output_logits: bool | None = None
    output_hidden_states: bool | None = None
    return_dict: bool = True
    return_logits: bool = False

    @classmethod
    def read(cls, options: dict[str, Any]) -> Self:
        """Select the options among keyword arguments; those that ModelCenter ignored are dropped.

        Raises:
            TypeError: an argument is unknown.
        """
        names = [field.name for field in fields(cls)]
        for name in options:
            if name not in names and name not in _UNUSED:
                raise TypeError(f"forward() got an unexpected keyword argument {name!r}")
        return cls(**{name: options[name] for name in names if name in options})

    @property
    def past(self) -> int:
        """Number of cached tokens."""
        return 0 if self.past_key_values is None else self.past_key_values.length


class TextInputs(NamedTuple):
    """Text inputs of a forward call.

    Attributes:
        ids, embeds: token ids or embeddings; one of them is None.
        inputs: `ids` or `embeds`, whichever is not None.
        width: sequence length, including cached tokens.
        cache: KV cache to extend; if None, keys and values are not cached.
        options: options of the call.
    """

    ids: Tensor | None
    embeds: Tensor | None
    inputs: Tensor
    width: int
    cache: KVCache | None
    options: CallOptions


def lengths_to_mask(length: Tensor, width: int) -> Tensor:
    """Return an attention mask with 1 for the first `length` tokens of every sequence.

    Shape:
        length: (B,); returns (B, width)
    """
    return (torch.arange(width, device=length.device)[None] < length[:, None]).long()


def expand_mask(attention_mask: Tensor, length: int) -> Tensor:
    """Convert a pairwise mask to bmforge's format; fully masked queries attend to all keys.

    Shape:
        attention_mask: (B, T or past + T, past + T); returns (B, 1, T, past + T)
    """
    mask = attention_mask.bool()[:, None, -length:]
    return mask | ~mask.any(-1, keepdim=True)


def one_of(ids: Tensor | None, embeds: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return (ids, None), or (None, embeddings) if embeddings are given."""
    return (ids, None) if embeds is None else (None, embeds)
