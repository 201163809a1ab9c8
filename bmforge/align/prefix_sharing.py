"""Prefix sharing: sequences in which both answers of a pair follow one copy of the prompt.

The prompt is computed once instead of twice. A sequence has three segments: the prompt without its
last token, the last prompt token with the chosen answer, and the last prompt token again with the
rejected answer. Tokens attend to the prompt and within their segment, and both answers have the
same positions as in separate sequences. The last prompt token is repeated so that every label is
predicted by the token before it, as in ordinary sequences.

Source: Wang and Hegde, "Accelerating direct preference optimization with prefix sharing" (2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmforge.batch import IGNORE_INDEX

__all__ = [
    "SEGMENTS",
    "SharedRow",
    "chosen_rows",
    "is_shared",
    "model_inputs",
    "pairs_of",
    "share_prompt",
    "sum_answers",
]

SEGMENTS = "segment_ids"
_PROMPT, _CHOSEN, _REJECTED = 1, 2, 3  # 0 is padding


class SharedRow(NamedTuple):
    """One token sequence with both answers of a pair.

    Args:
        ids: token ids.
        labels: token ids to score, -100 elsewhere; not shifted.
        segments: 1 for the prompt, 2 for the chosen and 3 for the rejected answer.
        positions: position of each token in the sequence of prompt and answer.
    """

    ids: list[int]
    labels: list[int]
    segments: list[int]
    positions: list[int]


def share_prompt(
    answers: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> SharedRow:
    """Join the two sequences of a pair into one, with a single copy of the common prompt.

    Args:
        answers: (ids, labels) of the sequences with the chosen and with the rejected answer.
    """
    length = min(_first_label(labels) for _, labels in answers)
    first, second = (ids[:length] for ids, _ in answers)
    shared = next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), length
    )
    start = max(shared - 1, 0)
    row = SharedRow(
        list(answers[0][0][:start]),
        [IGNORE_INDEX] * start,
        [_PROMPT] * start,
        list(range(start)),
    )
    for segment, (ids, labels) in zip((_CHOSEN, _REJECTED), answers, strict=True):
        row.ids.extend(ids[start:])
        row.labels.extend(labels[start:])
        row.segments.extend([segment] * (len(ids) - start))
        row.positions.extend(range(start, len(ids)))
    return row


def _first_label(labels: Sequence[int]) -> int:
    return next(n for n, label in enumerate(labels) if label != IGNORE_INDEX)


def is_shared(batch: Mapping[str, Tensor]) -> bool:
    """Return True if each sequence of a batch contains both answers of a pair."""
    return SEGMENTS in batch


def model_inputs(batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the arguments with which a model scores a batch, without labels.

    Shape:
        attention_mask of shared rows: (B, 1, T, T), True where a query attends to a key
    """
    if not is_shared(batch):
        return {"input_ids": batch["input_ids"]}
    segments = batch[SEGMENTS]
    positions = torch.arange(segments.shape[1], device=segments.device)
    is_earlier = positions[None, :] <= positions[:, None]
    query, key = segments[:, :, None], segments[:, None, :]
    mask = is_earlier & ((query == key) | (key == _PROMPT))
    names = ("input_ids", "position_ids")
    return {**{name: batch[name] for name in names}, "attention_mask": mask[:, None]}


def sum_answers(values: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Sum the values of each answer's tokens; the two answers of a pair are adjacent.

    Args:
        values: value of each token; 0 outside the answers.
        batch: batch to which the values belong.

    Shape:
        values: (2B, T), or (B, T) if both answers of a pair share a row; returns (2B,)
    """
    if not is_shared(batch):
        return values.sum(1)
    segments = batch[SEGMENTS]
    sums = [values.where(segments == segment, 0).sum(1) for segment in (_CHOSEN, _REJECTED)]
    return torch.stack(sums, 1).flatten()


def pairs_of(batch: Mapping[str, Tensor]) -> Tensor:
    """Return a mask (B,) of the pairs that have labels; pairs without labels are padding.

    An answer without labels in a pair with labels is the empty text, with log-probability 0.
    """
    has_labels = (batch["labels"] != IGNORE_INDEX).any(1)
    return has_labels if is_shared(batch) else has_labels[::2] | has_labels[1::2]


def chosen_rows(values: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the values at chosen answers and their prompts; in shared sequences, 0 elsewhere.

    Shape:
        values: (2B, T), or (B, T) if both answers of a pair share a row; returns (B, T)
    """
    if not is_shared(batch):
        return values[::2]
    segments = batch[SEGMENTS]
    is_chosen = (segments == _PROMPT) | (segments == _CHOSEN)
    return torch.where(is_chosen, values, torch.zeros_like(values))
