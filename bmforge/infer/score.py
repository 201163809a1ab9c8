"""Likelihoods of texts, class logits and greedy answers, for evaluation in any parallel layout.

`choose_text` is zero-shot classification: each class is written as a text after a prompt, and the
class with the lowest mean loss of its text is chosen. The prompt itself is not scored.

`score_answers`, `score_pairs`, `score_classes` and `write_answers` work in any parallel layout. The
inputs are divided over the processes; if their number is not divisible, some inputs are computed
twice and the second results are dropped.

Source: ``zero-shot-cls.py`` of TsinghuaAI/CPM-1-Generate, which puts the class into the prompt and
scores the same text each time ("这是关于{class}的文章：" and then the article).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from bmforge.batch import Batch
from bmforge.data.tasks.rows import Pair
from bmforge.errors import ConfigError, DataError
from bmforge.infer.generation import generate
from bmforge.models.base import Model
from bmforge.models.seq2seq import shift_right
from bmforge.parallel import ROW_AXES, World, mesh_of, reshard_, sum_over_axes
from bmforge.surgery import eval_mode

__all__ = [
    "TextChoice",
    "Likelihood",
    "choose_text",
    "collect_rows",
    "roll_windows",
    "score_answers",
    "score_classes",
    "score_pairs",
    "score_texts",
    "write_answers",
]

_WIDTH_STEP = 64
# Bidirectional models see the tokens to predict, so they cannot score a text.
_SCORES = ("causal", "encoder-decoder")


class Encoder(Protocol):
    """Interface of the tokenizers that the functions for scoring accept."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""


class Likelihood(NamedTuple):
    """Likelihood of an answer.

    Attributes:
        log_prob: log-probability of the whole answer, in nats.
        is_greedy: whether every token is the most likely one at its position.
    """

    log_prob: float
    is_greedy: bool


class TextChoice(NamedTuple):
    """Result of `choose_text`.

    Attributes:
        option: index of the chosen option.
        losses: mean loss of every option's text, in nats per token.
    """

    option: int
    losses: list[float]


def choose_text(
    model: Model, tokenizer: Encoder, options: Sequence[tuple[str, str]], begin: Sequence[int] = ()
) -> TextChoice:
    """Return the most likely option and the losses of all options.

    Args:
        model: decoder-only language model with causal attention, or an encoder-decoder.
        tokenizer: the model's tokenizer.
        options: pair (prompt, text to score) of every class.
        begin: token ids that the model expects before every prompt (none for CPM-1).

    Raises:
        ConfigError: there is no option, or the model cannot score a text.
        DataError: a text has no tokens, or the prompt of a decoder has none.
    """
    pairs = [([*begin, *tokenizer.encode(p)], tokenizer.encode(t)) for p, t in options]
    losses = score_texts(model, pairs)
    return TextChoice(min(range(len(losses)), key=losses.__getitem__), losses)


