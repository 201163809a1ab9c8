"""Runs a model on prompts; returns logits, and optionally hidden states, at the answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmforge.nn.prompt import look_up

__all__ = ["PositionOutputs", "run_at_answers", "pick_places"]


class PositionOutputs(NamedTuple):
    """Outputs of a model at M positions of every sequence.

    Shape:
        logits: (B, M, V); hidden: (B, M, D), None if not requested
    """

    logits: Tensor
    hidden: Tensor | None


def run_at_answers(
    model: Any, inputs: Mapping[str, Tensor], mask_at: Tensor, hidden: bool = False
) -> PositionOutputs | None:
    """Run a model; return its outputs at the answer positions.

    A bmforge model applies its head only at these positions, a transformers model at all positions.
    On a pipeline stage other than the last the result is None.

    Args:
        model: bmforge model on any layout, or a model that is called like one of transformers.
        inputs: arguments of the model.
        mask_at: answer positions.
        hidden: True to return the last hidden states too.

    Shape:
        mask_at: (B, M)
    """
    if hasattr(model, "traits"):
        out = model(**inputs, logits_at=mask_at)
        if out.logits is None:
            return None
        return PositionOutputs(
            out.logits, pick_places(out.last_hidden_state, mask_at) if hidden else None
        )
    arguments = dict(inputs)
    # Modules that are not from transformers, such as ModelCenter's, need no such method.
    table = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    if getattr(table, "prompt", None) is not None:
        arguments["inputs_embeds"] = look_up(table, arguments.pop("input_ids"))
    out = model(**arguments, output_hidden_states=hidden)
    states = None
    if hidden:
        key = "decoder_hidden_states" if "decoder_input_ids" in arguments else "hidden_states"
        states = pick_places(getattr(out, key)[-1], mask_at)
    return PositionOutputs(pick_places(out.logits, mask_at), states)


def pick_places(x: Tensor, places: Tensor) -> Tensor:
    """Select M positions from every sequence: x (B, T, ...), places (B, M) -> (B, M, ...)."""
    return x[torch.arange(len(places), device=x.device)[:, None], places]
