"""Integer tensors that describe a step of the model, sent to each device in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from bmforge.device import is_host, send_to
from bmforge.infer.engine.pages import PAGE_TOKENS

__all__ = ["StepRow", "StepTables", "TablesOnDevice"]

# Rows with more tokens read their pages once for all tokens, instead of once per token.
_FEW_TOKENS = 16


@dataclass(frozen=True)
class StepRow:
    """Tokens of one sequence that a step computes.

    Args:
        pages: page table of the sequence.
        start: position of the first token; the keys of all earlier tokens are in the pages.
        end: position after the last token.
    """

    pages: Sequence[int]
    start: int
    end: int

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.end - self.start


@dataclass(frozen=True)
class TablesOnDevice:
    """The integer tensors of a step on one device, for the T tokens of all rows.

    Args:
        ids: token ids.
        positions: positions of the tokens in their sequences.
        pages: page index of each token.
        offsets: position of each token in its page.
        scored: indices of the tokens whose logits are needed.
        row_pages: pages of each row.
        page_tables: pages of each token's sequence, on accelerators if no row has many tokens.
        ends: number of tokens that each token attends to; None without `page_tables`.

    Shape:
        ids, positions, pages, offsets: (T,) int64; scored: (M,) int64; row_pages: (width,) int64
        each; page_tables: (T, width) int32; ends: (T,) int32
    """

    ids: Tensor
    positions: Tensor
    pages: Tensor
    offsets: Tensor
    scored: Tensor
    row_pages: tuple[Tensor, ...]
    page_tables: Tensor | None
    ends: Tensor | None


class StepTables:
    """Builds the integer tensors of a step on the host, and sends them to devices.

    Args:
        rows: sequences and positions of the tokens.
        tokens: token ids of each row; None if they are not needed.
        num_scored: number of trailing tokens of each row whose logits are needed.
    """

    def __init__(
        self,
        rows: Sequence[StepRow],
        tokens: Sequence[Sequence[int]] | None = None,
        num_scored: Sequence[int] = (),
    ) -> None:
        self.rows = rows
        self._positions = [n for row in rows for n in range(row.start, row.end)]
        count = len(self._positions)
        self._ids = [0] * count if tokens is None else [id for row in tokens for id in row]
        row_of = [row for row in rows for _ in range(row.length)]
        self._row_of = row_of
        places = zip(row_of, self._positions, strict=True)
        self._pages = [row.pages[n // PAGE_TOKENS] for row, n in places]
        row_ends = list(accumulate(row.length for row in rows))
        self._scored = [
            token
            for end, scored in zip(row_ends, num_scored, strict=False)
            for token in range(end - scored, end)
        ]
        self._on_device: dict[torch.device, TablesOnDevice] = {}

    def at(self, device: torch.device) -> TablesOnDevice:
        """Return the integer tensors on a device, copied by the first call of a step."""
        if device not in self._on_device:
            self._on_device[device] = self._send(device)
        return self._on_device[device]

    def _send(self, device: torch.device) -> TablesOnDevice:
        offsets = [position % PAGE_TOKENS for position in self._positions]
        widths = [-(-row.end // PAGE_TOKENS) for row in self.rows]
        lists = [self._ids, self._positions, self._pages, offsets, self._scored]
        lists += [list(row.pages[:n]) for row, n in zip(self.rows, widths, strict=True)]
        num_wide = len(lists)
        is_short = not is_host(device) and all(row.length <= _FEW_TOKENS for row in self.rows)
        if is_short:
            ends = [position + 1 for position in self._positions]
            lists += [ends, self._padded_tables(max(widths))]
        sizes = [len(values) for values in lists]
        host = torch.tensor([number for values in lists for number in values], dtype=torch.int32)
        sent = send_to(host, device)
        num_wide_values = sum(sizes[:num_wide])
        wide = sent[:num_wide_values].long().split(sizes[:num_wide])
        ids, positions, pages, slots, scored, *row_pages = wide
        indices = TablesOnDevice(
            ids, positions, pages, slots, scored, tuple(row_pages), page_tables=None, ends=None
        )
        if not is_short:
            return indices
        on_device, tables = sent[num_wide_values:].split(sizes[num_wide:])
        tables = tables.view(len(self._positions), max(widths))
        return replace(indices, page_tables=tables, ends=on_device)

    def _padded_tables(self, width: int) -> list[int]:
        """Return the page table of every token's row, padded with page 0."""
        tables = {
            id(row): [*row.pages[:width], *[0] * (width - len(row.pages))] for row in self.rows
        }
        return [page for row in self._row_of for page in tables[id(row)]]
