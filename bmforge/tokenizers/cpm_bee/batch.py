"""Batches of CPM-Bee: samples with in-context examples, packed into rows, as the model takes them.

An instance is one document to learn from and the examples that it may look at. A row holds as many
instances as fit, told apart by `span`; which row an instance goes to is decided by best fit.

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
    """One document and its in-context examples as one stretch of T tokens.

    Attributes:
        ids, subs, context, segs: as in `EncodedDocument`; the examples are all context.
        sample_ids: (T,) 0 for the document itself, 1, 2, ... for the examples.
        num_segments: (T,) how many segments the token's own document has.
        segment_rel_offset: (T,) where its relations begin in `segment_rel`.
        segment_rel: (R,) the relations of one document after the other.
        answers: the document's slots.
        extension: of the document and its examples.
        task: name of the task it belongs to.
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
    """A training batch of B rows of T tokens.

    Attributes:
        inputs: the arguments of CPM-Bee's forward and ``labels``, by name; see `collate_rows`.
        task_ids: (B, T) index into `tasks` of the instance that a token belongs to.
        tasks: names.
    """

    inputs: dict[str, NDArray[Any]]
    task_ids: NDArray[np.int32]
    tasks: tuple[str, ...]


def join_examples(encoded: Sequence[EncodedDocument], task: str = "") -> Instance:
    """Return the first document with the others behind it as in-context examples.

    Args:
        encoded: each one's extension continues that of the one before.
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
    """Encode a document and as many of the examples, in their order, as fit into the window.

    Args:
        document: learnt from; its answers are given.
        tokenizer: CPM-Bee's.
        examples: documents with their answers, to look at only.
        max_length: the window in tokens; None sets no limit.
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
    """Open rows, filled by best fit: an item goes where it leaves the least room.

    Args:
        max_length: room of a row.

    Attributes:
        rows: the items of every open row, oldest row first.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.rows: list[list[int]] = []
        self._free: list[int] = []

    def add(self, item: int, length: int) -> None:
        """Put an item of `length` into an open row, or into a new one where it fits into none.

        Raises:
            DataError: it is longer than a whole row.
        """
        if length > self.max_length:
            raise DataError(
                f"item {item} has {length} tokens, a row has room for {self.max_length}"
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
        """Open one more row with these (item, length), as it stood when the state was taken."""
        self.rows.append([item for item, _ in items])
        self._free.append(self.max_length - sum(length for _, length in items))

    def take(self, count: int) -> list[list[int]]:
        """Close the `count` oldest rows and return their items."""
        taken = self.rows[:count]
        del self.rows[:count], self._free[:count]
        return taken


def collate_rows(
    rows: Sequence[Sequence[Instance]], tokenizer: CPMBeeTokenizer, length: int | None = None
) -> RowBatch:
    """Return what CPM-Bee's forward takes for rows of packed instances.

    Args:
        rows: the instances of every row.
        tokenizer: CPM-Bee's.
        length: T; None takes the longest row.

    Shape:
        input, input_sub, sample_ids, num_segments, segment, segment_rel_offset, span: (B, T) int32
        context: (B, T) bool
        length: (B,) int32
        segment_rel: (B, R) int32
        ext_table_ids, ext_table_sub: (E,) int32; (0, 1) alone where nothing is extended
        labels: (B, T) int64, not to be shifted: -100, a token, or `vocab_size` + extension row

    Raises:
        DataError: a row is longer than `length`.
    """
    longest = max(sum(map(len, row)) for row in rows)
    width = longest if length is None else length
    if longest > width:
        raise DataError(f"a row has {longest} tokens, which is more than length={width}")
    tokens = extension_rows([instance for row in rows for instance in row])
    columns = {name: np.zeros((len(rows), width), dtype=np.int32) for name in _COLUMNS}
    columns["labels"] = np.full((len(rows), width), IGNORE_INDEX, dtype=np.int64)
    tasks = tuple(dict.fromkeys(instance.task for row in rows for instance in row))
    task_ids = np.zeros((len(rows), width), dtype=np.int32)
    numbers = {token: len(tokenizer) + i for i, token in enumerate(tokens)}
    for i, row in enumerate(rows):
        start = relation = 0
        for span, instance in enumerate(row):
            here = slice(start, start + len(instance))
            for name, values in _columns(instance, relation, span).items():
                columns[name][i, here] = values
            columns["labels"][i, here] = _label(instance, tokenizer, numbers)
            task_ids[i, here] = tasks.index(instance.task)
            start, relation = here.stop, relation + len(instance.segment_rel)
    inputs: dict[str, NDArray[Any]] = dict(columns)
    inputs["context"] = columns["context"].astype(bool)
    inputs["length"] = np.array([sum(map(len, row)) for row in rows], dtype=np.int32)
    inputs["segment_rel"] = pad_relations(
        [np.concatenate([instance.segment_rel for instance in row]) for row in rows]
    )
    inputs.update(extension_inputs(tokens))
    return RowBatch(inputs, task_ids, tasks)


def extension_rows(instances: Sequence[Instance]) -> list[Token]:
    """Return the (base id, sub id) that need an output row, in the order of their appearance."""
    found: dict[Token, None] = {}
    for instance in instances:
        extended = np.flatnonzero(instance.subs)
        pairs = zip(instance.ids[extended].tolist(), instance.subs[extended].tolist(), strict=True)
        found.update(dict.fromkeys(pairs))
    return list(found)


def extension_inputs(tokens: Sequence[Token]) -> dict[str, NDArray[np.int32]]:
    """Return ``ext_table_ids`` and ``ext_table_sub``; a placeholder where there is no token."""
    ids, subs = np.array(tokens or [_NO_EXTENSION], dtype=np.int32).T
    return {
        "ext_table_ids": np.ascontiguousarray(ids),
        "ext_table_sub": np.ascontiguousarray(subs),
    }


def pad_relations(relations: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    """Return the relations of every row, zeros behind the shorter ones; (B, R)."""
    padded = np.zeros((len(relations), max(map(len, relations))), dtype=np.int32)
    for row, values in zip(padded, relations, strict=True):
        row[: len(values)] = values
    return padded


_COLUMNS = (
    "input", "input_sub", "context", "sample_ids", "num_segments", "segment",
    "segment_rel_offset", "span",
)  # fmt: skip


def _columns(instance: Instance, relation: int, span: int) -> dict[str, NDArray[Any]]:
    """Return what one instance has in each column; `relation`: relations of its row before it."""
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
    """Return at every token that the model writes from the one to come, ``</s>`` at its end."""
    outputs = instance.ids.astype(np.int64)
    for i in np.flatnonzero(instance.subs).tolist():
        outputs[i] = numbers[int(instance.ids[i]), int(instance.subs[i])]
    following = np.append(outputs[1:], tokenizer.bos_id)
    following[following == tokenizer.bos_id] = tokenizer.eos_id
    return np.where(instance.context, IGNORE_INDEX, following)
