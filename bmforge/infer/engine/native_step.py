"""Blocks run for one to a few tokens by one call: what `Decoder` gives a cache to run blocks with.

Torch spends more time on calling small operations than the processor on their numbers. Here one
call goes through all blocks, with its threads inside, over the weights as the modules hold them
(fp32, bf16, fp16, packed int8 and int4) and the cache's own memory; sums are fp32. Blocks that it
does not know run through torch, one by one, between the others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.infer.cache import KVCache
from bmforge.infer.engine.native_blocks import Layer, Watch, describe_block
from bmforge.models.stack import run_block
from bmforge.nn.product_kernels import PLAIN_KINDS, compile_sources
from bmforge.nn.products import load_kernels

__all__ = ["NativeStep", "load_step"]

# More tokens than this go through torch, whose products are made for them.
_MOST_TOKENS = 16
_INPUTS = frozenset({"rope", "cache", "memory", "memory_mask"})


class _Past(ctypes.Structure):
    """`Past` of step_parts.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("row", "head", "token", "kind")),
    ]


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
    """`Run` of step.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("layers", "own", "memory", "masks", "biases")),
        ("memory_mask", _Mask),
        ("rope", _Rope),
        *((name, ctypes.c_void_p) for name in ("x", "room")),
        *((name, ctypes.c_int64) for name in ("count", "rows", "tokens", "hidden", "stored")),
        *((name, ctypes.c_int64) for name in ("memory_length", "length", "widest")),
        *((name, ctypes.c_int64) for name in ("heads_width", "keys_width", "inner")),
        ("threads", ctypes.c_int32),
    ]


@cache
def load_step(variant: str | None = None) -> ctypes.CDLL | None:
    """Return the compiled step of a variant, or of the fastest; None without a compiler."""
    if variant is None:
        kernels = load_kernels()
        return None if kernels is None else load_step(kernels.name)
    library = compile_sources("step", variant, ("step_parts.cpp", "step.cpp"))
    if library is not None:
        library.step_room_bytes.restype = ctypes.c_int64
    return library


class _Segment:
    """Blocks one after the other that are described, or one that is not."""

    def __init__(self, first: int, blocks: list[Any], layers: list[Any]) -> None:
        self.first, self.blocks = first, blocks
        self.layers = (Layer * len(layers))(*layers) if layers else None
        parts = [part for layer in layers for part in (layer.attn, layer.cross) if part.exists]
        feeds = [layer.feed for layer in layers if layer.feed.exists]
        self.sizes = {
            "heads_width": max((part.query.rows for part in parts), default=0),
            "keys_width": max((part.key.rows for part in parts), default=0),
            "inner": max((feed.up.rows for feed in feeds), default=0),
        }
        outs = [part.out for part in parts] + [feed.down for feed in feeds]
        self.hidden = {matrix.rows for matrix in outs}
        self.narrowest = min((layer.attn.width for layer in layers if layer.attn.exists), default=0)


class NativeStep:
    """Runs blocks for a cache; `cache.step` of a decoder.

    It is described anew whenever a block is no longer what it was.

    Attributes:
        native_blocks: how many blocks the last call ran natively, and
        torch_blocks: through torch; both 0 where all went the usual way.
    """

    def __init__(self) -> None:
        self._layers: nn.Module | None = None
        self._watch = Watch()
        self._segments: list[_Segment] = []
        self._room = torch.empty(0, dtype=torch.uint8)
        self.native_blocks = self.torch_blocks = 0

    def __call__(
        self,
        layers: nn.ModuleDict,
        x: Tensor,
        masks: Mapping[int | None, Tensor | None],
        biases: Mapping[int, Tensor],
        inputs: dict[str, Any],
    ) -> Tensor | None:
        """Run all blocks; return None where that must go the usual way, with nothing changed.

        Args:
            layers: the blocks.
            x: what goes into the first, (B, T, D).
            masks: window -> mask, as `run_layers` has them.
            biases: number of heads -> bias.
            inputs: further arguments of the blocks; the cache among them.
        """
        self.native_blocks = self.torch_blocks = 0
        if not _may_run(x, inputs) or (library := load_step()) is None:
            return None
        self._read(layers)
        if not any(segment.layers for segment in self._segments):
            return None
        call = _Call(x, masks, biases, inputs)
        if not all(call.takes(segment) for segment in self._segments if segment.layers):
            return None
        wide = x.float()
        for segment in self._segments:
            if segment.layers is None:
                self.torch_blocks += 1
                narrow = wide.to(x.dtype)
                block = segment.blocks[0]
                wide = run_block(block, narrow, masks, biases, inputs, []).float()
            else:
                self.native_blocks += len(segment.blocks)
                wide = wide.clone() if wide is x else wide.contiguous()
                self._run(library, call, segment, wide)
        call.finish()
        return wide.to(x.dtype)

    def _read(self, layers: nn.ModuleDict) -> None:
        """Describe the blocks, unless they are as they were."""
        if layers is self._layers and not self._watch.sees_change():
            return
        self._layers, self._watch, self._segments = layers, Watch(), []
        self._watch.add(layers)
        blocks: list[Any] = []
        found: list[Any] = []
        for number, block in enumerate(layers.values()):
            layer = describe_block(block, self._watch)
            if layer is not None:
                blocks.append(block)
                found.append(layer)
                continue
            if found:
                self._segments.append(_Segment(number - len(found), blocks, found))
                blocks, found = [], []
            self._segments.append(_Segment(number, [block], []))
        if found:
            self._segments.append(_Segment(len(layers) - len(found), blocks, found))

    def _run(self, library: ctypes.CDLL, call: _Call, segment: _Segment, x: Tensor) -> None:
        run = call.describe(segment, x)
        size = library.step_room_bytes(ctypes.byref(run))
        if self._room.numel() < size:
            self._room = torch.empty(size + size // 2, dtype=torch.uint8)
        run.room = self._room.data_ptr()
        library.run_step(ctypes.byref(run))


def _may_run(x: Tensor, inputs: Mapping[str, Any]) -> bool:
    """Tell whether a call is one for plain numbers on the host, of a few tokens, and no more."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    plain = type(x) is Tensor and x.is_cpu and x.dtype in PLAIN_KINDS
    few = plain and 0 < x.shape[0] * x.shape[1] <= _MOST_TOKENS
    watched = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    hooked = any(hooks for hooks in _GLOBAL_HOOKS)
    usual = inputs.keys() <= _INPUTS and isinstance(inputs["cache"], KVCache)
    return few and usual and not watched and not hooked and not torch.is_autocast_enabled("cpu")


