"""Packs CPM-Bee documents with in-context examples into batches.

An instance is a training document with its examples. A sequence contains as many instances as fit,
distinguished by `span`; best-fit packing assigns instances to sequences.
Source: ``_MixedDatasetBatchPacker`` of OpenBMB/CPM-Bee, in
``cpm_live/training_tasks/bee/pretrain.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bmforge.batch import IGNORE_INDEX
from bmforge.errors import DataError
from bmforge.tokenizers.cpm_bee.document import (
    AnswerSlot,
    EncodedDocument,
    Extension,
    Token,
    encode_document,
)
from bmforge.tokenizers.cpm_bee.tokenizer import CPMBeeTokenizer

__all__ = ["BestFit", "Instance", "RowBatch", "build_instance", "collate_rows", "join_examples"]

_NO_EXTENSION: Token = (0, 1)


@dataclass(frozen=True, eq=False)
class Instance:
    """Training document with its in-context examples, as a sequence of T tokens.

    Attributes:
        ids, subs, context, segs: see `EncodedDocument`; examples are context only.
        sample_ids: (T,), 0 for the document, 1, 2, ... for the examples.
        num_segments: (T,), number of segments in the token's document.
        segment_rel_offset: (T,), start of the token's document in `segment_rel`.
        segment_rel: (R,), concatenated segment relations of the documents.
        answers: answer slots of the document.
        extension: extension table of the document and its examples.
        task: name of the task.
    """

    ids: NDArray[np.int32]
    subs: NDArray[np.int32]
    context: NDArray[np.bool_]
    segs: NDArray[np.int32]
    sample_ids: NDArray[np.int32]
    num_segments: NDArray[np.int32]
    segment_rel_offset: NDArray[np.int32]
    segment_rel: NDArray[np.int32]
    answers: tuple[AnswerSlot, ...]
    extension: Extension
    task: str

    def __len__(self) -> int:
        return len(self.ids)


class RowBatch(NamedTuple):
    """Training batch of B sequences of T tokens.

    Attributes:
        inputs: arguments of CPM-Bee's forward and ``labels``; see `collate_rows`.
        task_ids: (B, T), task of each token, as an index into `tasks`.
        tasks: names of the tasks.
    """

    inputs: dict[str, NDArray[Any]]
    task_ids: NDArray[np.int32]
    tasks: tuple[str, ...]


def join_examples(encoded: Sequence[EncodedDocument], task: str = "") -> Instance:
    """Join an encoded document and its encoded in-context examples to an instance.

    Args:
        encoded: the document, then its examples, each encoded with the extension table of the
            previous document.
        task: name of the task.
    """
    lengths = [len(document.ids) for document in encoded]
    relations = [len(document.segment_rel) for document in encoded]
    contexts = [encoded[0].context, *(np.ones(length, dtype=bool) for length in lengths[1:])]

    def spread(values: Sequence[int]) -> NDArray[np.int32]:
        return np.repeat(np.asarray(values, dtype=np.int32), lengths)

    return Instance(
        ids=np.concatenate([document.ids for document in encoded]),
        subs=np.concatenate([document.subs for document in encoded]),
        context=np.concatenate(contexts),
        segs=np.concatenate([document.segs for document in encoded]),
        sample_ids=spread(range(len(encoded))),
        num_segments=spread([document.n_segments for document in encoded]),
        segment_rel_offset=spread([0, *np.cumsum(relations)[:-1].tolist()]),
        segment_rel=np.concatenate([document.segment_rel for document in encoded]),
        answers=encoded[0].answers,
        extension=encoded[-1].extension,
        task=task,
    )


def build_instance(
    document: Mapping[str, Any],
    tokenizer: CPMBeeTokenizer,
    examples: Sequence[Mapping[str, Any]] = (),
    *,
    max_length: int | None = None,
    order_key: bytes | None = None,
    task: str = "",
) -> Instance:
    """Encode a document with as many of its in-context examples, in order, as fit the window.

    Args:
        document: training document with its answers.
        tokenizer: CPM-Bee's tokenizer.
        examples: documents with answers, used as context.
        max_length: window in tokens; None for no limit.
        order_key: see `encode_document`.
        task: name of the task.

    Raises:
        DataError: see `encode_document`.
    """
    main = encode_document(document, tokenizer, max_length=max_length, order_key=order_key)
    encoded, used = [main], len(main.ids)
    for example in examples:
        extension = encoded[-1].extension
        more = encode_document(example, tokenizer, extension=extension, order_key=order_key)
        used += len(more.ids)
        if max_length is not None and used > max_length:
            break
        encoded.append(more)
    return join_examples(encoded, task)


class BestFit:
    """Best-fit packing: each item is added to the fullest sequence in which it still fits.

    Args:
        max_length: maximum length of a sequence.

    Attributes:
        rows: items of each open sequence, oldest first.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.rows: list[list[int]] = []
        self._free: list[int] = []

    def add(self, item: int, length: int) -> None:
        """Add an item of `length` tokens to an open sequence, or to a new one if none has space.

        Raises:
            DataError: the item is longer than a sequence.
        """
        if length > self.max_length:
            raise DataError(
                f"item {item} has {length} tokens, more than max_length={self.max_length}. Shorten "
                "the item, or raise max_length."
            )
        fitting = [(free, i) for i, free in enumerate(self._free) if free >= length]
        if fitting:
            _, best = min(fitting)
            self.rows[best].append(item)
            self._free[best] -= length
        else:
            self.rows.append([item])
            self._free.append(self.max_length - length)

    def restore(self, items: Sequence[tuple[int, int]]) -> None:
        """Restore an open sequence from a saved state: pairs (item, length)."""
        self.rows.append([item for item, _ in items])
        self._free.append(self.max_length - sum(length for _, length in items))

    def take(self, count: int) -> list[list[int]]:
        """Close the `count` oldest sequences and return their items."""
        taken = self.rows[:count]
        del self.rows[:count], self._free[:count]
        return taken


