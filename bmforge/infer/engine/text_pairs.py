"""Scores of text pairs by a cross-encoder: an encoder with a single logit, such as a reranker."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bmforge.infer.engine.tasks import SteppedTask
from bmforge.surgery import eval_mode
from bmforge.tokenizers.segments import encode_segments
from bmforge.tune.delta.selection import DeltaChoice, check_names

__all__ = ["PairRow", "encode_pairs", "pair_task", "rate_pairs", "is_cross_encoder"]

PairRow: TypeAlias = tuple[list[int], list[int]]  # token ids and segment ids


def is_cross_encoder(model: Any) -> bool:
    """Return True if a model is a cross-encoder (reranker), which scores a pair of texts."""
    config, traits = model.config, model.traits
    is_encoder = traits.attention == "bidirectional" and not traits.has_images
    return is_encoder and config.head == "sequence_classification" and config.num_labels == 1


def encode_pairs(model: Any, tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> list[PairRow]:
    """Return the token ids and segment ids of text pairs, without truncation."""
    longest = 8 + max((len(tokenizer.encode(text)) for pair in pairs for text in pair), default=0)
    last = model.config.num_segments - 1
    rows = []
    for pair in pairs:
        ids, segments = encode_segments(pair, tokenizer, 2 * longest, model.traits.marks_between)
        rows.append((ids, [min(segment, last) for segment in segments]))
    return rows


@torch.no_grad()
def rate_pairs(model: Any, rows: Sequence[PairRow]) -> Tensor:
    """Return the relevance of text pairs, between 0 and 1: the sigmoid of the logit.

    Args:
        model: cross-encoder, see `is_cross_encoder`.
        rows: token ids and segment ids, as returned by `encode_pairs`.

    Shape:
        returns (B,) in fp32
    """
    device = next(model.parameters()).device
    scores = []
    with eval_mode(model):
        for ids, segments in rows:
            inputs = {"input_ids": ids}
            if model.config.num_segments > 1:
                inputs["token_type_ids"] = segments
            tensors = {name: torch.tensor([row], device=device) for name, row in inputs.items()}
            scores.append(model(**tensors).logits[0, 0].float().sigmoid())
    return torch.stack(scores)


def pair_task(
    rows: Sequence[PairRow], model: Any, *, deadline_s: float | None, delta: DeltaChoice
) -> SteppedTask:
    """Return a task that scores text pairs, for `Engine.submit_task`.

    Args:
        rows: token ids and segment ids, as returned by `encode_pairs`.
        model: cross-encoder.
        deadline_s: deadline in seconds, as in `EngineTask`.
        delta: adapter to activate, by name; None means the model's active adapters.
    """
    rate = partial(rate_pairs, model, rows)
    return SteppedTask(model, rate, deadline_s, check_names(model, delta))
