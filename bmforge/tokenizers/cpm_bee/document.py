"""CPM-Bee documents: a nested dict of texts becomes token ids, and answers go back into the dict.

Every key and every text is a segment ``<s> tokens </s>``; a text under ``<ans>``, which the model
writes, is ``<s> tokens``. A token that only the extension table has is written as its base id
(``<mask_3>`` as ``<mask>``, unknown text as ``<unk>``) and a sub id, its number among those of the
same base in order of appearance.

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
    relate,
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
    """A document has more tokens than the window."""


class UnwritableError(DataError):
    """An answer that no model could write."""


class Extension(NamedTuple):
    """What a sample has beyond the vocabulary.

    Attributes:
        texts: extension id -> text, the tokenizer's table.
        tokens: extension id -> (base id, sub id), as the model reads it.
    """

    texts: dict[int, str]
    tokens: dict[int, Token]

    @property
    def names(self) -> dict[Token, str]:
        """(base id, sub id) -> text."""
        return {token: self.texts[id] for id, token in self.tokens.items()}


class AnswerSlot(NamedTuple):
    """Where an answer lies.

    Attributes:
        path: keys under ``<ans>`` that lead to it; () where ``<ans>`` itself is the text.
        segment: number of its segment.
        start: index of its ``<s>`` in the ids.
        stop: index after its last token.
    """

    path: tuple[str, ...]
    segment: int
    start: int
    stop: int


class EncodedDocument(NamedTuple):
    """A document as numbers; T tokens, n segments.

    Attributes:
        ids: (T,) int32 ids below `vocab_size`.
        subs: (T,) int32 sub ids, 0 for all that the vocabulary has.
        context: (T,) bool, False where the model writes.
        segs: (T,) int32 segment numbers.
        segment_rel: (n * n,) int32 relations of the segments, see `relate`.
        n_segments: n.
        answers: one slot for every text under ``<ans>``, in the order in which they are written.
        extension: unseen specials and unknown text.
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
        """Extension id -> text, as the tokenizer's `decode` takes it."""
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
    """Turn a nested dict of texts, with ``<ans>``, into what CPM-Bee reads.

    Args:
        document: texts are in the tokenizer's language: ``<<`` is ``<``, ``<mask_0>`` a blank.
        tokenizer: CPM-Bee's.
        max_length: the window in tokens; None sets no limit.
        extension: that of the documents before this one in the same sample, to be continued.
        blank_answers: a question: whatever stands under ``<ans>`` is still to be written.
        order_key: shuffle the keys under ``<ans>``, as this alone decides; None keeps their order.
        max_depth: relations count this many steps less one, and more as if they were so many.
        max_nesting: how deep a text may hang under the root.

    Raises:
        DataError: no ``<ans>``; not a dict of texts, or nested too deep; an answer slot that names
            no blank; an unknown special.
        UnwritableError: a DataError: an answer with text that the vocabulary cannot spell and the
            rest of the document does not have, so that no model could write it.
        TooLongError: a DataError: longer than the window.
    """
    segments = flatten_document(
        document, blank_answers=blank_answers, order_key=order_key, max_nesting=max_nesting
    )
    first = extension is None
    parts, extension = _encode_segments(segments, tokenizer, extension)
    _check_blanks(segments, parts, extension)
    if first:  # what comes later in a sample is only read, never written
        _check_answers(segments, parts, extension)
    bounds = np.cumsum([0, *(len(part) for part in parts)])
    if max_length is not None and bounds[-1] > max_length:
        raise TooLongError(
            f"the document has {bounds[-1]} tokens, which is more than the window "
            f"max_length={max_length}: shorten it, or raise max_length if the model allows"
        )
    ids, subs = np.array([token for part in parts for token in part], dtype=np.int32).T
    segs = np.repeat(np.arange(len(segments), dtype=np.int32), np.diff(bounds))
    written = np.array([segment.answer for segment in segments])
    slots = tuple(
        AnswerSlot(segment.path[1:], i, int(bounds[i]), int(bounds[i + 1]))
        for i, segment in enumerate(segments)
        if segment.answer
    )
    relations = relate([s.parent for s in segments], [s.depth for s in segments], max_depth)
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
    """Return a copy of `document` with what was written under ``<ans>``.

    Args:
        document: what was encoded.
        encoded: what `encode_document` made of it.
        answers: for every slot of ``encoded.answers`` its output ids, with or without ``</s>``;
            None leaves None in the document.
        tokenizer: CPM-Bee's.
        ext_rows: (base id, sub id) of the output rows from `vocab_size` on.

    Raises:
        DataError: another number of answers than slots, or an id that this document does not have.
    """
    if len(answers) != len(encoded.answers):
        raise DataError(
            f"{len(answers)} answers were given for {len(encoded.answers)} slots under "
            f"{ANSWER_KEY!r}: {['.'.join(slot.path) for slot in encoded.answers]}"
        )
    filled = _copy(document)
    for slot, ids in zip(encoded.answers, answers, strict=True):
        keys = (ANSWER_KEY, *slot.path)
        place = filled
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = (
            None if ids is None else decode_answer(ids, encoded.extension, tokenizer, ext_rows)
        )
    return filled


