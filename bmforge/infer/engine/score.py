"""Computes likelihoods of texts without storing the logits of all their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bmforge.balance import leave_out_balance
from bmforge.batch import IGNORE_INDEX
from bmforge.errors import ConfigError, DataError
from bmforge.surgery import eval_mode

__all__ = ["score_pairs"]


def score_pairs(model: Any, tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> list[float]:
    """Return the mean loss of each text after its prompt, in nats per token.

    The head computes the loss in chunks; `infer.score.score_texts` computes all logits at once.

    Args:
        model: decoder with causal attention, or an encoder-decoder.
        tokenizer: the model's tokenizer.
        pairs: pairs (prompt, text to score).

    Raises:
        ConfigError: there are no pairs, or the model cannot score a text.
        DataError: a prompt or a text has no tokens.
    """
    if model.traits.attention not in ("causal", "encoder-decoder"):
        raise ConfigError(
            f"a {type(model).__name__} cannot score texts (needed: a causal language model, or "
            "an encoder-decoder with a language-model head)."
        )
    if not pairs:
        raise ConfigError("pairs is empty. Pass at least one pair (prompt, text) to score.")
    device = next(model.parameters()).device
    losses = []
    with eval_mode(model), torch.no_grad(), leave_out_balance(model):
        for number, pair in enumerate(pairs):
            prompt, text = (tokenizer.encode(part) for part in pair)
            if prompt and model.traits.is_encoder_decoder:
                prompt = tokenizer.encode_prompt(pair[0])
            elif prompt:
                prompt = [*tokenizer.prompt_prefix, *prompt]
            if not prompt or not text:
                raise DataError(
                    f"pair {number} has {len(prompt)} prompt tokens and {len(text)} text "
                    "tokens (needed: at least one of each)."
                )
            losses.append(float(model(**_inputs(model, prompt, text, device)).loss))
    return losses


def _inputs(
    model: Any, prompt: Sequence[int], text: Sequence[int], device: torch.device
) -> dict[str, Tensor]:
    if model.traits.is_encoder_decoder:
        source, target = (torch.tensor([ids], device=device) for ids in (prompt, text))
        return {"input_ids": source, "labels": target}
    ids = torch.tensor([[*prompt, *text]], device=device)
    labels = ids.clone()
    labels[:, : len(prompt)] = IGNORE_INDEX
    return {"input_ids": ids, "labels": labels}
