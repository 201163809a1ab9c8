"""Arguments of one call of the C++ decoding step: tokens, masks, positions, keys and values.

`CacheCall` is for sequences of equal length in a `KVCache`. `PackedCall` is for tokens of several
sequences, concatenated along the token dimension; each sequence has its pages in a `PagedCache`.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from bmforge.infer.cache import KVCache
from bmforge.infer.engine.paged_cache import PAGE_TOKENS, PagedCache, StepRow
from bmforge.nn.product_kernels import PLAIN_KINDS

__all__ = ["CacheCall", "PackedCall", "CacheAddresses", "BlockSegment"]

# Keys and values may also be int8; 4 is `BYTES` of step_parts.cpp.
_KINDS = {**PLAIN_KINDS, torch.int8: 4}
# A batch row of a `KVCache` counts as one page.
_WHOLE_ROW = 1 << 40


class _Past(ctypes.Structure):
    """Mirrors the struct `Past` of step_parts.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("keys", "values", "key_scales", "value_scales")),
        *((name, ctypes.c_int64) for name in ("row", "head", "token", "kind")),
        *((name, ctypes.c_int64) for name in ("scale_row", "scale_head")),
    ]


class _Place(ctypes.Structure):
    _fields_ = [("pages", ctypes.c_void_p), ("position", ctypes.c_int64)]


class _Mask(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("row", ctypes.c_int64), ("query", ctypes.c_int64)]


class _Bias(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("row", "head", "query")),
    ]


class _Rope(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("cos", "sin")),
        *((name, ctypes.c_int64) for name in ("row", "width")),
    ]


class _Run(ctypes.Structure):
    """Mirrors the struct `Run` of step.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("layers", "own", "memory", "masks", "biases")),
        *((name, ctypes.c_void_p) for name in ("places", "windows", "adapters", "prefixes")),
        ("memory_mask", _Mask),
        ("rope", _Rope),
        *((name, ctypes.c_void_p) for name in ("x", "room")),
        *((name, ctypes.c_int64) for name in ("count", "rows", "tokens", "hidden", "stored")),
        *((name, ctypes.c_int64) for name in ("page_tokens", "memory_length", "length")),
        *((name, ctypes.c_int64) for name in ("widest", "heads_width", "keys_width", "inner")),
        *((name, ctypes.c_int64) for name in ("experts", "per_token", "low_width")),
        ("threads", ctypes.c_int32),
    ]


class CacheAddresses(NamedTuple):
    """Addresses of a `KVCache`'s keys and values, for consecutive blocks.

    Args:
        key: state on which these addresses depend; see `CacheCall._key`.
        own: self-attention keys and values of each block, (`_Past` * blocks).
        memory: cross-attention keys and values of each block, (`_Past` * blocks).
        memory_length: number of encoder tokens.
        room: capacity in tokens.
    """

    key: tuple[Any, ...]
    own: Any
    memory: Any
    memory_length: int
    room: int


class BlockSegment(Protocol):
    """Interface of consecutive blocks that have descriptions for the C++ decoding step.

    `pasts` has the addresses of the keys and values of the previous call.
    """

    blocks: list[Any]
    pasts: CacheAddresses | None
    layers: Any
    sizes: dict[str, int]
    hidden: set[int]
    narrowest: int


class _AnyCall:
    """Base class of `CacheCall` and `PackedCall`."""

    def __init__(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> None:
        self._rows, self._tokens, self._hidden = x.shape
        self.dtype = x.dtype
        self._kept: list[Any] = []  # keeps the memory behind raw pointers alive
        self._rope = self._positions(rope)

    def fits(self, segment: BlockSegment) -> bool:
        """Return True if the segment's hidden size matches, and its heads cover the rotary dims."""
        wide = self._rope.width <= (segment.narrowest or 1 << 30)
        return wide and not segment.hidden - {self._hidden}

    def _mask(self, mask: Tensor | None) -> _Mask:
        if mask is None:
            return _Mask()
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        self._kept.append(mask)
        return _Mask(mask.data_ptr(), *(_stride(mask, dim) for dim in (0, 2)))

    def _bias(self, bias: Tensor) -> _Bias:
        bias = bias.float()
        bias = bias if bias.stride(-1) == 1 else bias.contiguous()
        self._kept.append(bias)
        return _Bias(bias.data_ptr(), *(_stride(bias, dim) for dim in (0, 1, 2)))

    def _positions(self, table: tuple[Tensor, Tensor] | None) -> _Rope:
        if table is None:
            return _Rope()
        cos, sin = (part.float().contiguous() for part in table)
        self._kept += [cos, sin]
        return _Rope(cos.data_ptr(), sin.data_ptr(), _stride(cos, 0), cos.shape[-1])

    def _place(self, pages: Iterable[tuple[Tensor, int]]) -> Any:
        """Store the page table (int32) and the position of every token for the C++ step."""
        page_list = list(pages)
        self._kept += [tensor for tensor, _ in page_list]
        places = (_Place * len(page_list))(
            *(_Place(tensor.data_ptr(), position) for tensor, position in page_list)
        )
        self._kept.append(places)
        return places

    def _make(
        self,
        segment: BlockSegment,
        x: Tensor,
        parts: Sequence[Any],
        masks: Sequence[Any],
        **more: Any,
    ) -> _Run:
        """Build the `_Run` structure.

        `parts` are the C arrays of the self-attention keys and values, the cross-attention keys and
        values, the page and position of each token, and the sliding windows.
        """
        own, memory, places, windows = parts
        masks_and_biases = (ctypes.addressof(part) for part in masks)
        self._kept += [own, memory, places, windows]
        sizes = segment.sizes
        return _Run(
            layers=ctypes.addressof(segment.layers),
            own=ctypes.addressof(own),
            memory=ctypes.addressof(memory),
            masks=next(masks_and_biases),
            biases=next(masks_and_biases),
            places=ctypes.addressof(places),
            windows=None if windows is None else ctypes.addressof(windows),
            rope=self._rope,
            x=x.data_ptr(),
            count=len(segment.blocks),
            rows=self._rows,
            tokens=self._tokens,
            hidden=self._hidden,
            widest=max(self._hidden, sizes["heads_width"], sizes["inner"]),
            threads=torch.get_num_threads(),
            **sizes,
            **more,
        )


