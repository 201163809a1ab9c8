"""Zero-shot classification: of several texts, the one that a language model finds likeliest.

Each class is written as a text after a prompt; the class with the lowest mean loss of its text is
chosen. What stands in the prompt is not scored.

Source: ``zero-shot-cls.py`` of TsinghuaAI/CPM-1-Generate, which puts the class into the prompt and
scores the same text each time ("这是关于{class}的文章：" and then the article).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bmforge.batch import IGNORE_INDEX
from bmforge.errors import ConfigError, DataError
from bmforge.infer.generate import evaluating
from bmforge.models.base import Model

__all__ = ["Choice", "choose_text", "score_texts"]

# The others read a whole text in both directions, so its own tokens would give it away.
_SCORES = ("left", "apart")


class Encoder(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""


class Choice(NamedTuple):
    """What was chosen.

    Attributes:
        option: its number.
        losses: mean loss of every option's text, in nats per token.
    """

    option: int
    losses: list[float]


def choose_text(
    model: Model, tokenizer: Encoder, options: Sequence[tuple[str, str]], begin: Sequence[int] = ()
) -> Choice:
    """Return which option is the likeliest.

    Args:
        model: any decoder-only language model that reads from left to right, or an encoder-decoder.
        tokenizer: that of the model.
        options: (prompt, text that is scored after it) of every class.
        begin: ids that the model wants before every prompt; CPM-1 has none.

    Raises:
        ConfigError: no option, or a model that cannot score a text.
        DataError: a text without tokens, or a decoder's prompt without any before it.
    """
    pairs = [([*begin, *tokenizer.encode(p)], tokenizer.encode(t)) for p, t in options]
    losses = score_texts(model, pairs)
    return Choice(min(range(len(losses)), key=losses.__getitem__), losses)


def score_texts(
    model: Model, options: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[float]:
    """Return the mean loss of each option's text after its prompt, in nats per token.

    One option is read at a time, so that rows need no padding and the logits are never whole.

    Args:
        model: as in `choose_text`.
        options: (ids of the prompt, ids of the text).

    Raises:
        ConfigError: no option, or a model that cannot score a text.
        DataError: a text without tokens, or a prompt without any.
    """
    _check(model, options)
    device = next(model.parameters()).device
    losses = []
    with evaluating(model), torch.no_grad():
        for prompt, text in options:
            ids, scored = (torch.tensor([list(part)], device=device) for part in (prompt, text))
            losses.append(float(_read(model, ids, scored)))
    return losses


def _read(model: Model, prompt: Tensor, text: Tensor) -> Tensor:
    """Return the mean loss of a text, (1, T), after a prompt, (1, P)."""
    if model.traits.reads == "apart":
        return model(input_ids=prompt, labels=text).loss
    labels = torch.cat((torch.full_like(prompt, IGNORE_INDEX), text), 1)
    if not model.shifts_labels:
        labels = torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], IGNORE_INDEX)), 1)
    return model(torch.cat((prompt, text), 1), labels=labels).loss


def _check(model: Model, options: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
    if model.traits.reads not in _SCORES or not model.traits.writes:
        raise ConfigError(
            f"a {type(model).__name__} with the head {model.config.head!r} cannot score a text: "
            "needed is a language model that reads from left to right, or an encoder-decoder with "
            "its language-model head."
        )
    if not options:
        raise ConfigError("there is no option to choose from; give at least one.")
    for number, (prompt, text) in enumerate(options):
        if not len(text) or not len(prompt):
            raise DataError(
                f"option {number} has {len(prompt)} tokens of prompt and {len(text)} of text; each "
                "needs at least one."
            )
