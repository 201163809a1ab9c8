"""Integer tensors that describe a step of the model, sent to each device in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from bmforge.device import is_host, send_to
from bmforge.infer.engine.pages import PAGE_TOKENS

__all__ = ["FEW_TOKENS", "FixedTables", "StepRow", "StepTables", "TablesOnDevice"]

# Rows with more tokens read their pages once for all tokens, instead of once per token.
FEW_TOKENS = 16


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
    """The integer tensors of a step on one device, for the T tokens of all sequences.

    Args:
        ids: token ids.
        positions: positions of the tokens in their sequences.
        pages: page index of each token.
        offsets: position of each token in its page.
        scored: indices of the tokens whose logits are needed.
        row_pages: pages of each sequence.
        few: indices of the tokens of sequences with few tokens, on accelerators; None if there are
            none.
        page_tables: pages of the sequence of each token in `few`; None without `few`.
        ends: number of tokens that each token in `few` attends to; None without `few`.

    Shape:
        ids, positions, pages, offsets: (T,) int64; scored: (M,) int64; row_pages: (width,) int64
        each; few: (F,) int64; page_tables: (F, width) int32; ends: (F,) int32
    """

    ids: Tensor
    positions: Tensor
    pages: Tensor
    offsets: Tensor
    scored: Tensor
    row_pages: tuple[Tensor, ...]
    few: Tensor | None
    page_tables: Tensor | None
    ends: Tensor | None


class StepTables:
    """Builds the integer tensors of a step on the host, and sends them to devices.

    Args:
        rows: sequences and positions of the tokens.
        tokens: token ids of each sequence; None if they are not needed.
        num_scored: number of trailing tokens of each sequence whose logits are needed.
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
        few = [n for n, row in enumerate(self._row_of) if row.length <= FEW_TOKENS]
        few = [] if is_host(device) else few
        lists += [few, *(list(row.pages[:n]) for row, n in zip(self.rows, widths, strict=True))]
        num_wide = len(lists)
        width = max((-(-self._row_of[n].end // PAGE_TOKENS) for n in few), default=0)
        lists += [[self._positions[n] + 1 for n in few], self._padded_tables(few, width)]
        sizes = [len(values) for values in lists]
        host = torch.tensor([number for values in lists for number in values], dtype=torch.int32)
        sent = send_to(host, device)
        num_wide_values = sum(sizes[:num_wide])
        wide = sent[:num_wide_values].long().split(sizes[:num_wide])
        ids, positions, pages, slots, scored, tokens, *row_pages = wide
        indices = TablesOnDevice(
            ids, positions, pages, slots, scored, tuple(row_pages), None, None, None
        )
        if not few:
            return indices
        ends, tables = sent[num_wide_values:].split(sizes[num_wide:])
        return replace(indices, few=tokens, page_tables=tables.view(len(few), width), ends=ends)

    def _padded_tables(self, few: Sequence[int], width: int) -> list[int]:
        """Return the page table of the sequence of each token in `few`, padded with page 0."""
        rows = {id(self._row_of[n]): self._row_of[n] for n in few}
        tables = {
            key: [*row.pages[:width], *[0] * (width - len(row.pages))] for key, row in rows.items()
        }
        return [page for n in few for page in tables[id(self._row_of[n])]]


class FixedTables:
    """Integer tensors of decoding steps of one size, at addresses that never change.

    A step has one token per sequence. Missing sequences are filled with copies of the last one,
    which compute the same values again.

    Args:
        count: number of sequences T.
        width: number of pages in the table of each sequence.
        device: device of the tensors.

    Attributes:
        rows: sequences of the last `fill`; always the same list.
    """

    def __init__(self, count: int, width: int, device: torch.device) -> None:
        self.rows: list[StepRow] = []
        self._count, self._width = count, width
        self._sent = torch.zeros(count * (5 + width), dtype=torch.int32, device=device)
        self._on_device: TablesOnDevice | None = None

    def fill(self, rows: Sequence[StepRow], tokens: Sequence[int]) -> None:
        """Copy the tables of a step to the device, without waiting for it.

        Args:
            rows: at most T sequences with one token each, and at most `width` pages.
            tokens: token id of each sequence.
        """
        missing = self._count - len(rows)
        self.rows[:] = [*rows, *[rows[-1]] * missing]
        positions = [row.start for row in self.rows]
        numbers = [*tokens, *[tokens[-1]] * missing, *positions]
        numbers += [row.pages[row.start // PAGE_TOKENS] for row in self.rows]
        numbers += [n % PAGE_TOKENS for n in positions]
        numbers += [n + 1 for n in positions]
        for row in self.rows:
            pages = row.pages[: self._width]
            numbers += [*pages, *[0] * (self._width - len(pages))]
        host = torch.tensor(numbers, dtype=torch.int32)
        self._sent.copy_(send_to(host, self._sent.device), non_blocking=True)
        self._on_device = None

    def at(self, device: torch.device) -> TablesOnDevice:
        """Return the tensors; the first call after `fill` or `forget` converts them from int32."""
        assert device == self._sent.device
        if self._on_device is None:
            count = self._count
            ids, positions, pages, offsets = self._sent[: 4 * count].long().split(count)
            every = torch.arange(count, device=device)
            self._on_device = TablesOnDevice(
                ids,
                positions,
                pages,
                offsets,
                scored=every,
                row_pages=(),
                few=every,
                page_tables=self._sent[5 * count :].view(count, self._width),
                ends=self._sent[4 * count : 5 * count],
            )
        return self._on_device

    def forget(self) -> None:
        """Discard the converted tensors, so that the next call of `at` converts them again."""
        self._on_device = None
