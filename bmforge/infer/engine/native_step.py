"""Native execution of all blocks for few tokens; used by `Decoder` through `cache.step`.

For few tokens torch spends more time dispatching operations than computing. One native call instead
runs all blocks, multithreaded, on the modules' own weights (fp32, bf16, fp16, packed int8 and int4)
and the cache's own buffers; sums are in fp32. Torch runs unsupported blocks, in order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.infer.cache import KVCache
from bmforge.infer.engine.native_adapters import AdapterTables, read_prefixes
from bmforge.infer.engine.native_blocks import Watch, describe_block, expert_sizes
from bmforge.infer.engine.native_run import CacheAddresses, CacheCall, PackedCall
from bmforge.infer.engine.native_structures import Layer
from bmforge.infer.engine.paged_cache import PagedCache, StepRow
from bmforge.models.stack import run_block
from bmforge.nn.product_kernels import PLAIN_KINDS, compile_sources
from bmforge.nn.products import load_kernels
from bmforge.nn.tracing import is_tracing

__all__ = ["NativeStep", "load_step"]

# More tokens run through torch, whose matrix products are faster for large batches.
_MOST_TOKENS = 16
_INPUTS = frozenset({"rope", "cache", "memory", "memory_mask"})


@cache
def load_step(variant: str | None = None) -> ctypes.CDLL | None:
    """Compile and load the C++ step for a CPU variant (default: the fastest); None on failure."""
    if variant is None:
        kernels = load_kernels()
        return None if kernels is None else load_step(kernels.name)
    parts = ("step_parts.cpp", "step_adapters.cpp", "step.cpp", "step_experts.cpp")
    library = compile_sources("step", variant, parts)
    if library is not None:
        library.step_room_bytes.restype = ctypes.c_int64
    return library


class _Segment:
    """Consecutive blocks that the C++ step supports, or a single block that torch runs."""

    def __init__(self, first: int, blocks: list[Any], layers: list[Any]) -> None:
        self.first, self.blocks = first, blocks
        self.pasts: CacheAddresses | None = None
        self.layers = (Layer * len(layers))(*layers) if layers else None
        parts = [part for layer in layers for part in (layer.attn, layer.cross) if part.exists]
        feeds = [layer.feed for layer in layers if layer.feed.exists]
        self.sizes = {
            "heads_width": max((part.query.rows for part in parts), default=0),
            "keys_width": max((part.key.rows for part in parts), default=0),
            "inner": max((feed.up.rows for feed in feeds), default=0),
            "experts": 0,
            "per_token": 0,
        }
        outs = [part.out for part in parts] + [feed.down for feed in feeds]
        for layer in layers:
            for name, size in (expert_sizes(layer) or {}).items():
                self.sizes[name] = max(self.sizes[name], size)
        self.hidden = {matrix.rows for matrix in outs if matrix.rows}
        self.narrowest = min((layer.attn.width for layer in layers if layer.attn.exists), default=0)


class NativeStep:
    """Runs the blocks of a decoding step in C++ if they support it; the value of `cache.step`.

    Descriptions of the blocks are rebuilt when a block has changed.

    Args:
        rests: True to check for changed blocks only after `check_for_changes` was called, not at
            every step.

    Attributes:
        native_blocks: number of blocks that the last call ran in C++.
        torch_blocks: number of blocks that the last call ran in torch.
    """

    def __init__(self, rests: bool = False) -> None:
        self._layers: nn.Module | None = None
        self._watch = Watch()
        self._segments: list[_Segment] = []
        self._adapters = AdapterTables([])
        self._room = torch.empty(0, dtype=torch.uint8)
        self.native_blocks = self.torch_blocks = 0
        self._rests, self._has_looked = rests, False

    def check_for_changes(self) -> None:
        """Request that the next call checks whether blocks have changed."""
        self._has_looked = False

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Context manager in which blocks must not change; only the first step checks for changes.

        The check is slow: it reads about 1 MB of Python objects, which each step evicts from the
        CPU cache.
        """
        before = self._rests
        self._rests, self._has_looked = True, False
        try:
            yield
        finally:
            self._rests = before

    def __call__(
        self,
        layers: nn.ModuleDict,
        x: Tensor,
        masks: Mapping[int | None, Tensor | None],
        biases: Mapping[int, Tensor],
        inputs: dict[str, Any],
    ) -> Tensor | None:
        """Run all blocks; return None, without side effects, if torch must run them.

        Args:
            layers: the blocks.
            x: input of the first block, (B, T, D).
            masks: dict from sliding window size to attention mask, as in `run_layers`.
            biases: dict from number of heads to attention bias.
            inputs: further arguments of the blocks, including the cache.
        """
        self.native_blocks = self.torch_blocks = 0
        if not _is_usual(x, inputs) or (library := load_step()) is None:
            return None
        self._read(layers)
        if not any(segment.layers for segment in self._segments):
            return None
        call = CacheCall(x, masks, biases, inputs)
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

    def run_packed(
        self,
        layers: nn.ModuleDict,
        x: Tensor,
        cache: PagedCache,
        rows: Sequence[StepRow],
        rope: tuple[Tensor, Tensor] | None,
    ) -> Tensor | None:
        """Run all blocks for tokens of several sequences; None if a block is unsupported.

        The result of each token is bitwise independent of the other tokens in the step.

        Args:
            layers: the blocks.
            x: input of the first block, (1, T, D): the tokens of all sequences, concatenated.
            cache: KV cache of the sequences.
            rows: sequence and positions of the tokens.
            rope: cos and sin of each token.
        """
        self.native_blocks = self.torch_blocks = 0
        if not self.knows(layers) or not _may_run(x) or (library := load_step()) is None:
            return None
        call, wide = PackedCall(x, cache, rows, rope), x.float().clone().contiguous()
        if not all(call.takes(segment) for segment in self._segments):
            return None
        for segment in self._segments:
            self.native_blocks += len(segment.blocks)
            self._run(library, call, segment, wide)
        return wide.to(x.dtype)

    def knows(self, layers: nn.ModuleDict) -> bool:
        """Return True if all blocks, in their current state, can run in the C++ step."""
        self._read(layers)
        # Compiled only for blocks that can use it: on an accelerator there are none.
        return all(segment.layers for segment in self._segments) and load_step() is not None

    def adapts(self, layers: nn.ModuleDict, parts: Collection[nn.Module]) -> bool:
        """Return True if all blocks run in the C++ step and `parts` are their LoRA modules.

        `run_packed` can then apply different adapters to the tokens of one call.
        """
        return self.knows(layers) and self._adapters.parts.issuperset(parts)

    def _read(self, layers: nn.ModuleDict) -> None:
        """Rebuild the structs that describe the blocks to the C++ code, if blocks changed."""
        is_known = layers is self._layers
        if is_known and self._rests and self._has_looked:
            return
        if not is_known or self._watch.sees_change():
            self._describe(layers)
        self._has_looked = all(segment.layers for segment in self._segments)

    def _describe(self, layers: nn.ModuleDict) -> None:
        self._layers, self._watch, self._segments = layers, Watch(), []
        self._watch.add(layers)
        blocks: list[Any] = []
        descriptions: list[Any] = []
        for number, block in enumerate(layers.values()):
            layer = describe_block(block, self._watch)
            if layer is not None:
                blocks.append(block)
                descriptions.append(layer)
                continue
            if descriptions:
                self._segments.append(_Segment(number - len(descriptions), blocks, descriptions))
                blocks, descriptions = [], []
            self._segments.append(_Segment(number, [block], []))
        if descriptions:
            self._segments.append(_Segment(len(layers) - len(descriptions), blocks, descriptions))
        self._adapters = AdapterTables(self._watch.adapted)

    def _run(
        self, library: ctypes.CDLL, call: CacheCall | PackedCall, segment: _Segment, x: Tensor
    ) -> None:
        run = call.describe(segment, x)
        run.adapters, run.low_width = self._adapters.find(run.rows, run.tokens)
        prefixes, longest, _tensors = read_prefixes(self._watch.prefixes, call.dtype)
        run.prefixes, run.length = ctypes.addressof(prefixes), run.length + longest
        size = library.step_room_bytes(ctypes.byref(run))
        if self._room.numel() < size:
            self._room = torch.empty(size + size // 2, dtype=torch.uint8)
        run.room = self._room.data_ptr()
        library.run_step(ctypes.byref(run))


def _is_usual(x: Tensor, inputs: Mapping[str, Any]) -> bool:
    """Return True if there are at most `_MOST_TOKENS` tokens and all arguments are supported."""
    few = 0 < x.shape[0] * x.shape[1] <= _MOST_TOKENS
    usual = inputs.keys() <= _INPUTS and isinstance(inputs["cache"], KVCache)
    return few and usual and _may_run(x)


def _may_run(x: Tensor) -> bool:
    """Return True for a CPU tensor if autograd, tracing, autocast and global hooks are off."""
    if torch.is_grad_enabled() or is_tracing():
        return False
    plain = type(x) is Tensor and x.is_cpu and x.dtype in PLAIN_KINDS
    hooked = any(hooks for hooks in _GLOBAL_HOOKS)
    return plain and not hooked and not torch.is_autocast_enabled("cpu")


# Global module hooks of torch.
_GLOBAL_HOOKS: tuple[Mapping[Any, Any], ...] = tuple(
    getattr(torch.nn.modules.module, name)
    for name in (
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
    )
)
