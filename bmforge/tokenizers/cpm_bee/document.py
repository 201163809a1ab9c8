"""Encodes CPM-Bee documents (nested dicts of texts) as token ids, and decodes answers.

Every key and text is a segment ``<s> tokens </s>``; a text under ``<ans>``, which the model
generates, is ``<s> tokens``. A token outside of the vocabulary has a base id (``<mask>`` for
``<mask_3>``, ``<unk>`` for unknown text) and a sub id, its index among tokens with this base id.
Source: ``convert_data_to_id`` of OpenBMB/CPM-Bee, ``cpm_live/training_tasks/bee/pretrain.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bmforge.errors import DataError, suggest
from bmforge.tokenizers.cpm_bee.segments import (
    ANSWER_KEY,
    MAX_DEPTH,
    MAX_NESTING,
    Segment,
    flatten_document,
    segment_relations,
)
from bmforge.tokenizers.cpm_bee.tokenizer import CPMBeeTokenizer, is_special

__all__ = [
    "AnswerSlot",
    "EncodedDocument",
    "Extension",
    "Token",
    "TooLongError",
    "UnwritableError",
    "decode_answer",
    "decode_document",
    "encode_document",
    "encode_text",
]

Token = tuple[int, int]


class TooLongError(DataError):
    """Raised if a document has more tokens than the window."""


class UnwritableError(DataError):
    """Raised if an answer contains text that the model cannot generate."""


class Extension(NamedTuple):
    """Extension table of a sample: tokens that the vocabulary lacks.

    Attributes:
        texts: mapping from extension id to text.
        tokens: mapping from extension id to (base id, sub id).
    """

    texts: dict[int, str]
    tokens: dict[int, Token]

    @property
    def names(self) -> dict[Token, str]:
        """Mapping from (base id, sub id) to text."""
        return {token: self.texts[id] for id, token in self.tokens.items()}


class AnswerSlot(NamedTuple):
    """Position of an answer in an encoded document.

    Attributes:
        path: keys under ``<ans>`` that lead to the answer; () if ``<ans>`` itself is the text.
        segment: index of its segment.
        start: index of its ``<s>`` in the ids.
        stop: end index of its tokens (exclusive).
    """

    path: tuple[str, ...]
    segment: int
    start: int
    stop: int


class EncodedDocument(NamedTuple):
    """Encoded document of T tokens and n segments.

    Attributes:
        ids: (T,) int32, ids below `vocab_size`.
        subs: (T,) int32, sub ids; 0 for tokens of the vocabulary.
        context: (T,) bool, False for tokens that the model generates.
        segs: (T,) int32, segment indices.
        segment_rel: (n * n,) int32, relations between segments, see `segment_relations`.
        n_segments: number n of segments.
        answers: one slot for each text under ``<ans>``, in generation order.
        extension: extension table of special tokens and text that the vocabulary lacks.
    """

    ids: NDArray[np.int32]
    subs: NDArray[np.int32]
    context: NDArray[np.bool_]
    segs: NDArray[np.int32]
    segment_rel: NDArray[np.int32]
    n_segments: int
    answers: tuple[AnswerSlot, ...]
    extension: Extension

    @property
    def ext_table(self) -> dict[int, str]:
        """Mapping from extension id to text, for the tokenizer's `decode`."""
        return self.extension.texts


