"""Paged KV cache of many sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bmforge.errors import ShapeError
from bmforge.infer.engine.pages import PAGE_TOKENS
from bmforge.infer.engine.step_tables import (
    FEW_TOKENS,
    FixedTables,
    StepRow,
    StepTables,
    TablesOnDevice,
)
from bmforge.nn.attention import RunBlocks, build_mask
from bmforge.nn.device_kernels import attend_pages, rotate_and_store_, store_in_pages_
from bmforge.nn.plain_products import quantize_activations
from bmforge.nn.position import apply_rope

__all__ = ["PAGE_TOKENS", "PagedCache", "StepRow"]


class PagedCache:
    """Paged KV cache: attention writes and reads the pages of the step's sequences.

    A layer's buffers are allocated when its first keys arrive. If the operating system commits
    memory at the first write, unused pages cost nothing.

    Args:
        count: number of pages.
        dtype: dtype of keys and values; int8 also stores a scale per token and head.
        device: default device; layers may be on other devices.

    Attributes:
        rows: sequences of the current step, with their pages, in token order.
        tables: integer tensors of the current step; rebuilt from `rows` if they belong to an
            earlier step.

    Memory: 2 x layers x count x K x 16 x H elements for K heads of size H and 16 tokens per page.
    """

    extra_length = 0
    length = 0
    step: RunBlocks | None = None

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self.count, self.dtype, self.device = count, dtype, device
        self.rows: Sequence[StepRow] = ()
        self.tables: StepTables | FixedTables | None = None
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}
        self._scales: dict[int, tuple[Tensor, Tensor]] = {}

    def hold(
        self, layer: int, heads: int, width: int, device: torch.device | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values, (pages, K, 16, H) each; allocate them if needed.

        Args:
            layer: layer index.
            heads: number of KV heads K.
            width: head size H.
            device: device of the layer; None means the cache's.
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
        """Return a layer's keys and values; None if not yet allocated."""
        return self._pairs.get(layer)

    def scales(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Return the key and value scales of a layer's int8 cache; None for a float cache.

        Shape:
            returns two tensors (pages, K, 16)
        """
        return self._scales.get(layer)

    def _rotate_and_store(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rope: tuple[Tensor, Tensor, bool],
    ) -> Tensor:
        """Write rotated keys, and values, of the step's tokens to pages; return rotated queries.

        Shape:
            query: (1, N, T, H); key, value: (1, K, T, H); returns (1, N, T, H)
        """
        if layer not in self._scales:
            new = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
            on_device = self._tables_at(query.device)
            slots = on_device.pages, on_device.offsets
            rotated = rotate_and_store_(new, rope, self._pairs[layer], *slots)
            if rotated is not None:
                return rotated.transpose(0, 1)[None]
        query, key = (apply_rope(t, rope[:2], rope[2]) for t in (query, key))
        self._store(layer, key[0], value[0])
        return query

    def _store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write keys and values of the step's tokens, (K, T, H) each, to pages."""
        on_device = self._tables_at(key.device)
        pages, offsets = on_device.pages, on_device.offsets
        key, value = key.transpose(0, 1), value.transpose(0, 1)
        if layer not in self._scales:
            store_in_pages_(key, value, self._pairs[layer], pages, offsets)
            return
        for part, new in enumerate((key, value)):
            values, scales = quantize_activations(new.float().contiguous(), new.shape[-1])
            self._scales[layer][part][pages, :, offsets] = scales[..., 0]
            self._pairs[layer][part][pages, :, offsets] = values

    def _read(self, layer: int, part: int, pages: Tensor) -> Tensor:
        """Return the keys or values of the given pages, (K, tokens, H)."""
        stored = self._pairs[layer][part][pages]
        if layer in self._scales:
            stored = stored.float() * self._scales[layer][part][pages][..., None]
        return stored.transpose(0, 1).flatten(1, 2)

    def attend(
        self,
        layer: int,
        window: int | None,
        attention_fn: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None = None,
        rope: tuple[Tensor, Tensor, bool] | None = None,
    ) -> Tensor:
        """Store the step's keys and values, and compute attention per sequence.

        Args:
            layer: layer index.
            window: sliding window in tokens, including the token itself; None for full attention.
            attention_fn: attention function (query, key, value, mask, bias), as in `Attention`.
            query: queries of the step's tokens, with the sequences concatenated.
            key: keys of the step's tokens.
            value: values of the step's tokens.
            scale: factor on the scores if `attention_fn` is standard softmax attention, which
                accelerators then compute for all sequences at once; if None, `attention_fn` is
                called for each sequence.
            rope: cos, sin and whether pairs are interleaved (see `apply_rope`), if the queries and
                keys are not yet rotated.

        Shape:
            query: (1, N, T, H); key, value: (1, K, T, H); returns (1, N, T, H)
        """
        device = query.device
        self.hold(layer, key.shape[1], key.shape[3], device)
        if rope is None:
            self._store(layer, key[0], value[0])
        else:
            query = self._rotate_and_store(layer, query, key, value, rope)
        on_device = self._tables_at(device)
        few, tables, ends = on_device.few, on_device.page_tables, on_device.ends
        if scale is None or few is None or tables is None or ends is None:
            return self._attend_by_row(layer, window, attention_fn, query)
        own, pair = query[0].transpose(0, 1), self._pairs[layer]
        is_all = len(few) == len(own)
        own = own.contiguous() if is_all else own.index_select(0, few)
        mixed = attend_pages(own, pair, self.scales(layer), tables, ends, scale, window)
        mixed = mixed.transpose(0, 1)[None]
        if is_all:
            return mixed
        out = self._attend_by_row(layer, window, attention_fn, query, min_length=FEW_TOKENS + 1)
        return out.index_copy(2, few, mixed)

    def _attend_by_row(
        self,
        layer: int,
        window: int | None,
        attention_fn: Callable[..., Tensor],
        query: Tensor,
        min_length: int = 1,
    ) -> Tensor:
        """Compute attention per sequence.

        Sequences with fewer than `min_length` tokens in this step are skipped, as the caller
        computes their outputs with another kernel.

        Shape:
            query: (1, N, T, H); returns the same shape
        """
        device, out, first = query.device, [], 0
        row_pages = self._tables_at(device).row_pages
        for row, pages in zip(self.rows, row_pages, strict=True):
            own = query[:, :, first : first + row.length]
            first += row.length
            if row.length < min_length:
                out.append(own)
                continue
            near = 0 if window is None else max(0, row.start + 1 - window) // PAGE_TOKENS
            past = row.start - near * PAGE_TOKENS
            seen, values = (
                self._read(layer, part, pages[near:])[None, :, : past + row.length]
                for part in (0, 1)
            )
            mask = build_mask((1, row.length), device, past=past, window=window)
            out.append(attention_fn(own, seen.to(own.dtype), values.to(own.dtype), mask, None))
        return torch.cat(out, 2)

    def _tables_at(self, device: torch.device) -> TablesOnDevice:
        """Return the integer tensors of the current step on a device."""
        if self.tables is None or self.tables.rows is not self.rows:
            self.tables = StepTables(self.rows)
        return self.tables.at(device)

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page to another page, in every layer."""
        for pair in (*self._pairs.values(), *self._scales.values()):
            for part in pair:
                part[target] = part[source]

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Raise `ShapeError`: attention must call `attend`, since `append` would mix sequences.

        Raises:
            ShapeError: always.
        """
        raise ShapeError(
            "the batch has a paged KV cache, which supports only attention layers that call "
            "its method `attend`. Use attention layers of bmforge, or an unpaged KVCache."
        )

    def remember(
        self, layer: int, make: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Return the result of `make`; the paged cache does not store cross-attention."""
        return make()

    def skip(self, tokens: int) -> None:
        """Do nothing: the scheduler counts the tokens of each sequence."""

    @property
    def size_bytes(self) -> int:
        """Size of all buffers in bytes, including pages that were never written."""
        pairs = *self._pairs.values(), *self._scales.values()
        return sum(part.numel() * part.element_size() for pair in pairs for part in pair)
