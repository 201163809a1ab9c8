"""What the old models return, by position and by name."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["BaseModelOutput", "BaseModelOutputWithPooling", "Seq2SeqModelOutput"]


class BaseModelOutput(NamedTuple):
    """Results of a decoder.

    Shape:
        last_hidden_state: (B, T, D)
        logits: (B, T, V), or (B, T, cls_head); None unless asked for
        hidden_states: num_layers + 1 tensors (B, T, D), when asked for
    """

    last_hidden_state: Tensor
    past_key_values: Any = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: None = None


class BaseModelOutputWithPooling(NamedTuple):
    """Results of an encoder; as `BaseModelOutput`.

    Shape:
        pooler_output: (B, D)
    """

    last_hidden_state: Tensor
    pooler_output: Tensor | None = None
    past_key_values: Any = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: None = None


class Seq2SeqModelOutput(NamedTuple):
    """Results of an encoder-decoder; as `BaseModelOutput`.

    Shape:
        encoder_last_hidden_state: (B, S, D)
    """

    last_hidden_state: Tensor
    encoder_last_hidden_state: Tensor | None = None
    past_key_values: Any = None
    logits: Tensor | None = None
    encoder_hidden_states: tuple[Tensor, ...] | None = None
    decoder_hidden_states: tuple[Tensor, ...] | None = None
    decoder_attentions: None = None
    cross_attentions: None = None
    encoder_attentions: None = None