def encode_document(
    document: Mapping[str, Any],
    tokenizer: CPMBeeTokenizer,
    *,
    max_length: int | None = None,
    extension: Extension | None = None,
    blank_answers: bool = False,
    order_key: bytes | None = None,
    max_depth: int = MAX_DEPTH,
    max_nesting: int = MAX_NESTING,
) -> EncodedDocument:
    """Encode a nested dict of texts with ``<ans>`` for CPM-Bee.

    Args:
        document: dict of texts in the tokenizer's syntax: ``<<`` means ``<``, ``<mask_0>`` a blank.
        tokenizer: CPM-Bee's tokenizer.
        max_length: window in tokens; None for no limit.
        extension: extension table of earlier documents in the same sample; a copy is extended.
        blank_answers: ignore the texts under ``<ans>``, as for a prompt.
        order_key: seed for shuffling the keys under ``<ans>``; if None, their order is kept.
        max_depth: depth limit of the segment relations; see `segment_relations`.
        max_nesting: maximum depth of a text below the root.

    Raises:
        DataError: the document is not a nested dict of texts with ``<ans>``, is too deep, has an
            answer slot without a blank of the same name, or an unknown special token.
        UnwritableError: an answer contains text that is in neither the vocabulary nor the other
            segments, so that the model cannot generate it (subclass of DataError).
        TooLongError: the document is longer than the window (subclass of DataError).
    """
    segments = flatten_document(
        document, blank_answers=blank_answers, order_key=order_key, max_nesting=max_nesting
    )
    first = extension is None
    parts, extension = _encode_segments(segments, tokenizer, extension)
    _check_blanks(segments, parts, extension)
    if first:  # later documents of a sample are context only
        _check_answers(segments, parts, extension)
    bounds = np.cumsum([0, *(len(part) for part in parts)])
    if max_length is not None and bounds[-1] > max_length:
        raise TooLongError(
            f"the document has {bounds[-1]} tokens, more than max_length={max_length}. Shorten "
            "the document, or raise max_length if the model supports longer sequences."
        )
    ids, subs = np.array([token for part in parts for token in part], dtype=np.int32).T
    segs = np.repeat(np.arange(len(segments), dtype=np.int32), np.diff(bounds))
    written = np.array([segment.answer for segment in segments])
    slots = tuple(
        AnswerSlot(segment.path[1:], i, int(bounds[i]), int(bounds[i + 1]))
        for i, segment in enumerate(segments)
        if segment.answer
    )
    relations = segment_relations(
        [s.parent for s in segments], [s.depth for s in segments], max_depth
    )
    return EncodedDocument(
        np.ascontiguousarray(ids), np.ascontiguousarray(subs), ~written[segs], segs,
        relations, len(segments), slots, extension,
    )  # fmt: skip


def decode_document(
    document: Mapping[str, Any],
    encoded: EncodedDocument,
    answers: Sequence[Iterable[int] | None],
    tokenizer: CPMBeeTokenizer,
    ext_rows: Sequence[Token] = (),
) -> dict[str, Any]:
    """Return a copy of a document with the generated answers inserted under ``<ans>``.

    Args:
        document: document that was encoded.
        encoded: result of `encode_document`.
        answers: output ids for each slot in ``encoded.answers``, with or without ``</s>``; None
            inserts None.
        tokenizer: CPM-Bee's tokenizer.
        ext_rows: (base id, sub id) of each output id from `vocab_size` on.

    Raises:
        DataError: the numbers of answers and slots differ, or an id is invalid.
    """
    if len(answers) != len(encoded.answers):
        raise DataError(
            f"answers has {len(answers)} entries, but the document has {len(encoded.answers)} "
            f"answer slots: {['.'.join(slot.path) for slot in encoded.answers]}. Pass one answer "
            "per slot."
        )
    filled = _copy(document)
    for slot, ids in zip(encoded.answers, answers, strict=True):
        keys = (ANSWER_KEY, *slot.path)
        target = filled
        for key in keys[:-1]:
            target = target[key]
        target[keys[-1]] = (
            None if ids is None else decode_answer(ids, encoded.extension, tokenizer, ext_rows)
        )
    return filled


def decode_answer(
    ids: Iterable[int],
    extension: Extension,
    tokenizer: CPMBeeTokenizer,
    ext_rows: Sequence[Token] = (),
) -> str:
    """Decode output ids up to ``</s>`` to text; ids from `vocab_size` on refer to `ext_rows`.

    Raises:
        DataError: an id is out of range, or an extension token of another document in the batch.
    """
    names = extension.names
    texts = []
    for id in ids:
        if id == tokenizer.eos_id:
            break
        row = id - len(tokenizer)
        if row >= len(ext_rows):
            raise DataError(
                f"id={id} is out of range, because the vocabulary has {len(tokenizer)} tokens and "
                f"ext_rows {len(ext_rows)} rows. Pass the ext_rows of the decoded batch."
            )
        token = ext_rows[row] if row >= 0 else (id, 0)
        if row >= 0 and token not in names:
            raise DataError(
                f"id={id} is the extension token {token} of another document of the batch. Exclude "
                "the id when generating the answers of this document."
            )
        texts.append(names[token] if token in names else tokenizer.decode([id]))
    return "".join(texts)


