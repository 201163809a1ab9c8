"""Converts task examples into token ids, for classification or for answer generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bmforge.batch import IGNORE_INDEX
from bmforge.data.load.example import Example, fingerprint_of
from bmforge.data.tasks import TaskExample
from bmforge.errors import DataError
from bmforge.tokenizers import Tokenizer
from bmforge.tokenizers.segments import encode_segments, outer_marks

__all__ = [
    "AnswerRows",
    "ClassRows",
    "Pair",
    "continue_prompt",
    "right_options",
]

Seed = tuple[int | str, ...]


class Pair(NamedTuple):
    """Token ids of a prompt and of its answer."""

    prompt: list[int]
    answer: list[int]


def right_options(example: TaskExample, options: Sequence[str]) -> list[int]:
    """Return the indices of the correct options; several may be correct.

    Raises:
        DataError: no option is correct, or the example has no label.
    """
    if isinstance(example.label, int):
        return [example.label]
    right = [number for number, option in enumerate(options) if option in example.answers]
    if not right:
        raise DataError(
            f"example {example.idx} has no correct answer among its choices "
            f"{list(options)[:8]}. A split without labels cannot be used for training or "
            "evaluation."
        )
    return right


class ClassRows:
    """Encoded texts with a class label; an `ExampleSource` for `ExampleLoader`.

    Args:
        rows: texts and class index of each example (-100 for an unlabeled example).
        tokenizer: tokenizer of a BERT-like model.
        config: recipe config, which determines the sequence length and padding.
        marks_between: number of [SEP] tokens between two texts; see `encode_segments`.

    Raises:
        ConfigError: the tokenizer has no [CLS] or [SEP] token.
    """

    def __init__(
        self,
        rows: Sequence[tuple[tuple[str, ...], int]],
        tokenizer: Tokenizer,
        config: Any,
        marks_between: int = 1,
    ) -> None:
        outer_marks(tokenizer)  # raise the error before a run begins
        width = config.data.seq_len
        self._rows, self._tokenizer, self._width = rows, tokenizer, width
        self._marks, self._segments = marks_between, config.model.num_segments
        self.columns: Mapping[str, tuple[int, int]] = {
            "input_ids": (width, config.model.pad_token_id or 0),
            "token_type_ids": (width, 0),
            "attention_mask": (width, 0),
            "labels": (1, IGNORE_INDEX),
        }
        self.fingerprint = fingerprint_of(rows, width)

    def __len__(self) -> int:
        return len(self._rows)

    def make(self, index: int, seed: Seed) -> Example:
        """Return the example at `index`; the seed is not used."""
        texts, label = self._rows[index]
        ids, segments = encode_segments(texts, self._tokenizer, self._width, self._marks)
        segments = [min(segment, self._segments - 1) for segment in segments]
        mask = [1] * len(ids)
        columns = {"input_ids": ids, "token_type_ids": segments, "attention_mask": mask}
        return {**columns, "labels": [label]}


def continue_prompt(
    prompt: str, options: Sequence[str], tokenizer: Tokenizer, longest: int
) -> list[Pair]:
    """Encode a decoder's prompt with each possible answer, separated by a space.

    The prompt is truncated at its start to fit `longest` tokens. Each answer ends with the EOS
    token if the tokenizer has one.
    """
    begin = tokenizer.bos_id
    head = [] if begin is None or begin == tokenizer.eos_id else [begin]
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    texts = [prompt, *(f"{prompt} {option}" for option in options)]
    prompt_ids, *joined = tokenizer.encode_batch(texts)
    pairs = []
    for option, ids in zip(options, joined, strict=True):
        # Encode the answer alone if the tokenizer would merge it with the end of the prompt.
        fits = ids[: len(prompt_ids)] == prompt_ids and len(ids) > len(prompt_ids)
        answer = [*(ids[len(prompt_ids) :] if fits else tokenizer.encode(option)), *end]
        room = longest - len(answer) - len(head)
        if room < 1 or not (head or prompt_ids):
            raise DataError(
                f"the answer {option[:40]!r} of {len(answer)} tokens and its prompt of "
                f"{len(prompt_ids)} tokens do not fit into data.seq_len={longest}. Increase "
                "data.seq_len."
            )
        pairs.append(Pair([*head, *prompt_ids[-room:]], answer))
    return pairs


class AnswerRows:
    """Encoded prompts with answers; only answer tokens have labels. An `ExampleSource`.

    Args:
        pairs: prompts and answers.
        config: recipe config, which determines the sequence length and padding.
        reads_apart: True for an encoder-decoder, whose encoder reads the prompt and whose decoder
            generates the answer; False for a decoder, which reads prompt and answer concatenated.
    """

    def __init__(self, pairs: Sequence[Pair], config: Any, reads_apart: bool) -> None:
        width = config.data.seq_len
        self._pairs, self._reads_apart = pairs, reads_apart
        if reads_apart:
            longest = max((len(pair.answer) for pair in pairs), default=1)
            self.columns: Mapping[str, tuple[int, int]] = {
                "input_ids": (width, config.model.pad_token_id),
                "attention_mask": (width, 0),
                "labels": (longest, IGNORE_INDEX),
            }
        else:
            # Right padding, which causal attention never reads, so no mask is needed.
            self.columns = {"input_ids": (width, 0), "labels": (width, IGNORE_INDEX)}
        self.fingerprint = fingerprint_of(pairs, width)

    def __len__(self) -> int:
        return len(self._pairs)

    def make(self, index: int, seed: Seed) -> Example:
        """Return the example at `index`; the seed is not used."""
        prompt, answer = self._pairs[index]
        if self._reads_apart:
            mask = [1] * len(prompt)
            return {"input_ids": prompt, "attention_mask": mask, "labels": answer}
        return {
            "input_ids": [*prompt, *answer],
            "labels": [IGNORE_INDEX] * len(prompt) + answer,
        }
