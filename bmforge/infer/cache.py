"""KV cache with one preallocated buffer per layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bmforge.errors import ShapeError
from bmforge.nn.attention import RunBlocks

__all__ = ["KVCache"]


class KVCache:
    """Keys and values of every layer, in one preallocated buffer per layer.

    A layer's buffer is allocated at its first `append`, with the dtype, device and head count of
    the running model. `length` advances once per model call, when the last layer has stored its
    keys. Until then all layers and the position ids see the same past, and a call that fails midway
    leaves the cache unchanged.

    Args:
        num_layers: number of layers that store keys and values.
        max_length: capacity in tokens, prompt and new tokens together.
        last_layer: index of the last layer that stores keys and values; None means the last
            layer of the model. A pipeline stage stores only some layers.

    Attributes:
        extra_length: number of prompt tokens that the model itself prepends (CPM-Ant); not counted
            in `length` and `max_length`. The model sets `extra_length` before it appends the keys
            of these tokens.
        step: optional faster implementation of the blocks for few tokens; None if there is none.
        moves: number of buffer allocations and replacements so far; tensors returned by `held` and
            `remembered` are valid until this number increases.

    Memory: 2 x num_layers x B x K x max_length x H elements for B sequences and K KV heads of size
        H; see `ModelConfig.kv_bytes_per_token`.
    """

    def __init__(self, num_layers: int, max_length: int, last_layer: int | None = None) -> None:
        self.num_layers = num_layers
        self.last_layer = num_layers - 1 if last_layer is None else last_layer
        self.max_length = max_length
        self.length = self.extra_length = self.moves = 0
        self.step: RunBlocks | None = None
        self._memory: dict[int, tuple[Tensor, Tensor]] = {}
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store one layer's new keys and values; return views of all stored keys and values.

        Shape:
            key, value: (B, K, T, H) -> (B, K, length + T, H)

        Raises:
            ShapeError: the T new tokens exceed the capacity, or the batch size has changed.
        """
        start, room = self.stored, self.max_length + self.extra_length
        end = start + key.shape[2]
        if end > room:
            raise ShapeError(
                f"the KV cache is full: {self.length} of max_length={self.max_length} tokens are "
                f"used, and {key.shape[2]} more do not fit. Create a KVCache with a larger "
                "max_length."
            )
        self.moves += self._keys[layer] is None
        keys = self._keys[layer] = _store(self._keys[layer], key, start, room)
        values = self._values[layer] = _store(self._values[layer], value, start, room)
        if layer == self.last_layer:
            self.length = end - self.extra_length
        return keys[:, :, :end], values[:, :, :end]

    def remember(
        self, layer: int, make: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Return a layer's cross-attention keys and values, computed by `make` in the first call.

        Shape:
            returns two tensors (B, K, S, H)
        """
        if layer not in self._memory:
            self._memory[layer] = make()
            self.moves += 1
        return self._memory[layer]

    def skip(self, tokens: int) -> None:
        """Advance the length by tokens that no layer of this process (a pipeline stage) stores."""
        self.length = self.stored + tokens - self.extra_length

    def reorder(self, indices: Tensor) -> None:
        """Replace sequence i of the batch with the old sequence ``indices[i]``.

        The batch size may change.

        Shape:
            indices: (new B,), integers
        """
        self.moves += 1
        for buffers in (self._keys, self._values):
            # Layer by layer, so that each old buffer is freed at once.
            for layer, buffer in enumerate(buffers):
                buffers[layer] = self._pick(buffer, indices)
        for layer, pair in self._memory.items():
            on_device = indices.to(pair[0].device)
            self._memory[layer] = (
                pair[0].index_select(0, on_device),
                pair[1].index_select(0, on_device),
            )

    def _pick(self, buffer: Tensor | None, indices: Tensor) -> Tensor | None:
        if buffer is None:
            return None
        used = buffer[:, :, : self.stored].index_select(0, indices.to(buffer.device))
        if indices.shape[0] != buffer.shape[0]:
            buffer = buffer.new_empty(indices.shape[0], *buffer.shape[1:])
        buffer[:, :, : self.stored] = used
        return buffer

    def held(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Return a layer's key and value buffers, (B, K, capacity, H); None if unallocated."""
        keys, values = self._keys[layer], self._values[layer]
        return None if keys is None or values is None else (keys, values)

    def remembered(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Return the cross-attention keys and values of a layer; None if not yet stored."""
        return self._memory.get(layer)

    @property
    def size_bytes(self) -> int:
        """Size of all buffers in bytes, including cross-attention."""
        tensors = [*self._keys, *self._values, *(t for pair in self._memory.values() for t in pair)]
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    @property
    def stored(self) -> int:
        """Number of tokens in the buffers, including the `extra_length` that the model prepends."""
        return self.length + self.extra_length if self.length else 0


def _store(buffer: Tensor | None, new: Tensor, start: int, max_length: int) -> Tensor:
    """Write (B, K, T, H) into a buffer from token `start` on; allocate it if it is None."""
    if buffer is None:
        batch, heads, _, width = new.shape
        buffer = torch.empty(batch, heads, max_length, width, dtype=new.dtype, device=new.device)
    if buffer.shape[0] != new.shape[0]:
        raise ShapeError(
            f"the KV cache has {buffer.shape[0]} sequences, but the batch has {new.shape[0]}. "
            "Create a new KVCache for the batch, or select the sequences with "
            "KVCache.reorder(indices)."
        )
    buffer[:, :, start : start + new.shape[2]] = new
    return buffer