def encode_text(
    text: str, tokenizer: CPMBeeTokenizer, extension: Extension | None = None
) -> tuple[list[Token], Extension]:
    """Encode a text as (id, sub id) pairs; also return the extended extension table.

    Raises:
        DataError: the text contains a token that only the encoder inserts, an unknown special
            token, or a ``<`` that does not begin a special token.
    """
    texts, tokens = extension or Extension({}, {})
    ids, texts = tokenizer.encode_extended(text, texts)
    tokens = dict(tokens)
    counts = Counter(base for base, _ in tokens.values())
    for id in ids:
        if id in (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id):
            raise DataError(
                f"the token {tokenizer.decode([id])} marks the beginning or end of a text, so "
                "it must not occur in a text. Write << for the character <."
            )
        if id >= len(tokenizer) and id not in tokens:
            base = _base_id(texts[id], tokenizer)
            tokens[id] = base, counts[base]
            counts[base] += 1
    return [tokens.get(id, (id, 0)) for id in ids], Extension(texts, tokens)


def _base_id(text: str, tokenizer: CPMBeeTokenizer) -> int:
    """Return the base id for a token that is not in the vocabulary."""
    if not is_special(text):
        return tokenizer.unk_id
    base = f"<{text[1:-1].split('_', maxsplit=1)[0]}>"
    if base not in tokenizer.special_tokens:
        allowed = [
            name for name in tokenizer.special_tokens if name not in ("<s>", "</s>", "<pad>")
        ]
        raise DataError(
            f"unknown special token {text} (supported: {', '.join(allowed)}, also with a number "
            f"such as <mask_0>).{suggest(base, allowed)} Write << for the character <."
        )
    return tokenizer.special_tokens[base]


def _encode_segments(
    segments: Sequence[Segment], tokenizer: CPMBeeTokenizer, extension: Extension | None
) -> tuple[list[list[Token]], Extension]:
    """Encode each segment as ``<s>``, its text and, except for answers, ``</s>``."""
    extension = extension or Extension({}, {})
    begin, end = [(tokenizer.bos_id, 0)], [(tokenizer.eos_id, 0)]
    parts = []
    for segment in segments:
        try:
            tokens, extension = encode_text(segment.text, tokenizer, extension)
        except DataError as error:
            path = ".".join(segment.path) or "the top level"
            raise DataError(f"the text at {path} is not valid: {error}") from error
        parts.append(begin + tokens + ([] if segment.answer else end))
    return parts, extension


def _check_blanks(
    segments: Sequence[Segment], parts: Sequence[Sequence[Token]], extension: Extension
) -> None:
    """Raise `DataError` for a special token under ``<ans>`` without a blank in the document."""
    present = {
        token
        for segment, part in zip(segments, parts, strict=True)
        if not segment.within_answer and segment.path != (ANSWER_KEY,)
        for token in part
    }
    for segment, part in zip(segments, parts, strict=True):
        slot = segment.within_answer and not segment.answer and is_special(segment.text)
        if slot and len(part) == 3 and part[1] not in present:
            blanks = sorted(name for token, name in extension.names.items() if token in present)
            raise DataError(
                f"the answer slot {'.'.join(segment.path)} has no blank, because {segment.text} "
                "does not occur elsewhere in the document (blanks: "
                f"{', '.join(blanks) or 'none'}). Write {segment.text} at the position of the "
                "answer, or rename the slot."
            )


def _check_answers(
    segments: Sequence[Segment], parts: Sequence[Sequence[Token]], extension: Extension
) -> None:
    """Raise `UnwritableError` if an answer has an extension token that is not in the context."""
    names = extension.names
    shown = {t for s, part in zip(segments, parts, strict=True) if not s.answer for t in part}
    for segment, part in zip(segments, parts, strict=True):
        hidden = [t for t in part if t in names and t not in shown] if segment.answer else []
        if hidden:
            raise UnwritableError(
                f"the answer at {'.'.join(segment.path)} contains {names[hidden[0]]!r}, which "
                "is neither in the vocabulary nor in the rest of the document, so it cannot be "
                "generated. Add the text to an input field, or remove the document."
            )


def _copy(data: Any) -> Any:
    return {key: _copy(value) for key, value in data.items()} if isinstance(data, Mapping) else data
