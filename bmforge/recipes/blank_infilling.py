"""GLM pretraining by blank infilling: spans are removed from a text and appended to it.

Some texts have many short spans, the others one long span at their end. Each span is appended as
``<|startofpiece|>`` and its tokens, followed by ``<|endofpiece|>``; all of them are predicted. The
model derives the two-dimensional positions from the blanks.

Source: Du et al., "GLM" (ACL 2022), sections 2.1 and 2.2, where short span lengths follow a Poisson
distribution and spans are shuffled. In this module a text is divided as for T5, spans keep the
order of their blanks, and every blank is the model's mask token (``mask_token_id``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bmforge.batch import IGNORE_INDEX
from bmforge.data.load.example import Example, fingerprint_of
from bmforge.data.load.order import derive_key, draw_below
from bmforge.errors import ConfigError
from bmforge.parallel import World
from bmforge.recipes.inputs.document_segments import DocumentSegments, open_segments, open_tokenizer
from bmforge.recipes.inputs.examples import ExampleConfig, open_examples
from bmforge.recipes.run import Launch, RunConfig, RunResult, TrainingData, run_recipe
from bmforge.recipes.spans import count_spans, divide_randomly
from bmforge.tokenizers import GLMTokenizer

__all__ = ["BlankConfig", "cut_blanks", "train_blanks"]

_DRAWN_FROM = 1 << 30
Seed = tuple[int | str, ...]


@dataclass(kw_only=True)
class BlankConfig(RunConfig):
    """Config for pretraining on blank infilling; the other fields are those of `RunConfig`.

    Args:
        data: `paths` are directories of `bmforge prepare` or token stores; `seq_len` includes the
            text, its special tokens, and the appended spans.
        long_ratio: fraction of the texts in which one long span at the end is predicted; in the
            other texts, short spans are predicted.
        noise_density: fraction of the tokens that are in short spans.
        mean_span_length: mean length of a short span in tokens.
        shortest: minimum length of a text in tokens; shorter texts are skipped.
    """

    data: ExampleConfig = field(default_factory=ExampleConfig)
    long_ratio: float = 0.5
    noise_density: float = 0.15
    mean_span_length: float = 3.0
    shortest: int = 10


def train_blanks(config: Any, launch: Launch = run_recipe) -> RunResult:
    """Run or resume training on blank infilling.

    Args:
        config: a `BlankConfig` whose `model` is a GLM's config.

    Raises:
        BmforgeError: see `run_recipe`.
    """
    return launch(config, _open_data, head="language_model")


def cut_blanks(
    ids: Sequence[int], seed: Seed, config: Any
) -> tuple[list[list[int]], list[list[int]]]:
    """Remove random spans from a text; return the tokens before each blank, and the spans.

    Args:
        ids: token ids of the text; at least 2.
        seed: random seed of the spans.
        config: a `BlankConfig`.
    """
    drawn = draw_below(_DRAWN_FROM, derive_key(*seed, "kind")) / _DRAWN_FROM
    if drawn < config.long_ratio:
        # From half of the text to all but its first token, as in the paper.
        cut = len(ids) // 2 + draw_below(max(1, len(ids) // 2), derive_key(*seed, "length"))
        cut = min(max(cut, 1), len(ids) - 1)
        return [list(ids[:-cut])], [list(ids[-cut:])]
    noise, spans = count_spans(len(ids), config.noise_density, config.mean_span_length)
    lengths = divide_randomly(len(ids) - noise, spans, derive_key(*seed, "kept"))
    gone = divide_randomly(noise, spans, derive_key(*seed, "cut"))
    edges = [0]
    for keep, drop in zip(lengths, gone, strict=True):
        edges += [edges[-1] + keep, edges[-1] + keep + drop]
    parts = [list(ids[a:b]) for a, b in pairwise(edges)]
    return parts[::2], parts[1::2]


class _BlankExamples:
    """Texts with blanks and the spans that fill them, as an `ExampleSource`."""

    def __init__(self, segments: DocumentSegments, config: Any, tokenizer: GLMTokenizer) -> None:
        self._segments, self._config = segments, config
        ids = [tokenizer.role_id(role) for role in ("cls", "eos", "sop", "eop")]
        self._begin, self._end, self._start, self._stop = (id or 0 for id in ids)
        self._blank = config.model.mask_token_id
        width = config.data.seq_len
        self.columns: Mapping[str, tuple[int, int]] = {
            "input_ids": (width, self._end),
            "attention_mask": (width, 0),
            "labels": (width, IGNORE_INDEX),
        }
        shares = config.long_ratio, config.noise_density, config.mean_span_length
        self.fingerprint = fingerprint_of(segments.fingerprint, *shares, width)
        self.content = segments.content

    def __len__(self) -> int:
        return len(self._segments)

    def make(self, index: int, seed: Seed) -> Example:
        """Return the text at `index` with random blanks, which depend on `seed`."""
        contexts, cut = cut_blanks(self._segments[index].tolist(), seed, self._config)
        ids = [self._begin]
        for part in contexts:
            ids += [*part, self._blank]
        ids.append(self._end)
        # The label of a position is the token that the previous one predicts: a span is followed
        # by its end token.
        labels = [IGNORE_INDEX] * (len(ids) + 1)
        for span in cut:
            ids += [self._start, *span]
            labels += [*span, self._stop]
        mask = [1] * len(ids)
        return {"input_ids": [*ids, self._end], "attention_mask": mask, "labels": labels}


def _open_data(config: Any, rows: World) -> TrainingData:
    tokenizer, model = open_tokenizer(config, GLMTokenizer), config.model
    ids = {"sop_token_id": tokenizer.role_id("sop"), "mask_token_id": tokenizer.role_id("mask")}
    wrong = [f"model.{n}={getattr(model, n)}" for n, id in ids.items() if getattr(model, n) != id]
    if wrong:
        needed = " ".join(f"--model.{n.replace('_', '-')} {id}" for n, id in ids.items())
        raise ConfigError(
            f"the model has {', '.join(wrong)}, but the tokenizer has other ids for these "
            f"tokens. Add the options {needed}."
        )
    # The text, three special tokens, and for every span a blank and a start token.
    width = config.data.seq_len
    longest = width - 3
    while longest > 1 and longest + 3 + 2 * _most_spans(longest, config) > width:
        longest -= 1
    shortest = max(2, config.shortest)
    segments, held_out = open_segments(
        config.data, model.vocab_size, shortest, longest, tokenizer.eos_id
    )
    return open_examples(
        _BlankExamples(segments, config, tokenizer),
        None if held_out is None else _BlankExamples(held_out, config, tokenizer),
        config.data,
        rows,
        save_tokenizer=tokenizer.save_pretrained,
    )


def _most_spans(length: int, config: Any) -> int:
    return count_spans(max(length, 2), config.noise_density, config.mean_span_length)[1]
