"""Describes adapters (LoRA, prefix tuning) to the C++ decoding step, as tables of pointers.

The active `Selection` determines the adapters of each token; without a selection all tokens use the
enabled adapters. The C++ decoding step reads the parameters of the adapter modules directly.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.infer.engine.native_structures import LowRankUpdate, LowRankUpdates, PrefixPair
from bmforge.nn.adapter_selection import Selection, active_selection, adapter_choice_of, weight_of
from bmforge.nn.low_rank import LowRank
from bmforge.nn.part import adapters_of
from bmforge.nn.prefix import KeyValuePrefix
from bmforge.nn.product_kernels import PLAIN_KINDS

__all__ = ["AdapterTables", "find_low_ranks", "read_prefixes"]


def find_low_ranks(module: nn.Module | None) -> dict[str, LowRank]:
    """Return a linear layer's LoRA modules that the C++ decoding step supports, by adapter name.

    DoRA, biases and modules whose factors have two dtypes are not supported.
    """
    return {
        name: part
        for name, part in ([] if module is None else adapters_of(module))
        if type(part) is LowRank
        and part.magnitude is None
        and part.bias is None
        and part.down.dtype == part.up.dtype
    }


class AdapterTables:
    """Tables of the LoRA updates of every adapted linear layer, for the C++ decoding step.

    The table of the previous call is reused if the selected adapters and the batch size are the
    same; the caller creates a new `AdapterTables` when a module has changed.

    Args:
        adapted: LoRA modules of every adapted linear layer, in the order of `Matrix.adapters`.

    Attributes:
        parts: set of all LoRA modules in `adapted`.
    """

    def __init__(self, adapted: Sequence[tuple[LowRank, ...]]) -> None:
        self._adapted = adapted
        self.parts = frozenset(part for parts in adapted for part in parts)
        self._key: tuple[Selection | None, int, int] | None = None
        self._table: Any = None
        self._width = 0
        self._kept: list[Any] = []  # keeps the memory behind raw pointers alive

    def find(self, rows: int, tokens: int) -> tuple[int | None, int]:
        """Return the address of a batch's table, and the largest sum of LoRA ranks of a layer.

        Args:
            rows: number of samples in the batch.
            tokens: number of tokens per sample.
        """
        if not self._adapted:
            return None, 0
        key = active_selection(), rows, tokens
        if key != self._key:
            self._fill(rows, tokens)
            self._key = key
        return ctypes.addressof(self._table), self._width

    def _fill(self, rows: int, tokens: int) -> None:
        # Index 0 is for layers without adapters.
        self._table, self._kept = (LowRankUpdates * (1 + len(self._adapted)))(), []
        self._width, marks = 0, {}
        for number, parts in enumerate(self._adapted, 1):
            updates, width = [], 0
            for part in parts:
                choice = adapter_choice_of(part)
                if choice.weight == 0:
                    continue
                samples = choice.samples
                if id(samples) not in marks:  # adapters share the tensor over all layers
                    marks[id(samples)] = self._mark(samples, rows, tokens)
                width += part.down.shape[0]
                updates.append(_describe(part, choice.weight, marks[id(samples)]))
            array = (LowRankUpdate * len(updates))(*updates)
            self._kept.append(array)
            self._table[number] = LowRankUpdates(ctypes.addressof(array), len(updates))
            self._width = max(self._width, width)

    def _mark(self, samples: Tensor | None, rows: int, tokens: int) -> int | None:
        """Return the address of a byte mask of the tokens of `samples`; None for all tokens."""
        if samples is None:
            return None
        selection = active_selection()
        count = rows if selection is None else selection.batch_size or rows
        mask = torch.zeros(count, rows * tokens // count, dtype=torch.uint8)
        mask[samples] = 1
        self._kept.append(mask)
        return mask.data_ptr()


def _describe(part: LowRank, weight: float, tokens: int | None) -> Any:
    down, up = part.down, part.up
    numbers = down.shape[0], PLAIN_KINDS[down.dtype], part.scale * weight
    return LowRankUpdate(down.data_ptr(), up.data_ptr(), tokens, *numbers)


def read_prefixes(
    prefixes: Sequence[KeyValuePrefix], dtype: torch.dtype
) -> tuple[Any, int, list[Tensor]]:
    """Return the table of prefix tensors, the length of the longest prefix, and the tensors.

    Args:
        prefixes: prefix modules; `AttentionPart.prefix` numbers them from 1, and 0 means no prefix.
        dtype: dtype of the model's keys, to which keys and values are rounded.
    """
    table, tensors = (PrefixPair * (1 + len(prefixes)))(), []
    for number, prefix in enumerate(prefixes, 1):
        if weight_of(prefix) == 0:
            continue
        keys, values = (part.detach().to(dtype).float().contiguous() for part in prefix())
        tensors += [keys, values]
        table[number] = PrefixPair(keys.data_ptr(), values.data_ptr(), keys.shape[1])
    return table, max((pair.count for pair in table), default=0), tensors
