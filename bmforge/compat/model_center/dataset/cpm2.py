"""Pretraining samples of CPM-2, from a corpus of sources and targets."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from bmforge.batch import IGNORE_INDEX
from bmforge.compat.model_center.dataset.cpm1 import stack_rows

__all__ = ["CPM2_Dataset"]

# In the corpus, ids of blanks follow the vocabulary; in the model, they are among its last ids.
_VOCABULARY, _BLANKS = 26240, 190


class CPM2_Dataset(Dataset[Any]):  # noqa: N801
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

    def __len__(self) -> int:
        return len(self.ctx)

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

    def __getitem__(self, index: Any) -> dict[str, Any] | None:
        """Return one pair, or the stacked pairs of a slice."""
        if isinstance(index, int):
            return self._row(self.ctx[index], self.tgt[index])
        return stack_rows(map(self._row, self.ctx[index], self.tgt[index]))


def _renumber(ids: Any) -> torch.Tensor:
    wide = np.asarray(ids).astype("int64")
    return torch.from_numpy(wide - (wide >= _VOCABULARY) * _BLANKS)
