"""Converts preference data to token sequences: pairs of answers, and rated answers for KTO.

Answers are rendered and tokenized as in `conversation_rows.py`. Plain texts are not rendered: the
tokenizer's BOS token is added before the prompt, and its EOS token after the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmforge.align.prefix_sharing import SEGMENTS, SharedRow, share_prompt
from bmforge.batch import IGNORE_INDEX, Batch
from bmforge.data.load.example import Example, fingerprint_of
from bmforge.data.sources.conversations import ChatExample
from bmforge.data.sources.preferences import PreferenceExample
from bmforge.errors import DataError
from bmforge.logging import get_logger
from bmforge.recipes.inputs.conversation_rows import EncodedRow, encode_turns, render_conversation
from bmforge.recipes.inputs.padded_rows import (
    PaddedRows,
    has_labels,
    is_real_row,
    report_rows,
    truncate_row,
)
from bmforge.tokenizers import Tokenizer
from bmforge.tokenizers.chat_template import ChatTemplate
from bmforge.tokenizers.chat_turns import AnswerText

__all__ = [
    "EncodedPair",
    "MarkedAnswers",
    "PreferencePairs",
    "encode_preference",
    "encode_start",
]


class EncodedPair(NamedTuple):
    """Chosen and rejected answer to a prompt, as token sequences; for KTO only one of the two."""

    chosen: EncodedRow | None
    rejected: EncodedRow | None
    margin: float | None = None


def encode_preference(
    example: PreferenceExample,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    ignore: Sequence[str] = (),
) -> EncodedPair:
    """Encode both answers of an example; both sequences begin with the same prompt tokens.

    Args:
        example: prompt and answers.
        template: the model's chat template, for messages.
        tokenizer: the model's tokenizer.
        ignore: names of fields to ignore.

    Raises:
        DataError: the template changes an answer's message when later ones follow it, or a record
            of texts has further fields; also for the reasons given in `render_conversation`.
    """
    answers = [example.chosen, example.rejected]
    if any(isinstance(answer, list) for answer in answers):
        turns = [None if a is None else _render(example, a, template, ignore) for a in answers]
        join = partial(_join, example.location, tokenizer=tokenizer)
        rows = [None if t is None else join(t) for t in _share_prompt(turns)]
    elif example.prompt is None:
        _refuse_fields(example, ignore)
        rows = list(_encode_whole(answers, tokenizer))
    else:
        _refuse_fields(example, ignore)
        encode = partial(_encode_text, str(example.prompt), tokenizer=tokenizer)
        rows = [None if answer is None else encode(str(answer)) for answer in answers]
    is_ignored = any(name in ignore for name in example.margin_fields)
    return EncodedPair(rows[0], rows[1], None if is_ignored else example.margin)


def _refuse_fields(example: PreferenceExample, ignore: Sequence[str]) -> None:
    """Raise `DataError` if a record of plain texts has further fields, which have no effect."""
    names = [*example.fields, *(["tools"] if example.tools else [])]
    unread = [name for name in names if name not in ignore]
    if unread:
        raise DataError(
            f"{example.location} has the fields {', '.join(unread)}, which have no effect on "
            f"texts. Ignore them with --data.ignore {' '.join(unread)}."
        )


def _render(
    example: PreferenceExample, answer: Any, template: ChatTemplate, ignore: Sequence[str]
) -> list[AnswerText]:
    """Render the messages of an answer at the end of the conversation."""
    prompt: Any = example.prompt
    messages = [*prompt, *answer]
    chat = ChatExample(example.location, messages, example.tools, example.fields)
    turns = render_conversation(chat, template, "all", ignore)
    scored = [turn for turn in turns if turn.number >= len(prompt)]
    if not scored:
        raise DataError(
            f"{example.location}: an answer has no assistant message to train on: all have weight "
            "0, or the chat template cannot render the empty prompt before them. Remove the "
            "weight, or the record."
        )
    return scored


def _share_prompt(turns: Sequence[list[AnswerText] | None]) -> list[list[AnswerText] | None]:
    """Move the end of the longer prompt into its answer, so that both prompts are equal.

    The prompts differ if a generation prompt starts reasoning that only one of the answers has.
    """
    pairs = [each for each in turns if each]
    if len(pairs) < 2 or pairs[0][0].prompt == pairs[1][0].prompt:
        return list(turns)
    shortest = min((each[0].prompt for each in pairs), key=len)
    if not all(each[0].prompt.startswith(shortest) for each in pairs):
        return list(turns)
    shared: list[list[AnswerText] | None] = []
    for each in pairs:
        first = each[0]
        answer = first.prompt[len(shortest) :] + first.answer
        shared.append([AnswerText(first.number, shortest, answer), *each[1:]])
    return shared


def _join(location: str, turns: Sequence[AnswerText], tokenizer: Tokenizer) -> EncodedRow:
    """Encode a multi-turn answer as one sequence; the template must not change earlier messages."""
    rows = encode_turns(turns, tokenizer)
    if len(rows) == 1:
        return rows[0]
    changed = next(
        (a for a, b in pairwise(turns) if not b.prompt.startswith(a.prompt + a.answer)),
        turns[0],
    )
    raise DataError(
        f"{location}: the chat template changes message {changed.number + 1} when later messages "
        "follow it (many templates omit the reasoning or the end token of earlier answers). The "
        f"{len(turns)} assistant messages of an answer therefore cannot be rendered as one text. "
        "Use answers of one assistant message and move earlier messages into 'prompt', or use "
        "--template to pass a chat template that leaves earlier messages unchanged."
    )


def _end_of(tokenizer: Tokenizer) -> list[int]:
    return [] if tokenizer.eos_id is None else [tokenizer.eos_id]


def encode_start(text: str, tokenizer: Tokenizer) -> list[int]:
    """Encode the beginning of a text, preceded by one BOS token if the tokenizer has one."""
    ids, prefix = tokenizer.encode(text), tokenizer.prompt_prefix
    return ids if ids[: len(prefix)] == prefix else [*prefix, *ids]


def _finish(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """Append the EOS token unless the text ends with it."""
    end = _end_of(tokenizer)
    return ids if end and ids[-1:] == end else [*ids, *end]


def _label(ids: list[int], prompt: int) -> EncodedRow:
    """Return a sequence whose labels are the tokens after the prompt.

    The first token of a sequence never has a label, because nothing predicts it.
    """
    prompt = max(prompt, 1)
    return EncodedRow(ids, [IGNORE_INDEX] * min(prompt, len(ids)) + ids[prompt:])


def _encode_text(prompt: str, answer: str, tokenizer: Tokenizer) -> EncodedRow:
    """Encode a text prompt with its answer; the prompt has the same ids as in generation."""
    before, joined = encode_start(prompt, tokenizer), encode_start(prompt + answer, tokenizer)
    fits = joined[: len(before)] == before
    after = joined[len(before) :] if fits else tokenizer.encode(answer)
    return _label([*before, *_finish(after, tokenizer)], len(before))


def _encode_whole(texts: Sequence[Any], tokenizer: Tokenizer) -> Iterable[EncodedRow | None]:
    """Encode two texts that include the prompt; the prompt is their longest common token prefix."""
    ids = [_finish(encode_start(text, tokenizer), tokenizer) for text in texts]
    shared = next(
        (n for n, (a, b) in enumerate(zip(*ids, strict=False)) if a != b), min(map(len, ids))
    )
    return (_label(row, shared) for row in ids)


class PreferencePairs(PaddedRows):
    """Preference pairs as an `ExampleSource`: two sequences per pair, the chosen answer first.

    A pair with a completely truncated answer, or with equal answers after truncation, is skipped;
    `dropped` counts these pairs.

    Args:
        pairs: encoded pairs.
        seq_len: maximum length of a prompt with its answer in tokens; longer ones are truncated at
            the end.
        shares_prefix: True to encode a pair as one sequence that contains the prompt once; see
            `prefix_sharing`.
    """

    def __init__(
        self, pairs: Sequence[EncodedPair], seq_len: int, shares_prefix: bool = False
    ) -> None:
        self._pairs: list[tuple[EncodedRow, EncodedRow, float]] = []
        cut = 0
        self.dropped = 0
        for pair in pairs:
            if pair.chosen is None or pair.rejected is None:
                raise DataError(
                    "the data has answers labeled good or bad instead of pairs. Use --method kto."
                )
            cut += max(len(pair.chosen.ids), len(pair.rejected.ids)) > seq_len
            chosen, rejected = (truncate_row(row, seq_len) for row in pair[:2] if row is not None)
            if not has_labels(chosen) or not has_labels(rejected) or chosen.ids == rejected.ids:
                self.dropped += 1
            else:
                self._pairs.append((chosen, rejected, pair.margin or 0.0))
        plain = [(tuple(map(tuple, c)), tuple(map(tuple, r)), m) for c, r, m in self._pairs]
        self.fingerprint = fingerprint_of(plain)
        self.reference: Tensor | None = None
        report_rows(len(pairs), self.dropped, cut, seq_len, "pairs")
        self._shared = [share_prompt(pair[:2]) for pair in self._pairs] if shares_prefix else []
        if shares_prefix:
            self.set_width(self._shared, 2 * seq_len)
            self._report_sharing()
        else:
            self.set_width((row for pair in self._pairs for row in pair[:2]), seq_len)

    def _report_sharing(self) -> None:
        separate = sum(len(row.ids) for pair in self._pairs for row in pair[:2])
        tokens = sum(len(row.ids) for row in self._shared)
        get_logger().info(
            "prefix sharing: %d tokens instead of %d, sequences of %d", tokens, separate, self.width
        )

    def __len__(self) -> int:
        return len(self._pairs)

    def make(self, index: int, seed: tuple[int | str, ...]) -> Example:
        """Return the pair at `index`; `seed` has no effect."""
        return {"labels": [1], "index": [index]}

    def collate(self, rows: Sequence[Example]) -> Batch:
        """Return a batch of pairs, in which rows 2i and 2i + 1 are the answers of pair i.

        With a shared prefix, row i has both answers.
        """
        numbers = [row["index"][0] for row in rows]
        is_real = [is_real_row(row) for row in rows]
        if self._shared:
            batch = self._stack_shared([self._shared[n] for n in numbers], is_real)
        else:
            answers = [row for number in numbers for row in self._pairs[number][:2]]
            batch = self.stack(answers, [real for real in is_real for _ in range(2)])
        batch["margin"] = torch.tensor([self._pairs[n][2] for n in numbers], dtype=torch.float32)
        return _with_reference(batch, self.reference, numbers)

    def _stack_shared(
        self, rows: Sequence[SharedRow], is_real: Sequence[bool]
    ) -> dict[str, Tensor]:
        batch = self.stack([EncodedRow(row.ids, row.labels) for row in rows], is_real)
        segments, positions = batch.pop("attention_mask"), torch.zeros_like(batch["input_ids"])
        for number, row in enumerate(rows):
            segments[number, : len(row.ids)] = torch.tensor(row.segments)
            positions[number, : len(row.ids)] = torch.tensor(row.positions)
        return {**batch, SEGMENTS: segments, "position_ids": positions}


class MarkedAnswers(PaddedRows):
    """Answers rated good or bad as an `ExampleSource`, each with a mismatched answer.

    The sequence with the mismatched answer has the same prompt, with the answer of the next example
    in the file that has another prompt. The choice does not depend on the batch.

    Args:
        pairs: encoded examples; a pair counts as a good and a bad answer.
        seq_len: maximum length of a sequence in tokens; longer ones are truncated at the end.
    """

    def __init__(self, pairs: Sequence[EncodedPair], seq_len: int) -> None:
        answers = [
            (row, is_good)
            for pair in pairs
            for row, is_good in ((pair.chosen, True), (pair.rejected, False))
            if row is not None
        ]
        cut = sum(len(row.ids) > seq_len for row, _ in answers)
        usable = [
            (row, is_good) for row, is_good in answers if has_labels(truncate_row(row, seq_len))
        ]
        prompts = [tuple(row.ids[: _prompt_length(row)]) for row, _ in usable]
        self.dropped = len(answers) - len(usable)
        self._answers: list[tuple[EncodedRow, EncodedRow, bool]] = []
        for number, (row, is_good) in enumerate(usable):
            other = usable[_next_prompt(prompts, number)][0]
            mixed = _mix(row, other)
            rows = (truncate_row(row, seq_len), truncate_row(mixed, seq_len))
            self._answers.append((*rows, is_good))
        self.set_width((row for each in self._answers for row in each[:2]), seq_len)
        plain = [(tuple(map(tuple, a)), tuple(map(tuple, b)), g) for a, b, g in self._answers]
        self.fingerprint = fingerprint_of(plain)
        self.reference: Tensor | None = None
        good = sum(is_good for *_, is_good in self._answers)
        report_rows(len(answers), self.dropped, cut, seq_len, "answers")
        get_logger().info("%d answers are good, %d bad", good, len(self._answers) - good)

    def __len__(self) -> int:
        return len(self._answers)

    def make(self, index: int, seed: tuple[int | str, ...]) -> Example:
        """Return the answer at `index`; `seed` has no effect."""
        return {"labels": [1], "index": [index]}

    def collate(self, rows: Sequence[Example]) -> Batch:
        """Return a batch of answers: row 2i is answer i, row 2i + 1 its mismatched answer."""
        numbers = [row["index"][0] for row in rows]
        answers = [row for number in numbers for row in self._answers[number][:2]]
        is_real = [is_real_row(row) for row in rows for _ in range(2)]
        batch = self.stack(answers, is_real)
        batch["is_good"] = torch.tensor([int(self._answers[n][2]) for n in numbers])
        return _with_reference(batch, self.reference, numbers)


def _with_reference(
    batch: dict[str, Tensor], reference: Tensor | None, numbers: Sequence[int]
) -> Batch:
    """Add the precomputed log-probabilities of the reference model to a batch."""
    if reference is not None:
        batch["reference_logps"] = reference[numbers].flatten()
    return batch


def _prompt_length(row: EncodedRow) -> int:
    """Return the number of tokens before the answer of a sequence."""
    return next(n for n, label in enumerate(row.labels) if label != IGNORE_INDEX)


def _next_prompt(prompts: Sequence[tuple[int, ...]], number: int) -> int:
    """Return the index of the next example, cyclically, whose prompt differs."""
    count = len(prompts)
    for step in range(1, count):
        if prompts[(number + step) % count] != prompts[number]:
            return (number + step) % count
    raise DataError(
        "all examples have the same prompt, but KTO compares answers to different prompts. "
        "Pass at least two prompts."
    )


def _mix(row: EncodedRow, other: EncodedRow) -> EncodedRow:
    """Return a sequence with the prompt of `row` and the answer of `other`."""
    before, start = _prompt_length(row), _prompt_length(other)
    labels = [IGNORE_INDEX] * before + other.labels[start:]
    return EncodedRow(row.ids[:before] + other.ids[start:], labels)