# Hooks of every module there is.
_GLOBAL_HOOKS: tuple[Mapping[Any, Any], ...] = tuple(
    getattr(torch.nn.modules.module, name)
    for name in (
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
    )
)


class _Call:
    """What one call of a model brings: tokens, masks, positions and the cache's memory."""

    def __init__(
        self,
        x: Tensor,
        masks: Mapping[int | None, Tensor | None],
        biases: Mapping[int, Tensor],
        inputs: Mapping[str, Any],
    ) -> None:
        self._rows, self._tokens, self._hidden = x.shape
        self._cache: KVCache = inputs["cache"]
        self._stored = self._cache.stored
        self._kept: list[Any] = []  # what the pointers point to
        self._windows = {window: number for number, window in enumerate(masks)}
        self._masks = (_Mask * len(masks))(*(self._mask(mask) for mask in masks.values()))
        self._heads = {heads: number for number, heads in enumerate(biases, 1)}
        self._biases = (_Bias * (1 + len(biases)))(
            _Bias(), *(self._bias(bias) for bias in biases.values())
        )
        self._memory_mask = self._mask(inputs.get("memory_mask"))
        self._rope = self._positions(inputs.get("rope"))

    def takes(self, segment: _Segment) -> bool:
        """Tell whether the cache holds what blocks need, and there is room for the new tokens."""
        if segment.hidden - {self._hidden} or self._rope.width > (segment.narrowest or 1 << 30):
            return False
        for block, layer in zip(segment.blocks, segment.layers or (), strict=True):
            if layer.attn.exists:
                held = self._cache.held(block.attn.layer_index)
                shape = self._rows, layer.attn.shared_heads, layer.attn.width
                if held is None or not _fits(held, shape, self._stored + self._tokens):
                    return False
                if block.attn.window not in self._windows:
                    return False
            if layer.cross.exists:
                pair = self._cache.remembered(block.cross_attn.layer_index)
                shape = self._rows, layer.cross.shared_heads, layer.cross.width
                if pair is None or not _fits(pair, shape, 1):
                    return False
        return True

    def describe(self, segment: _Segment, x: Tensor) -> _Run:
        """Return the description of a segment's run; x is changed in place."""
        layers, count = segment.layers, len(segment.blocks)
        own, memory = (_Past * count)(), (_Past * count)()
        length = self._stored + self._tokens
        memory_length = 0
        for number, block in enumerate(segment.blocks):
            layer = layers[number]  # type: ignore[index]
            if layer.attn.exists:
                layer.attn.mask = self._windows[block.attn.window]
                layer.bias = self._heads.get(layer.attn.heads, 0)
                own[number] = _past(self._cache.held(block.attn.layer_index))
            if layer.cross.exists:
                pair = self._cache.remembered(block.cross_attn.layer_index)
                memory[number], memory_length = _past(pair), pair[0].shape[2]  # type: ignore[index]
        self._kept += [own, memory]
        sizes = segment.sizes
        widest = max(self._hidden, sizes["heads_width"], sizes["inner"])
        return _Run(
            *(ctypes.addressof(part) for part in (layers, own, memory, self._masks, self._biases)),  # type: ignore[arg-type]
            *(self._memory_mask, self._rope, x.data_ptr(), None),
            *(count, self._rows, self._tokens, self._hidden, self._stored),
            *(memory_length, max(length, memory_length), widest),
            *(sizes["heads_width"], sizes["keys_width"], sizes["inner"]),
            torch.get_num_threads(),
        )

    def finish(self) -> None:
        """Count the new tokens."""
        if self._cache.stored == self._stored:
            self._cache.skip(self._tokens)

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


def _stride(tensor: Tensor, dim: int) -> int:
    return tensor.stride(dim) if tensor.shape[dim] > 1 else 0


def _fits(pair: tuple[Tensor, Tensor], shape: tuple[int, int, int], tokens: int) -> bool:
    """Tell whether keys and values are of these rows, heads and width, and have so many places."""
    return all(
        (part.shape[0], part.shape[1], part.shape[3]) == shape
        and part.shape[2] >= tokens
        and type(part) is Tensor
        and part.is_cpu
        and part.dtype in PLAIN_KINDS
        and part.stride() == pair[0].stride()
        and part.dtype == pair[0].dtype
        and part.stride(3) == 1
        for part in pair
    )


def _past(pair: Any) -> _Past:
    keys, values = pair
    kind = PLAIN_KINDS[keys.dtype]
    return _Past(keys.data_ptr(), values.data_ptr(), *keys.stride()[:3], kind)