def score_texts(
    model: Model, options: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[float]:
    """Return the mean loss of each option's text after its prompt, in nats per token.

    Each option is a separate batch, so that no padding is needed; logits are computed for the text
    only.

    Args:
        model: model as in `choose_text`.
        options: pairs (prompt ids, text ids).

    Raises:
        ConfigError: there is no option, or the model cannot score a text.
        DataError: a text or a prompt has no tokens.
    """
    _check(model, options)
    device = next(model.parameters()).device
    losses = []
    with eval_mode(model), torch.no_grad():
        for prompt, text in options:
            pair = Pair(list(prompt), list(text))
            losses.append(-float(_score(model, [pair], device, 0)[0, 0]) / len(text))
    return losses


def _check(model: Model, options: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
    if model.traits.attention not in _SCORES or not model.traits.can_generate:
        raise ConfigError(
            f"a {type(model).__name__} with the head {model.config.head!r} cannot score texts "
            "(needed: a causal language model, or an encoder-decoder with a language-model "
            "head)."
        )
    if not options:
        raise ConfigError("the list of options is empty. Pass at least one (prompt, text) pair.")
    for number, (prompt, text) in enumerate(options):
        if not len(text) or not len(prompt):
            raise DataError(
                f"option {number} has {len(prompt)} prompt tokens and {len(text)} text tokens "
                "(needed: at least one of each)."
            )


def score_classes(
    model: Any, count: int, make: Callable[[Sequence[int]], Batch], size: int, ranks: World
) -> Tensor:
    """Return the class logits of every input, the same on every process.

    Args:
        model: classifier.
        count: number of inputs.
        make: function that builds the batch of the inputs with the given indices.
        size: number of inputs per batch.
        ranks: number of data-parallel ranks, and the rank of this process.

    Shape:
        returns (count, L) for L classes
    """

    def read(numbers: Sequence[int]) -> Tensor:
        batch = {n: t.to(ranks.device) for n, t in make(numbers).items() if n != "labels"}
        return model(**batch).logits

    return collect_rows(model, count, read, size, ranks)


def score_answers(
    model: Any, pairs: Sequence[Pair], size: int, ranks: World, width: int
) -> list[float]:
    """Return the mean log-probability per token of every answer; see `score_pairs`."""
    likelihoods = score_pairs(model, pairs, size, ranks, width)
    return [
        likelihood.log_prob / len(pair.answer)
        for likelihood, pair in zip(likelihoods, pairs, strict=True)
    ]


def score_pairs(
    model: Any, pairs: Sequence[Pair], size: int, ranks: World, width: int
) -> list[Likelihood]:
    """Return the likelihood of every answer after its prompt, the same on every process.

    Args:
        model: language model or encoder-decoder with a language-model head.
        pairs: prompts and answers, with at least one token each.
        size: pairs per batch.
        ranks: number of data-parallel ranks, and the rank of this process.
        width: maximum length of a prompt and its answer in tokens.
    """

    def read(numbers: Sequence[int]) -> Tensor:
        return _score(model, [pairs[n] for n in numbers], ranks.device, width)

    scores = collect_rows(model, len(pairs), read, size, ranks).tolist()
    lengths = (len(pair.answer) for pair in pairs)
    return [Likelihood(p, hits == n) for (p, hits), n in zip(scores, lengths, strict=True)]


def roll_windows(ids: Sequence[int], begin: Sequence[int], longest: int) -> Iterator[Pair]:
    """Yield windows over a long text such that every token is predicted once.

    The first token is predicted after `begin`; if `begin` is empty, it is not predicted. Later
    windows start with the previous token, the last window with as much context as fits.

    Args:
        ids: token ids of the text.
        begin: BOS token, or empty.
        longest: window length in tokens, at least 2.
    """
    text, at = [*begin, *ids], 1
    while at < len(text):
        end = min(at - 1 + longest, len(text))
        start = max(0, end - longest)
        yield Pair(text[start:at], text[at:end])
        at = end


def write_answers(
    model: Any,
    prompts: Sequence[Sequence[int]],
    size: int,
    ranks: World,
    width: int,
    max_new_tokens: int,
) -> list[list[int]]:
    """Return the model's greedy answer to every prompt, the same on every process.

    Every process generates all `max_new_tokens`, because all processes of a sharded model must run
    the same number of steps; the caller drops the tokens after an EOS token.
    """

    apart = model.traits.is_encoder_decoder

    def read(numbers: Sequence[int]) -> Tensor:
        ids, mask = _pad([prompts[n] for n in numbers], ranks.device, width, left=not apart)
        written = generate(model, ids, mask, max_new_tokens=max_new_tokens, eos_token_id=())
        return written[:, 1 if apart else ids.shape[1] :]

    return collect_rows(model, len(prompts), read, size, ranks).long().tolist()


def collect_rows(
    model: Any, count: int, read: Callable[[Sequence[int]], Tensor], size: int, ranks: World
) -> Tensor:
    """Evaluate inputs in batches, divided over the data-parallel ranks; return a float64 tensor.

    Args:
        model: model in any parallel layout.
        count: number of inputs.
        read: function from indices to the outputs for these inputs, (len(indices), ...).
        size: number of inputs per batch.
        ranks: number of data-parallel ranks, and the rank of this process.

    Shape:
        returns (count, ...)
    """
    gathered: Tensor | None = None
    with eval_mode(model), torch.no_grad():
        for numbers in _share(count, size, ranks):
            part = read([min(number, count - 1) for number in numbers])
            if gathered is None:
                gathered = torch.zeros(
                    count, *part.shape[1:], dtype=torch.float64, device=ranks.device
                )
            own_rows = [number for number in numbers if number < count]
            if own_rows:
                gathered[own_rows] = part[: len(own_rows)].to(gathered)
    reshard_(model)
    assert gathered is not None
    return sum_over_axes(gathered, mesh_of(model), *ROW_AXES)


def _share(count: int, size: int, ranks: World) -> Iterator[list[int]]:
    """Yield the input indices of this process's batches.

    All processes have the same number of batches.
    """
    for start in range(ranks.rank * size, count + ranks.rank * size, size * ranks.size):
        yield list(range(start, start + size))


def _pad(
    lines: Sequence[Sequence[int]], device: torch.device, width: int, left: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the ids padded with 0 and their mask; lengths are rounded up to reuse shapes."""
    longest = max(map(len, lines))
    length = max(longest, min(-(-longest // _WIDTH_STEP) * _WIDTH_STEP, width))
    ids = torch.zeros(len(lines), length, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for number, line in enumerate(lines):
        span = slice(length - len(line), length) if left else slice(len(line))
        ids[number, span] = torch.tensor(list(line))
        mask[number, span] = 1
    return ids.to(device), mask.to(device)


def _score(model: Any, pairs: Sequence[Pair], device: torch.device, width: int) -> Tensor:
    """Return each answer's log-probability, and the number of its tokens that are the argmax.

    Shape:
        returns (B, 2); sequences are padded to at most `width` tokens
    """
    read = _read_apart if model.traits.is_encoder_decoder else _read_rows
    return read(model, pairs, device, width)


def _read_rows(model: Any, pairs: Sequence[Pair], device: torch.device, width: int) -> Tensor:
    """Score answers that follow their prompts in the same sequence, padded on the left."""
    lines = [[*pair.prompt, *pair.answer] for pair in pairs]
    # Nothing is predicted from the last token, so it is not read.
    ids, mask = _pad([line[:-1] for line in lines], device, width, left=True)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    keep = max(len(pair.answer) for pair in pairs)
    logits = model(ids, attention_mask=mask, position_ids=places, logits_to_keep=keep).logits
    lasts = torch.tensor([line[-1:] for line in lines], device=device)
    answers = torch.cat((ids, lasts), 1)[:, -keep:]
    lengths = torch.tensor([len(pair.answer) for pair in pairs], device=device)
    behind = torch.arange(keep, 0, -1, device=device) <= lengths[:, None]
    return _sum(logits, answers, behind)


def _read_apart(model: Any, pairs: Sequence[Pair], device: torch.device, width: int) -> Tensor:
    """Score the answers of an encoder-decoder; the prompts are its sources."""
    ids, mask = _pad([pair.prompt for pair in pairs], device, width)
    longest = max(len(pair.answer) for pair in pairs)
    answers, shown = _pad([pair.answer for pair in pairs], device, longest)
    config = model.config
    target = shift_right(answers, config.decoder_start_token_id, config.pad_token_id)
    logits = model(input_ids=ids, attention_mask=mask, decoder_input_ids=target).logits
    return _sum(logits, answers, shown.bool())


def _sum(logits: Tensor, ids: Tensor, counted: Tensor) -> Tensor:
    """Return each sequence's log-probability of the ids in `counted`, and how many are the argmax.

    Shape:
        logits: (B, T, V); ids, counted: (B, T); returns (B, 2)
    """
    scores = _pick(logits, ids) * counted
    hits = (logits.argmax(-1) == ids) & counted
    return torch.stack((scores.sum(1), hits.sum(1).to(scores.dtype)), 1)


def _pick(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probability of each id.

    Shape:
        logits: (B, T, V); ids: (B, T) -> (B, T)
    """
    return logits.float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
