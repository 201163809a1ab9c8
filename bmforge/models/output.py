"""Output type of all models; fields that were not computed are None."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["ModelOutput"]


class ModelOutput(NamedTuple):
    """Results of a forward pass.

    Shape:
        loss: scalar, if labels are passed
        logits: (B, T, V) for a language model without labels; (B, L) or (B, T, L) for a classifier
        last_hidden_state: (B, T, D), after the final norm
        hidden_states: num_layers + 1 tensors (B, T, D), if requested
        pooler_output: (B, D), for encoders with a pooler
        start_logits, end_logits: (B, T), for question answering
        encoder_last_hidden_state: (B, S, D), for encoder-decoders
        encoder_hidden_states: hidden states of the encoder, if requested
        router_logits: one (B * T, E) tensor per layer with experts
        aux_loss: scalar, the unweighted load-balancing loss; `loss` includes it with its weight
        stage_outputs: activations for the next pipeline stage; all other fields are then None
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    pooler_output: Tensor | None = None
    start_logits: Tensor | None = None
    end_logits: Tensor | None = None
    encoder_last_hidden_state: Tensor | None = None
    encoder_hidden_states: tuple[Tensor, ...] | None = None
    router_logits: tuple[Tensor, ...] | None = None
    aux_loss: Tensor | None = None
    stage_outputs: tuple[Tensor, ...] | None = None
