"""Keys and values of many sequences, in pages of one pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bmforge.errors import ShapeError
from bmforge.infer.engine.pages import PAGE_TOKENS
from bmforge.nn.attention import RunBlocks, build_mask
from bmforge.nn.plain_products import quantize_activations

__all__ = ["PAGE_TOKENS", "PagedCache", "StepRow"]


@dataclass(frozen=True)
class StepRow:
    """Tokens of one sequence in a step.

    Args:
        pages: of the sequence, with room for them.
        start: the number of the first in its sequence; keys of all before are in the pages.
        end: the number behind the last.
    """

    pages: Sequence[int]
    start: int
    end: int

    @property
    def length(self) -> int:
        """How many tokens."""
        return self.end - self.start


class PagedCache:
    """Keys and values in pages: attention writes and reads those of the rows of the step.

    A layer's memory is made when its first keys come. On a host that gives memory when it is
    written, pages that were never used cost nothing.

    Args:
        count: pages.
        dtype: of keys and values; int8 keeps a scale for every token and head.
        device: where they are, but for layers whose keys come on another.

    Attributes:
        rows: of the step that runs, in the order of its tokens.

    Memory: 2 x layers x count x K x 16 x H elements.
    """

    extra_length = 0
    length = 0
    step: RunBlocks | None = None

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self.count, self.dtype, self.device = count, dtype, device
        self.rows: Sequence[StepRow] = ()
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}
        self._scales: dict[int, tuple[Tensor, Tensor]] = {}

    def hold(
        self, layer: int, heads: int, width: int, device: torch.device | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values, (pages, K, 16, H) each, made if they are not there.

        Args:
            layer: of which layer.
            heads: K.
            width: H.
            device: of this layer; None takes the cache's.
        """
        if layer not in self._pairs:
            shape, at = (self.count, heads, PAGE_TOKENS, width), device or self.device
            self._pairs[layer] = (
                torch.empty(shape, dtype=self.dtype, device=at),
                torch.empty(shape, dtype=self.dtype, device=at),
            )
            if self.dtype == torch.int8:
                self._scales[layer] = (
                    torch.empty(shape[:3], device=at),
                    torch.empty(shape[:3], device=at),
                )
        return self._pairs[layer]

    def held(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Return a layer's keys and values; None before its first."""
        return self._pairs.get(layer)

    def scales(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Return the scales of a layer's bytes, (pages, K, 16) each; None where they are floats."""
        return self._scales.get(layer)

    def _store(self, layer: int, part: int, new: Tensor) -> None:
        """Write keys (part 0) or values (1) of the step's tokens, (K, T, H), where they belong."""
        pages, offsets = self._places(new.device)
        new = new.transpose(0, 1)
        if layer in self._scales:
            values, scales = quantize_activations(new.float().contiguous(), new.shape[-1])
            self._scales[layer][part][pages, :, offsets] = scales[..., 0]
            new = values
        self._pairs[layer][part][pages, :, offsets] = new.to(self.dtype)

    def _read(self, layer: int, part: int, pages: Tensor) -> Tensor:
        """Return the keys or values of pages, (K, tokens, H)."""
        found = self._pairs[layer][part][pages]
        if layer in self._scales:
            found = found.float() * self._scales[layer][part][pages][..., None]
        return found.transpose(0, 1).flatten(1, 2)

    def attend(
        self,
        layer: int,
        window: int | None,
        mix: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        """Store the keys and values of a step's tokens; let each see those of its own sequence.

        Args:
            layer: of which layer.
            window: a token sees only so many, itself included; None sees all.
            mix: weighs values, as `Attention` does: (query, key, value, mask, bias).
            query: of the step's tokens, the rows one after the other.
            key: likewise.
            value: likewise.

        Shape:
            query: (1, N, T, H); key, value: (1, K, T, H); returns (1, N, T, H)
        """
        device = query.device
        self.hold(layer, key.shape[1], key.shape[3], device)
        self._store(layer, 0, key[0])
        self._store(layer, 1, value[0])
        out, first = [], 0
        for row in self.rows:
            near = 0 if window is None else max(0, row.start + 1 - window) // PAGE_TOKENS
            held = torch.tensor(row.pages[near : -(-row.end // PAGE_TOKENS)], device=device)
            past = row.start - near * PAGE_TOKENS
            seen, known = (
                self._read(layer, part, held)[None, :, : past + row.length] for part in (0, 1)
            )
            own = query[:, :, first : first + row.length]
            mask = build_mask((1, row.length), device, past=past, window=window)
            out.append(mix(own, seen.to(own.dtype), known.to(own.dtype), mask, None))
            first += row.length
        return torch.cat(out, 2)

    def _places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return page and offset of every token of the step."""
        found = [
            (row.pages[n // PAGE_TOKENS], n % PAGE_TOKENS)
            for row in self.rows
            for n in range(row.start, row.end)
        ]
        pages, offsets = torch.tensor(found, device=device).unbind(1)
        return pages, offsets

    def copy_page(self, source: int, target: int) -> None:
        """Write what one page holds into another, in every layer."""
        for pair in (*self._pairs.values(), *self._scales.values()):
            for part in pair:
                part[target] = part[source]

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Refuse: attention that does not ask `attend` would mix sequences.

        Raises:
            ShapeError: always.
        """
        raise ShapeError(
            "a cache in pages holds several sequences in one row: attention must call its `attend`."
        )

    def remember(
        self, layer: int, make: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Return what `make` makes: a memory is nobody's here."""
        return make()

    def skip(self, tokens: int) -> None:
        """Do nothing: how many tokens a sequence has is counted where its pages are."""

    @property
    def size_bytes(self) -> int:
        """What its pages would take if all were written."""
        pairs = *self._pairs.values(), *self._scales.values()
        return sum(part.numel() * part.element_size() for pair in pairs for part in pair)
