"""Encodes an example as one prompt, or as several to score label words of several tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmforge.batch import IGNORE_INDEX
from bmforge.tune.prompt.template import Encoded, Template
from bmforge.tune.prompt.truncate import Cut

__all__ = ["Question", "encode_question", "collate_questions", "score_words"]


class Question(NamedTuple):
    """The prompts of an example and the label words to score with them.

    Attributes:
        prompts: K prompts; only one if the verbalizer scores single tokens at the masks.
        words: token ids of each of W words; [] if the verbalizer scores single tokens.
        which: index of the prompt in which each word is scored.
    """

    prompts: list[Encoded]
    words: list[list[int]]
    which: list[int]


def encode_question(
    template: Template,
    verbalizer: Any,
    example: Any,
    max_seq_len: int = 512,
    cut: Cut = "tail",
    name: str = "the example",
) -> Question:
    """Encode an example as a `Question`; the other arguments are those of `Template.encode`."""
    if verbalizer.takes != "words":
        return Question([template.encode(example, max_seq_len, cut, name)], [], [])
    words = verbalizer.answers(example)
    shapes = [template.question_of(word) for word in words]
    unique = list(dict.fromkeys(shapes))
    prompts = [
        template.encode(example, max_seq_len, cut, name, words[shapes.index(shape)])
        for shape in unique
    ]
    which = [unique.index(shape) for shape in shapes]
    answers = [  # a word, then the template's text after it, which is scored too
        [*word, *prompts[at].predicted[len(word) :]] for word, at in zip(words, which, strict=True)
    ]
    return Question(prompts, answers, which)


def collate_questions(questions: Sequence[Question], pad_id: int) -> dict[str, list[Any]]:
    """Collate questions into the columns of a batch, padded on the right.

    B questions have K prompts each, M masks per prompt, and W label words of at most L tokens;
    `which` is the index of the prompt in which each word is scored.

    Shape:
        input_ids, attention_mask and other per-token columns: (B K, T); mask_at: (B K, M);
        answers: (B, W, L); which: (B, W)
    """
    times = max(len(question.prompts) for question in questions)
    prompts = [
        prompt
        for question in questions
        for prompt in (question.prompts + question.prompts[-1:] * times)[:times]
    ]
    width = max(map(len, prompts))
    columns: dict[str, list[Any]] = {
        "input_ids": _fill([prompt.input_ids for prompt in prompts], pad_id, width),
        "attention_mask": _fill([[1] * len(prompt) for prompt in prompts], 0, width),
        "mask_at": _fill([prompt.mask_at for prompt in prompts], 0),
    }
    for name in prompts[0].columns:
        columns[name] = _fill([prompt.columns[name] for prompt in prompts], 0, width)
    for name in prompts[0].fixed:
        columns[name] = [prompt.fixed[name] for prompt in prompts]
    if prompts[0].decoder_input_ids:
        columns["decoder_input_ids"] = _fill([p.decoder_input_ids for p in prompts], pad_id)
    if questions[0].words:
        longest = max(len(word) for question in questions for word in question.words)
        columns["answers"] = [_fill(q.words, IGNORE_INDEX, longest) for q in questions]
        columns["which"] = [question.which for question in questions]
    return columns


def _fill(rows: Sequence[Sequence[int]], filling: int, width: int = 0) -> list[list[int]]:
    width = width or max(map(len, rows))
    return [[*row, *[filling] * (width - len(row))] for row in rows]


def score_words(logits: Tensor, answers: Tensor, which: Tensor) -> Tensor:
    """Return the log-probability of every label word, summed over its tokens.

    Args:
        logits: logits at the answer positions of all prompts.
        answers: tokens of the words, padded with -100.
        which: index of the prompt in which each word is scored.

    Shape:
        logits: (B K, M, V); answers: (B, W, L <= M); which: (B, W); returns (B, W)
    """
    count, _, length = answers.shape
    times = logits.shape[0] // count
    device = logits.device
    row = (torch.arange(count, device=device)[:, None] * times + which)[..., None]
    position = torch.arange(length, device=device)
    chances = logits.log_softmax(-1)[row, position, answers.clamp(min=0)]
    return (chances * (answers != IGNORE_INDEX)).sum(-1)
