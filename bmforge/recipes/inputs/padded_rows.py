"""Base class of example sources whose sequences are padded at the end to the same length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bmforge.batch import IGNORE_INDEX
from bmforge.data.load.example import Example
from bmforge.logging import get_logger
from bmforge.recipes.inputs.conversation_rows import EncodedRow

__all__ = ["PaddedRows", "has_labels", "is_real_row", "report_rows", "truncate_row"]

# Rows are padded to a multiple of this number, which sequence parallelism can divide.
_WIDTH_UNIT = 32


class PaddedRows:
    """Base class of example sources that pad their sequences to the same length.

    Attributes:
        width: length of all padded sequences in tokens.
    """

    columns: Mapping[str, tuple[int, int]] = {"labels": (1, IGNORE_INDEX)}

    def set_width(self, rows: Iterable[Any], seq_len: int) -> None:
        """Set `width` to the length of the longest sequence, rounded up, but at most `seq_len`.

        Args:
            rows: encoded sequences.
            seq_len: maximum length in tokens.
        """
        longest = max((len(row.ids) for row in rows), default=1)
        self.width = min(seq_len, -(-longest // _WIDTH_UNIT) * _WIDTH_UNIT)

    def stack(self, rows: Sequence[EncodedRow], is_real: Sequence[bool]) -> dict[str, Tensor]:
        """Stack sequences, padded at the end, into tensors; padding examples get no labels."""
        ids = torch.zeros(len(rows), self.width, dtype=torch.int64)
        labels = torch.full_like(ids, IGNORE_INDEX)
        mask = torch.zeros_like(ids)
        for number, (row, real) in enumerate(zip(rows, is_real, strict=True)):
            ids[number, : len(row.ids)] = torch.tensor(row.ids)
            mask[number, : len(row.ids)] = 1
            if real:
                labels[number, : len(row.labels)] = torch.tensor(row.labels)
        return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def is_real_row(row: Example) -> bool:
    """Return False for a padding example, whose labels were removed."""
    return row["labels"][0] != IGNORE_INDEX


def truncate_row(row: EncodedRow, seq_len: int) -> EncodedRow:
    """Return a sequence truncated to its first `seq_len` tokens."""
    return EncodedRow(row.ids[:seq_len], row.labels[:seq_len])


def has_labels(row: EncodedRow) -> bool:
    """Return True if at least one token of a sequence has a label."""
    return any(label != IGNORE_INDEX for label in row.labels)


def report_rows(count: int, dropped: int, cut: int, seq_len: int, kind: str) -> None:
    """Log how many examples there are, and how many were truncated or skipped.

    Args:
        count: number of examples in the data.
        dropped: number of examples that were skipped.
        cut: number of examples that were truncated.
        seq_len: maximum length of a sequence in tokens.
        kind: plural noun for the examples, such as "pairs".
    """
    log = get_logger()
    if cut:
        log.warning(
            "%d of %d %s are longer than data.seq_len=%d and were truncated. Raise "
            "data.seq_len to use them in full.",
            *(cut, count, kind, seq_len),
        )
    if dropped:
        log.warning(
            "%d of %d %s have no effect on the loss and were left out", dropped, count, kind
        )
    log.info("%d %s", count - dropped, kind)
