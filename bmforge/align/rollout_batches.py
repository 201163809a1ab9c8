"""Generated answers of a rollout, and their collation into micro-batches."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from bmforge.batch import IGNORE_INDEX, Batch

__all__ = ["INPUT_NAMES", "RolloutAnswer", "collate_answers", "mask_answers", "read_rows"]

# Arguments of the model in a micro-batch; the objective uses the other tensors.
INPUT_NAMES = ("input_ids", "attention_mask")


@dataclass
class RolloutAnswer:
    """One generated answer of a rollout.

    Args:
        prompt: index of the answer's prompt in the order of the run.
        prompt_ids: token ids of the prompt.
        ids: token ids of the answer, including the EOS token.
        text: text of the answer.
        sampler: log-probability of each token under the policy that sampled it.
        finish_reason: reason why the answer ended.
        rewards: reward of each function; None if the function returned no reward.
        reward: weighted sum of the rewards; None if no function returned a reward.
        advantage: advantage of each token; empty before it is computed.
        is_masked: True if the answer is excluded from the loss.
        old: log-probabilities at the beginning of the update; empty if not needed.
        reference: log-probabilities of the reference model; empty if not needed.
        values: value of the state before each token, at the time of the rollout; empty without a
            value model.
        returns: targets of the value model; empty without a value model.
        logged: dict from column name to the value that reward functions logged for this answer.
        logged_metrics: metrics that reward functions logged in the call that scored this answer.
    """

    prompt: int
    prompt_ids: list[int]
    ids: list[int]
    text: str
    sampler: list[float]
    finish_reason: str
    rewards: dict[str, float | None] = field(default_factory=dict)
    reward: float | None = None
    advantage: list[float] = field(default_factory=list)
    is_masked: bool = False
    old: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)
    is_written: list[bool] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    tool_calls: int = 0
    tool_failures: int = 0
    logged: dict[str, Any] = field(default_factory=dict)
    logged_metrics: dict[str, float] = field(default_factory=dict)

    @property
    def mask(self) -> list[bool]:
        """One flag per token: True if the model generated the token."""
        return self.is_written or [True] * len(self.ids)

    def to_state(self) -> dict[str, Any]:
        """Return the answer as JSON data for a checkpoint."""
        return asdict(self)


def collate_answers(answers: Sequence[RolloutAnswer | None], names: Collection[str] = ()) -> Batch:
    """Collate answers into a micro-batch, padded on the right; None gives a padding sequence.

    Advantages and the fields in `names` are at the positions of their tokens.

    Args:
        answers: answers of the rows.
        names: fields to include: sampler, old, reference, values, returns.

    Shape:
        every tensor (B, T)
    """
    lengths = [len(a.prompt_ids) + len(a.ids) for a in answers if a is not None]
    width = max([2, *lengths])
    rows = [_make_row(answer, width, names) for answer in answers]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _make_row(
    answer: RolloutAnswer | None, width: int, names: Collection[str]
) -> dict[str, Tensor]:
    row = {
        "input_ids": torch.zeros(width, dtype=torch.int64),
        "attention_mask": torch.zeros(width, dtype=torch.int64),
        "labels": torch.full((width,), IGNORE_INDEX),
        **{n: torch.zeros(width, dtype=torch.float64) for n in ("advantages", *names)},
    }
    if answer is None:
        row["attention_mask"][:2] = 1
        return row
    start = len(answer.prompt_ids)
    end = start + len(answer.ids)
    row["input_ids"][:end] = torch.tensor([*answer.prompt_ids, *answer.ids])
    row["attention_mask"][:end] = 1
    if not answer.is_masked:
        row["labels"][start:end] = torch.tensor(
            [id if own else IGNORE_INDEX for id, own in zip(answer.ids, answer.mask, strict=True)]
        )
    for name in ("advantages", *names):
        values = answer.advantage if name == "advantages" else getattr(answer, name)
        if values:
            row[name][start:end] = torch.tensor(values, dtype=torch.float64)
    return row


def mask_answers(labels: Tensor) -> Tensor:
    """Return the mask of scored tokens; the first token of a sequence is never scored.

    Shape:
        labels: (B, T); returns (B, T)
    """
    mask = labels != IGNORE_INDEX
    mask[:, 0] = False
    return mask


def read_rows(
    answers: Sequence[RolloutAnswer | None], scores: Tensor
) -> Iterator[tuple[RolloutAnswer, list[float]]]:
    """Yield each answer of a micro-batch with the scores of its tokens.

    Shape:
        scores: (B, T), at the positions of the tokens
    """
    for answer, row in zip(answers, scores.tolist(), strict=True):
        if answer is not None:
            start = len(answer.prompt_ids)
            yield answer, row[start : start + len(answer.ids)]
