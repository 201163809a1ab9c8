"""What a model returns: one tuple for all families, with None where something was not computed."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["ModelOutput"]


class ModelOutput(NamedTuple):
    """Results of a forward pass.

    Shape:
        loss: scalar, with labels
        logits: (B, T, V), of a language model without labels; (B, L) or (B, T, L) of a classifier
        last_hidden_state: (B, T, D), after the last norm
        hidden_states: num_layers + 1 tensors (B, T, D), when asked for
        pooler_output: (B, D), of encoders with a pooler
        start_logits, end_logits: (B, T), of question answering
        encoder_last_hidden_state: (B, S, D), of encoder-decoders
        encoder_hidden_states: theirs likewise, of the encoder, when asked for
        router_logits: one (B * T, E) tensor per layer with experts
        aux_loss: scalar, the experts' balance, contained in `loss` with its weight
        carry: of a stage of a pipeline, what the next one needs; nothing else is there then
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
    carry: tuple[Tensor, ...] | None = None
