"""Pretraining samples of CPM-1 (from text segments) and of CPM-2 (from sources and targets)."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import Dataset

from bmforge.batch import IGNORE_INDEX

__all__ = ["CPM1_Dataset", "CPM1_Dataset_Merge", "CPM2_Dataset"]

_SEPARATOR = 4  # id of <sep>; a segment that ends with <sep> is predicted up to its end


class _Pairs(Dataset[Any]):
    """Base class of datasets of token sequences with targets; slices omit skipped samples."""

    ctx: Any
    tgt: Any
    skipped: ClassVar[dict[str, Any] | None] = None  # result for an index that is skipped

    def _row(self, ctx: Any, tgt: Any) -> dict[str, Any] | None:
        raise NotImplementedError(f"{type(self).__name__} must implement `_row`.")

    def __len__(self) -> int:
        return len(self.ctx)

    def __getitem__(self, index: Any) -> dict[str, Any] | None:
        """Return one sample, or the stacked samples of a slice."""
        if isinstance(index, int):
            row = self._row(self.ctx[index], self.tgt[index])
            return row or (self.skipped and dict(self.skipped))
        return stack_rows(map(self._row, self.ctx[index], self.tgt[index]))


class CPM1_Dataset(_Pairs):  # noqa: N801
    """Token sequences and their targets, padded to the same length.

    Indexing returns a dict with `ctx` (max_length,), `tgt` padded with -100, and `len_ctx`; all are
    None for a longer segment. A slice returns the stacked values of its segments.

    Args:
        ctx: token sequences.
        tgt: targets of each segment, as many as the segment has tokens.
        max_length: padded length; slices skip longer segments.
    """

    skipped: ClassVar[dict[str, Any]] = {"ctx": None, "tgt": None, "len_ctx": None}

    def __init__(self, ctx: Any, tgt: Any, max_length: int = 1024) -> None:
        self.ctx, self.tgt, self.max_length = ctx, tgt, max_length

    def _row(self, ctx: Any, tgt: Any) -> dict[str, Any] | None:
        if max(len(ctx), len(tgt)) > self.max_length:
            return None
        return {
            "ctx": _fill(ctx, self.max_length, 0),
            "tgt": _fill(tgt, self.max_length, IGNORE_INDEX),
            "len_ctx": len(ctx),
        }


class CPM1_Dataset_Merge(Dataset[Any]):  # noqa: N801
    """Text segments whose middle is predicted; all tokens attend to the remaining text.

    Python's `random` selects the middle: it begins in the second eighth and ends in the last
    quarter, or at the end of a segment that ends with `<sep>`. Indexing returns the segment, the
    target at each position (-100 if not predicted), the length, and the context mask.

    Args:
        ctx: token sequences.
        max_length: maximum length of a segment; for a longer segment, all four values are None.
    """

    def __init__(self, ctx: Any, max_length: int = 1024) -> None:
        self.ctx, self.max_length = ctx, max_length

    def __len__(self) -> int:
        return len(self.ctx)

    def __getitem__(self, index: int) -> tuple[Any, Any, Any, Any]:
        """Return the sample for one segment."""
        ctx = self.ctx[index]
        length = len(ctx)
        if length > self.max_length:
            return None, None, None, None
        begin = random.randint(length // 8, length // 4)
        end = random.randint(length // 4 * 3, length)
        if ctx[length - 1] == _SEPARATOR:
            end = length
        begin = max(begin, 1)  # nothing precedes the first token, so it is not predicted
        target = np.full(length, IGNORE_INDEX)
        target[begin - 1 : end - 1] = ctx[begin:end]
        places = np.arange(length)
        return ctx, target, length, (places < begin) | (places >= end)


def _fill(ids: Any, width: int, filling: int) -> torch.Tensor:
    row = torch.full((width,), filling, dtype=torch.long)
    row[: len(ids)] = torch.from_numpy(np.asarray(ids).astype("int64"))
    return row


def stack_rows(rows: Any) -> dict[str, Any]:
    """Stack all samples that are not None into a batch; lengths become a tensor."""
    complete = [row for row in rows if row is not None]
    names = complete[0] if complete else ()
    return {
        name: torch.stack([row[name] for row in complete])
        if isinstance(complete[0][name], torch.Tensor)
        else torch.tensor([row[name] for row in complete])
        for name in names
    }


# In the corpus, ids of blanks follow the vocabulary; in the model, they are among its last ids.
_VOCABULARY, _BLANKS = 26240, 190


class CPM2_Dataset(_Pairs):  # noqa: N801
    """Pairs of sources and targets, padded to their maximum lengths.

    Indexing returns a dict with `ctx`, `tgt` padded with -100, `len_ctx` and `len_tgt`, or None for
    a skipped pair. A slice returns the stacked values of its pairs.

    Args:
        ctx: sources.
        tgt: targets; a target that is one token too long is truncated; a pair with a longer target
            is skipped.
        max_source_length: padded length of sources; pairs with a longer source are skipped.
        max_target_length: padded length of targets, which have one more position.
    """

    def __init__(
        self, ctx: Any, tgt: Any, max_source_length: int = 512, max_target_length: int = 256
    ) -> None:
        self.ctx, self.tgt = ctx, tgt
        self.max_source_length, self.max_target_length = max_source_length, max_target_length

    def _row(self, ctx: Any, tgt: Any) -> dict[str, Any] | None:
        longest = self.max_target_length
        if len(ctx) > self.max_source_length or len(tgt) > longest + 1:
            return None
        source = torch.zeros(self.max_source_length, dtype=torch.long)
        source[: len(ctx)] = _renumber(ctx)
        target = torch.full((longest + 1,), IGNORE_INDEX)
        length = min(len(tgt), longest)
        target[:length] = _renumber(tgt)[:length]
        return {"ctx": source, "tgt": target, "len_ctx": len(ctx), "len_tgt": length}


def _renumber(ids: Any) -> torch.Tensor:
    wide = np.asarray(ids).astype("int64")
    return torch.from_numpy(wide - (wide >= _VOCABULARY) * _BLANKS)