class CacheCall(_AnyCall):
    """Arguments of a call with a `KVCache`.

    Args:
        x: input of the first block, (B, T, D).
        masks: dict from sliding window size to attention mask.
        biases: dict from number of heads to attention bias.
        inputs: further arguments of the blocks, including the cache.
    """

    def __init__(
        self,
        x: Tensor,
        masks: Mapping[int | None, Tensor | None],
        biases: Mapping[int, Tensor],
        inputs: Mapping[str, Any],
    ) -> None:
        super().__init__(x, inputs.get("rope"))
        self._cache: KVCache = inputs["cache"]
        self._stored = self._cache.stored
        self._windows = {window: number for number, window in enumerate(masks)}
        self._masks = (_Mask * len(masks))(*(self._mask(mask) for mask in masks.values()))
        self._heads = {heads: number for number, heads in enumerate(biases, 1)}
        self._biases = (_Bias * (1 + len(biases)))(
            _Bias(), *(self._bias(bias) for bias in biases.values())
        )
        self._memory_mask = self._mask(inputs.get("memory_mask"))
        rows = torch.arange(self._rows, dtype=torch.int32)
        new = range(self._stored, self._stored + self._tokens)
        self._places = self._place((rows[row:], n) for row in range(self._rows) for n in new)

    def takes(self, segment: BlockSegment) -> bool:
        """Return True if the cache has the blocks' buffers and capacity for the new tokens."""
        if not self.fits(segment):
            return False
        if segment.pasts is None or segment.pasts.key != self._key():
            segment.pasts = self._find_pasts(segment)
        return segment.pasts is not None and self._stored + self._tokens <= segment.pasts.room

    def _key(self) -> tuple[Any, ...]:
        """Return the state on which the result of `_find_pasts` depends."""
        cache = self._cache
        identity = weakref.ref(cache), cache.moves
        return *identity, self._rows, tuple(self._windows), tuple(self._heads)

    def _find_pasts(self, segment: BlockSegment) -> CacheAddresses | None:
        """Collect the keys, values and masks of the blocks; None if any is missing."""
        count = len(segment.blocks)
        own, memory = (_Past * count)(), (_Past * count)()
        memory_length, room = 0, _WHOLE_ROW
        pair: Any
        for number, block in enumerate(segment.blocks):
            layer = segment.layers[number]
            if layer.attn.exists:
                pair = self._cache.held(block.attn.layer_index)
                if not self._fits_part(pair, layer.attn) or block.attn.window not in self._windows:
                    return None
                layer.attn.mask = self._windows[block.attn.window]
                layer.bias = self._heads.get(layer.attn.heads, 0)
                if layer.bias and layer.attn.prefix:  # the bias may have columns for prefixes
                    return None
                own[number], room = _past(pair), min(room, pair[0].shape[2], pair[1].shape[2])
            if layer.cross.exists:
                pair = self._cache.remembered(block.cross_attn.layer_index)
                if not self._fits_part(pair, layer.cross):
                    return None
                memory[number], memory_length = _past(pair), pair[0].shape[2]
        return CacheAddresses(self._key(), own, memory, memory_length, room)

    def _fits_part(self, pair: Any, part: Any) -> bool:
        return pair is not None and _fits(pair, (self._rows, part.shared_heads, part.width), 1)

    def describe(self, segment: BlockSegment, x: Tensor) -> _Run:
        """Return the `_Run` structure of a segment; `x` is changed in place."""
        assert segment.pasts is not None
        _, own, memory, memory_length, _ = segment.pasts
        return self._make(
            segment,
            x,
            (own, memory, self._places, None),
            (self._masks, self._biases),
            memory_mask=self._memory_mask,
            stored=self._stored,
            page_tokens=_WHOLE_ROW,
            memory_length=memory_length,
            length=max(self._stored + self._tokens, memory_length),
        )

    def finish(self) -> None:
        """Advance the cache by the new tokens."""
        if self._cache.stored == self._stored:
            self._cache.skip(self._tokens)


