"""Assembles prompts as model inputs: special tokens around the text, and answer positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from bmforge.errors import ConfigError
from bmforge.tokenizers import Tokenizer
from bmforge.tokenizers.cpm_bee.document import encode_document
from bmforge.tune.prompt.prompt_formats import PromptFormat, role_token

__all__ = ["Encoded", "Frame", "Text", "assemble_prompt", "make_frame"]

# Index of CPM-Ant's pre-training task of hidden tokens, for its prompt and its segment ids.
_HIDDEN_TASK = 1


@dataclass(frozen=True)
class Encoded:
    """A prompt encoded as model input.

    Attributes:
        input_ids: T token ids; ids of at least the vocabulary size are soft tokens.
        mask_at: M answer positions, in the input or, for an encoder-decoder, in
            `decoder_input_ids`.
        decoder_input_ids: input of the decoder; empty without a decoder.
        num_cut: number of the example's tokens that were truncated.
        columns: dict from further per-token arguments of the model to one number per token.
        fixed: dict with further arguments of the model, equal for every prompt of the template.
        predicted: target tokens at `mask_at`, if an answer was given.
    """

    input_ids: list[int]
    mask_at: list[int]
    decoder_input_ids: list[int] = field(default_factory=list)
    num_cut: int = 0
    columns: Mapping[str, list[int]] = field(default_factory=dict)
    fixed: Mapping[str, list[int]] = field(default_factory=dict)
    predicted: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.input_ids)


class Text(NamedTuple):
    """Content of a prompt, without the special tokens before and after it.

    Attributes:
        ids: token ids of all pieces, after truncation.
        masks: position of each mask in `ids`.
        answer: tokens of the answer at the only mask; () if the model must predict the answer.
    """

    ids: list[int]
    masks: list[int]
    answer: Sequence[int] = ()


class Frame(NamedTuple):
    """Special tokens that surround every prompt of a template.

    Attributes:
        begin, end: token ids before and after the text.
        tails: token ids that are appended for each mask, up to its answer position.
        begin_columns, tail_columns: per-token arguments of the model for `begin` and `tails`.
        text_columns: per-token arguments of the model for the text, one value for all tokens.
        fixed: further arguments of the model, equal for every prompt of the template.
    """

    begin: list[int]
    end: list[int]
    tails: list[list[int]]
    begin_columns: dict[str, list[int]]
    text_columns: dict[str, int]
    tail_columns: dict[str, list[list[int]]]
    fixed: dict[str, list[int]]

    def __len__(self) -> int:
        return len(self.begin) + len(self.end) + sum(map(len, self.tails))


def make_frame(
    prompt_format: PromptFormat, tokenizer: Tokenizer, config: Any, num_masks: int
) -> Frame:
    """Build the special tokens that surround every prompt of a template."""
    if prompt_format.form == "document":
        return _frame_document(tokenizer, num_masks)
    ids = [role_token(tokenizer, roles) for roles in (prompt_format.begins, prompt_format.ends)]
    begin, end = ([] if id is None else [id] for id in ids)
    tails: list[list[int]] = []
    columns: dict[str, list[int]] = {}
    if prompt_format.form == "behind":
        start = tokenizer.role_id("sop")
        assert start is not None
        tails = [[start]] * num_masks
    if prompt_format.form == "hidden":
        size = config.prompt_length
        first = _HIDDEN_TASK * size + (config.vocab_size if config.prompts_in_vocabulary else 0)
        columns = {
            "context": [1] * (size + len(begin)),
            "segment": [0] * size + [_HIDDEN_TASK] * len(begin),
        }
        begin = [*range(first, first + size), *begin]
    defaults = {"context": 1, "segment": _HIDDEN_TASK} if columns else {}
    return Frame(begin, end, tails, columns, defaults, {}, {})


def _frame_document(tokenizer: Any, num_masks: int) -> Frame:
    """Build the special tokens of a CPM-Bee document with one text and an answer for each blank."""
    names = [f"<mask_{n}>" for n in range(num_masks)]
    document = {"input": "".join(names), "<ans>": dict.fromkeys(names, "")}
    encoded = encode_document(document, tokenizer, blank_answers=True)
    inside = np.flatnonzero(encoded.segs == 2)  # segment 2, after the root and the key, is the text
    columns: dict[str, list[int]] = {
        "input_ids": encoded.ids.tolist(),
        "input_sub": encoded.subs.tolist(),
        "context": encoded.context.astype(int).tolist(),
        "segment": encoded.segs.tolist(),
    }
    count, begin = len(encoded.ids), int(inside[0]) + 1
    edges = [int(inside[-1]), *(slot.start + 1 for slot in encoded.answers)]
    columns |= {"num_segments": [encoded.n_segments] * count}
    columns |= {name: [0] * count for name in ("sample_ids", "segment_rel_offset")}
    tails = {name: [values[a:b] for a, b in pairwise(edges)] for name, values in columns.items()}
    defaults = {"input_sub": 0, "context": 1, "segment": 2, "num_segments": encoded.n_segments}
    begins = {name: values[:begin] for name, values in columns.items()}
    return Frame(
        begins.pop("input_ids"), [], tails.pop("input_ids"), begins,
        {**defaults, "sample_ids": 0, "segment_rel_offset": 0}, tails,
        {"segment_rel": encoded.segment_rel.tolist()},
    )  # fmt: skip


def assemble_prompt(
    prompt_format: PromptFormat,
    frame: Frame,
    text: Text,
    front: list[int],
    blanks: list[int],
    name: str,
) -> Encoded:
    """Assemble a prompt from its text, special tokens and soft tokens.

    Args:
        prompt_format: prompt format of the model.
        frame: tokens around the text.
        text: pieces of the prompt.
        front: soft tokens at the start of the prompt; for CPM models, after the first special
            tokens.
        blanks: ids of the decoder's start token and of one sentinel per mask.
        name: name of the example, used in messages.

    Raises:
        ConfigError: no token precedes the first predicted token.
    """
    answer = list(text.answer)
    inside = prompt_format.form in ("hidden", "document")
    before = [*frame.begin, *front] if inside else [*front, *frame.begin]
    ids, at = [*before, *text.ids, *frame.end], len(before)
    if prompt_format.form == "apart":
        begun = [*blanks, *answer[:-1]]
        places = list(range(1 - prompt_format.start_is_blank, len(begun)))
        return Encoded(ids, places, begun, predicted=answer)
    if prompt_format.form == "row" and prompt_format.shows_mask:
        places = [at + n + m for n in text.masks for m in range(max(1, len(answer)))]
        return Encoded(ids, places, predicted=answer)
    if prompt_format.form == "row":
        first = at + text.masks[0] - 1
        if first < 0:
            raise ConfigError(f"{name} has no token before the mask. Put text before the mask.")
        if not answer:
            return Encoded(ids, [first])
        return Encoded(ids[:-1], list(range(first, len(ids) - 1)), predicted=ids[first + 1 :])
    if prompt_format.form == "behind":
        places = []
        for tail in frame.tails:
            ids = [*ids, *tail]
            places.append(len(ids) - 1)
        more = range(places[-1] + 1, places[-1] + len(answer))
        return Encoded([*ids, *answer[:-1]], [*places, *more], predicted=answer)
    if prompt_format.form == "hidden":
        return _assemble_hidden(frame, text, ids, at, len(front))
    return _assemble_document(frame, text, ids, at, len(front))


def _assemble_hidden(frame: Frame, text: Text, ids: list[int], at: int, front: int) -> Encoded:
    """Assemble a CPM-Ant prompt, in which the token before a hidden token predicts it."""
    columns = {
        name: [*values, *[frame.text_columns[name]] * (len(ids) - len(values))]
        for name, values in frame.begin_columns.items()
    }
    length = max(1, len(text.answer))
    hidden = [at + n + m for n in text.masks for m in range(length)]
    for position in hidden:
        columns["context"][position] = 0
    return Encoded(ids, [p - 1 for p in hidden], columns=columns, predicted=list(text.answer))


def _assemble_document(frame: Frame, text: Text, ids: list[int], at: int, front: int) -> Encoded:
    """Assemble a CPM-Bee prompt; its numbered blanks are answered in order under <ans>."""
    answer, count = list(text.answer), len(text.ids) + front
    columns = {n: [*v, *[frame.text_columns[n]] * count] for n, v in frame.begin_columns.items()}
    for number, position in enumerate(text.masks):
        columns["input_sub"][at + position] = number
    places = []
    for number, tail in enumerate(frame.tails):
        ids = [*ids, *tail]
        for name, values in columns.items():
            values += frame.tail_columns[name][number]
        places.append(len(ids) - 1)
    more = max(0, len(answer) - 1)
    for values in columns.values():
        values += [values[-1]] * more
    places += range(len(ids), len(ids) + more)
    return Encoded([*ids, *answer[:more]], places, columns=columns, fixed=frame.fixed,
                   predicted=answer)  # fmt: skip
