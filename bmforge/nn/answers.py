"""How far a student's predictions are from a teacher's best answers, which were kept before.

Of every token there are the teacher's k most likely answers and how likely the rest is together.
The loss is KL over k + 1 outcomes, those and the rest as one; with k the whole vocabulary it is
that of `linear_distillation`. Full logits never exist: some tokens go through the head at a time,
and once more in backward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bmforge.batch import IGNORE_INDEX
from bmforge.device import wide_dtype
from bmforge.errors import ShapeError
from bmforge.nn.distillation import HeadInput

__all__ = ["Answers", "compare_answers", "linear_answers", "pick_answers"]

# Logits in flight.
_CHUNK_ELEMENTS = 1 << 23


class Answers(NamedTuple):
    """What a teacher answers at M tokens.

    Shape:
        ids: (M, k), its most likely tokens; log_probs: (M, k), of these; rest: (M,), the logarithm
        of what all others have together, -inf where there are none
    """

    ids: Tensor
    log_probs: Tensor
    rest: Tensor


def make_logits(given: HeadInput) -> Tensor:
    """Return the logits of a few tokens, (M, V), in fp32 or wider."""
    found = F.linear(given.hidden, given.weight, given.bias)
    for low, rows in given.added:
        found = found + F.linear(low, rows)
    return found.to(wide_dtype(found.dtype))


def pick_answers(logits: Tensor, count: int, temperature: float = 1.0) -> Answers:
    """Return the most likely answers.

    Args:
        logits: of all tokens of the vocabulary.
        count: k.
        temperature: T, which logits are divided by.

    Shape:
        logits: (M, V)
    """
    logs = torch.log_softmax(logits.to(wide_dtype(logits.dtype)) / temperature, -1)
    best, ids = logs.topk(count, -1)
    others = logs.scatter(-1, ids, -torch.inf)
    return Answers(ids, best, torch.logsumexp(others, -1))


def compare_answers(logits: Tensor, answers: Answers, temperature: float = 1.0) -> Tensor:
    """Return KL(teacher || student) over the answers and the rest as one, times T^2, per token.

    Shape:
        logits: (M, V); returns (M,)
    """
    scaled = logits / temperature
    whole = torch.logsumexp(scaled, -1, keepdim=True)
    mine = scaled.gather(-1, answers.ids) - whole
    given = answers.log_probs.to(mine)
    known = _share(given, mine).sum(-1)
    rest = answers.rest.to(mine)
    has_rest = rest > -torch.inf
    others = scaled.scatter(-1, answers.ids, -torch.inf)
    # Where nothing is left over no gradient may come of the logarithm of nothing.
    others = torch.where(has_rest[:, None], others, torch.zeros_like(others))
    mass = torch.logsumexp(others, -1) - whole[:, 0]
    left = _share(rest.masked_fill(~has_rest, 0), mass).masked_fill(~has_rest, 0)
    return (known + left) * temperature**2


def _share(theirs: Tensor, mine: Tensor) -> Tensor:
    """Return p (log p - log q); what the teacher rules out counts nothing."""
    share = theirs.exp()
    return (share * (theirs - mine)).masked_fill(share == 0, 0)


def linear_answers(
    student: HeadInput,
    answers: Answers,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    num_items: float | Tensor | None = None,
) -> Tensor:
    """Return the mean of `compare_answers` over tokens with a label, without full logits.

    Args:
        student: what its head makes logits of; it gets the gradients.
        answers: of the same tokens.
        labels: rows with -100 count nothing; the rest is not looked at.
        temperature: the one that the answers were taken at.
        num_items: what the sum over rows is divided by; None divides by the number of labels.

    Shape:
        labels: (M,); returns a scalar in fp32 or wider

    Raises:
        ShapeError: the answers are of other tokens.
    """
    if answers.ids.shape[0] != student.hidden.shape[0]:
        raise ShapeError(
            f"the student predicts {student.hidden.shape[0]} tokens, and there are answers of "
            f"{answers.ids.shape[0]}. Give both the same batch."
        )
    kept = labels != IGNORE_INDEX
    if num_items is None:
        num_items = kept.sum().clamp(min=1)

    def part(start: int, stop: int) -> Tensor:
        added = tuple((low[start:stop], rows) for low, rows in student.added)
        few = HeadInput(student.hidden[start:stop], student.weight, student.bias, added)
        theirs = Answers(*(tensor[start:stop] for tensor in answers))
        found = compare_answers(make_logits(few), theirs, temperature)
        return found.masked_fill(~kept[start:stop], 0).sum()

    step = max(1, _CHUNK_ELEMENTS // student.weight.shape[0])
    count = student.hidden.shape[0]
    parts = [
        checkpoint(part, start, min(start + step, count), use_reentrant=False)
        for start in range(0, count, step)
    ]
    return torch.stack(parts).sum() / num_items