def collate_rows(
    rows: Sequence[Sequence[Instance]], tokenizer: CPMBeeTokenizer, length: int | None = None
) -> RowBatch:
    """Collate packed instances into the arguments of CPM-Bee's forward.

    Args:
        rows: instances of each sequence.
        tokenizer: CPM-Bee's tokenizer.
        length: T (default: the length of the longest sequence).

    Shape:
        input, input_sub, sample_ids, num_segments, segment, segment_rel_offset, span: (B, T) int32
        context: (B, T) bool
        length: (B,) int32
        segment_rel: (B, R) int32
        ext_table_ids, ext_table_sub: (E,) int32; a single entry (0, 1) without an extension
        labels: (B, T) int64, not shifted: -100, a token id, or `vocab_size` + extension row

    Raises:
        DataError: a sequence is longer than `length`.
    """
    longest = max(sum(map(len, row)) for row in rows)
    width = longest if length is None else length
    if longest > width:
        raise DataError(
            f"a packed sequence has {longest} tokens, more than length={width}. Shorten the "
            "sequence, or raise length."
        )
    tokens = extension_rows([instance for row in rows for instance in row])
    columns = {name: np.zeros((len(rows), width), dtype=np.int32) for name in _COLUMNS}
    columns["labels"] = np.full((len(rows), width), IGNORE_INDEX, dtype=np.int64)
    tasks = tuple(dict.fromkeys(instance.task for row in rows for instance in row))
    task_ids = np.zeros((len(rows), width), dtype=np.int32)
    numbers = {token: len(tokenizer) + i for i, token in enumerate(tokens)}
    for i, row in enumerate(rows):
        start = relation = 0
        for span, instance in enumerate(row):
            row_span = slice(start, start + len(instance))
            for name, values in _columns(instance, relation, span).items():
                columns[name][i, row_span] = values
            columns["labels"][i, row_span] = _label(instance, tokenizer, numbers)
            task_ids[i, row_span] = tasks.index(instance.task)
            start, relation = row_span.stop, relation + len(instance.segment_rel)
    inputs: dict[str, NDArray[Any]] = dict(columns)
    inputs["context"] = columns["context"].astype(bool)
    inputs["length"] = np.array([sum(map(len, row)) for row in rows], dtype=np.int32)
    inputs["segment_rel"] = pad_relations(
        [np.concatenate([instance.segment_rel for instance in row]) for row in rows]
    )
    inputs.update(extension_inputs(tokens))
    return RowBatch(inputs, task_ids, tasks)


def extension_rows(instances: Sequence[Instance]) -> list[Token]:
    """Return the (base id, sub id) pairs that need an output row, in order of appearance."""
    tokens: dict[Token, None] = {}
    for instance in instances:
        extended = np.flatnonzero(instance.subs)
        pairs = zip(instance.ids[extended].tolist(), instance.subs[extended].tolist(), strict=True)
        tokens.update(dict.fromkeys(pairs))
    return list(tokens)


def extension_inputs(tokens: Sequence[Token]) -> dict[str, NDArray[np.int32]]:
    """Return ``ext_table_ids`` and ``ext_table_sub``; a single entry (0, 1) without tokens."""
    ids, subs = np.array(tokens or [_NO_EXTENSION], dtype=np.int32).T
    return {
        "ext_table_ids": np.ascontiguousarray(ids),
        "ext_table_sub": np.ascontiguousarray(subs),
    }


def pad_relations(relations: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    """Return (B, R): the segment relations of each sequence, padded with zeros."""
    padded = np.zeros((len(relations), max(map(len, relations))), dtype=np.int32)
    for row, values in zip(padded, relations, strict=True):
        row[: len(values)] = values
    return padded


_COLUMNS = (
    "input", "input_sub", "context", "sample_ids", "num_segments", "segment",
    "segment_rel_offset", "span",
)  # fmt: skip


def _columns(instance: Instance, relation: int, span: int) -> dict[str, NDArray[Any]]:
    """Return the per-token inputs of one instance, as a dict from input name to array.

    Args:
        instance: instance in a sequence.
        relation: offset of its relations in the sequence's `segment_rel`.
        span: index of the instance in the sequence.
    """
    return {
        "input": instance.ids,
        "input_sub": instance.subs,
        "context": instance.context,
        "sample_ids": instance.sample_ids,
        "num_segments": instance.num_segments,
        "segment": instance.segs,
        "segment_rel_offset": instance.segment_rel_offset + np.int32(relation),
        "span": np.full(len(instance), span, dtype=np.int32),
    }


def _label(
    instance: Instance, tokenizer: CPMBeeTokenizer, numbers: Mapping[Token, int]
) -> NDArray[np.int64]:
    """Return an instance's labels: the token after each answer token, or ``</s>`` at the end."""
    outputs = instance.ids.astype(np.int64)
    for i in np.flatnonzero(instance.subs).tolist():
        outputs[i] = numbers[int(instance.ids[i]), int(instance.subs[i])]
    following = np.append(outputs[1:], tokenizer.bos_id)
    following[following == tokenizer.bos_id] = tokenizer.eos_id
    return np.where(instance.context, IGNORE_INDEX, following)