def decode_answer(
    ids: Iterable[int],
    extension: Extension,
    tokenizer: CPMBeeTokenizer,
    ext_rows: Sequence[Token] = (),
) -> str:
    """Return the text of output ids, up to ``</s>``; from `vocab_size` on they name `ext_rows`.

    Raises:
        DataError: an id that is no output, or a row of another document of the batch.
    """
    names = extension.names
    texts = []
    for id in ids:
        if id == tokenizer.eos_id:
            break
        row = id - len(tokenizer)
        if row >= len(ext_rows):
            raise DataError(
                f"id={id} is no output: there are {len(tokenizer)} tokens and {len(ext_rows)} "
                "extension rows; give the ext_rows of the batch that was decoded"
            )
        token = ext_rows[row] if row >= 0 else (id, 0)
        if row >= 0 and token not in names:
            raise DataError(
                f"id={id} is the token {token}, which another document of the batch brought: "
                "the decoding step must ban it for this one"
            )
        texts.append(names[token] if token in names else tokenizer.decode([id]))
    return "".join(texts)


def encode_text(
    text: str, tokenizer: CPMBeeTokenizer, extension: Extension | None = None
) -> tuple[list[Token], Extension]:
    """Return the (id, sub id) of a text, and the extension it continues.

    Raises:
        DataError: a token that only the encoder writes, an unknown special, or a stray ``<``.
    """
    texts, tokens = extension or Extension({}, {})
    ids, texts = tokenizer.encode_extended(text, texts)
    tokens = dict(tokens)
    counts = Counter(base for base, _ in tokens.values())
    for id in ids:
        if id in (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id):
            raise DataError(
                f"the token {tokenizer.decode([id])} marks where texts begin and end, so a text "
                "cannot have it: write << for the character <"
            )
        if id >= len(tokenizer) and id not in tokens:
            base = _base_id(texts[id], tokenizer)
            tokens[id] = base, counts[base]
            counts[base] += 1
    return [tokens.get(id, (id, 0)) for id in ids], Extension(texts, tokens)


def _base_id(text: str, tokenizer: CPMBeeTokenizer) -> int:
    """Return the id that stands for a token of the extension table."""
    if not is_special(text):
        return tokenizer.unk_id
    base = f"<{text[1:-1].split('_', maxsplit=1)[0]}>"
    if base not in tokenizer.special_tokens:
        known = [name for name in tokenizer.special_tokens if name not in ("<s>", "</s>", "<pad>")]
        raise DataError(
            f"the special token {text} is unknown: known are {', '.join(known)}, also with a "
            f"number such as <mask_0>.{suggest(base, known)} Write << for the character <"
        )
    return tokenizer.special_tokens[base]


def _encode_segments(
    segments: Sequence[Segment], tokenizer: CPMBeeTokenizer, extension: Extension | None
) -> tuple[list[list[Token]], Extension]:
    """Return the tokens of every segment, the marks around it included."""
    extension = extension or Extension({}, {})
    begin, end = [(tokenizer.bos_id, 0)], [(tokenizer.eos_id, 0)]
    parts = []
    for segment in segments:
        try:
            tokens, extension = encode_text(segment.text, tokenizer, extension)
        except DataError as error:
            raise DataError(f"at {'.'.join(segment.path) or 'the top'}: {error}") from error
        parts.append(begin + tokens + ([] if segment.answer else end))
    return parts, extension


def _check_blanks(
    segments: Sequence[Segment], parts: Sequence[Sequence[Token]], extension: Extension
) -> None:
    """Raise DataError if a key under ``<ans>`` is a special that the rest of the document lacks."""
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
                f"the answer slot {'.'.join(segment.path)} names no blank: {segment.text} stands "
                f"nowhere else in the document (there are {', '.join(blanks) or 'none'}); write "
                "it where the answer belongs, or give the slot another name"
            )


def _check_answers(
    segments: Sequence[Segment], parts: Sequence[Sequence[Token]], extension: Extension
) -> None:
    """Raise DataError if an answer has an extension token that no context shows."""
    names = extension.names
    shown = {t for s, part in zip(segments, parts, strict=True) if not s.answer for t in part}
    for segment, part in zip(segments, parts, strict=True):
        hidden = [t for t in part if t in names and t not in shown] if segment.answer else []
        if hidden:
            raise UnwritableError(
                f"the answer at {'.'.join(segment.path)} has {names[hidden[0]]!r}, which the "
                "vocabulary cannot spell and the rest of the document does not show, so no model "
                "could write it: show it there, or leave this document out"
            )


def _copy(data: Any) -> Any:
    return {key: _copy(value) for key, value in data.items()} if isinstance(data, Mapping) else data