class PackedCall(_AnyCall):
    """Arguments of a call with a `PagedCache`.

    Args:
        x: input of the first block, (1, T, D): the tokens of all sequences, concatenated.
        cache: KV cache with pages for the tokens.
        rows: sequence and positions of the tokens.
        rope: cos and sin of each token.
    """

    def __init__(
        self,
        x: Tensor,
        cache: PagedCache,
        rows: Sequence[StepRow],
        rope: tuple[Tensor, Tensor] | None,
    ) -> None:
        super().__init__(x, rope)
        self._cache = cache
        self._length = max(row.end for row in rows)
        tables = [torch.tensor(row.pages, dtype=torch.int32) for row in rows]
        self._places = self._place(
            (table, n)
            for row, table in zip(rows, tables, strict=True)
            for n in range(row.start, row.end)
        )
        self._masks, self._biases = (_Mask * 1)(), (_Bias * 1)()

    def takes(self, segment: BlockSegment) -> bool:
        """Return True if the C++ decoding step supports all blocks of the segment.

        Every block must have only causal self-attention, and its keys and values must fit the
        layout of the cache; this method allocates their cache buffers.
        """
        if not self.fits(segment):
            return False
        for block, layer in zip(segment.blocks, segment.layers or (), strict=True):
            if layer.cross.exists:
                return False
            if layer.attn.exists:
                if not layer.attn.causal:
                    return False
                heads, width = layer.attn.shared_heads, layer.attn.width
                buffers = self._cache.hold(block.attn.layer_index, heads, width)
                if not _fits(buffers, (buffers[0].shape[0], heads, width), PAGE_TOKENS):
                    return False
        return True

    def describe(self, segment: BlockSegment, x: Tensor) -> _Run:
        """Return the `_Run` structure of a segment; `x` is changed in place."""
        count = len(segment.blocks)
        own, memory = (_Past * count)(), (_Past * count)()
        numbers: dict[int | None, int] = {}
        for number, block in enumerate(segment.blocks):
            layer = segment.layers[number]
            if layer.attn.exists:
                layer.attn.mask = numbers.setdefault(block.attn.window, len(numbers))
                layer.bias = 0
                layer_index = block.attn.layer_index
                own[number] = _past(self._cache.held(layer_index), self._cache.scales(layer_index))
        windows = (ctypes.c_int64 * max(1, len(numbers)))(*(window or 0 for window in numbers))
        masks = (_Mask * max(1, len(numbers)))()
        self._kept.append(masks)
        return self._make(
            segment,
            x,
            (own, memory, self._places, windows),
            (masks, self._biases),
            page_tokens=PAGE_TOKENS,
            length=self._length,
        )


def _stride(tensor: Tensor, dim: int) -> int:
    return tensor.stride(dim) if tensor.shape[dim] > 1 else 0


def _fits(pair: tuple[Tensor, Tensor], shape: tuple[int, int, int], tokens: int) -> bool:
    """Return True if keys and values have this (batch, heads, width) and enough capacity."""
    return all(
        (part.shape[0], part.shape[1], part.shape[3]) == shape
        and part.shape[2] >= tokens
        and type(part) is Tensor
        and part.is_cpu
        and part.dtype in _KINDS
        and part.stride() == pair[0].stride()
        and part.dtype == pair[0].dtype
        and part.stride(3) == 1
        for part in pair
    )


def _past(pair: Any, scales: tuple[Tensor, Tensor] | None = None) -> _Past:
    keys, values = pair
    places = [part.data_ptr() for part in scales or ()] or [None, None]
    strides = (0, 0) if scales is None else scales[0].stride()[:2]
    numbers = *keys.stride()[:3], _KINDS[keys.dtype], *strides
    return _Past(keys.data_ptr(), values.data_ptr(), *places, *numbers)
