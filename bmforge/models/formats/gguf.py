"""Reads slices of the tensors in GGUF files, converted to torch's dtypes.

`gguf_header` parses the header, `gguf_config` derives a config from it, `gguf_names` maps tensor
names, and `gguf_blocks` decodes quantized blocks.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from bmforge.errors import CheckpointError
from bmforge.gguf_header import BLOCKS, GgufTensor, read_gguf_header
from bmforge.models.formats.gguf_blocks import (
    FLOAT_KINDS,
    SPECS,
    QuantizedGroups,
    read_values,
    unpack_blocks,
)
from bmforge.models.formats.gguf_config import find_architecture
from bmforge.models.formats.gguf_names import (
    ROPE_TENSORS,
    find_rules,
    is_norm,
    is_permuted,
    restore_rows,
)
from bmforge.models.formats.safe_file import CheckedFile, read_file_identity
from bmforge.models.weights import WeightRule
from bmforge.nn.packing import QuantSpec

__all__ = ["GgufFile"]

# Number of stored bytes that are decoded at a time.
_CHUNK_BYTES = 1 << 20
# Name ending of a vector that bmforge stores as a matrix with one row.
_ROW_MATRIX = ".ffn_gate_inp_shexp.weight"


class GgufFile(CheckedFile):
    """GGUF file whose tensors are read lazily; implements `TensorFile`.

    Tensor names are those of the file, dims are in torch's order, and rows of query and key are in
    bmforge's order.

    Args:
        path: path of the file.

    Raises:
        CheckpointError: the file is damaged, or its architecture is unsupported.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, _identify(path))
        self.header = read_gguf_header(path)
        self.architecture = find_architecture(self.header)
        tensors = self.header.tensors
        self._entries = {name: tensors[name] for name in tensors if name not in ROPE_TENSORS}
        others = {entry.path for entry in self._entries.values() if entry.path is not None}
        self._parts = {part: CheckedFile(part, _identify(part)) for part in others}
        self._head_dims = {name: self._head_dim(name) for name in self._entries}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Mapping from tensor name to shape."""
        return {name: self._shape(name) for name in self._entries}

    def _shape(self, name: str) -> tuple[int, ...]:
        shape = self._entries[name].shape
        return (1, *shape) if len(shape) == 1 and name.endswith(_ROW_MATRIX) else shape

    def kind(self, name: str) -> str:
        """Return the stored type of a tensor, such as "Q4_0"; a key of `gguf_header.BLOCKS`."""
        return self._entries[name].kind

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor's values; fp32 if they are quantized."""
        return FLOAT_KINDS.get(self.kind(name), torch.float32)

    def rules_for(self, model: Any) -> list[WeightRule]:
        """Map the model's parameter names to the names of the tensors in this file."""
        return find_rules(self.architecture.name, model)

    def head_names(self) -> set[str]:
        """Return the names of tensors that only some output heads have, such as a classifier."""
        names = ("output", "cls", "cls.output")
        return {f"{name}.{kind}" for name in names for kind in ("weight", "bias")}

    def fill(self, name: str, slices: tuple[slice, ...], target: Tensor) -> None:
        """Read a slice into `target`, a contiguous CPU tensor of the same shape and dtype."""
        rows, last = self._find_rows(name, slices)
        width = last.stop - last.start
        flat = target.as_strided((len(rows), width), (width, 1))
        kind, size = self.kind(name), self._row_bytes(name)
        step = max(1, _CHUNK_BYTES // size)
        # Whole rows of floats are read into the target.
        is_direct = kind in FLOAT_KINDS and width * flat.element_size() == size
        for first in range(0, len(rows), step):
            part = flat[first : first + step]
            into = part.view(torch.uint8) if is_direct else None
            stored = self._read_rows(name, rows[first : first + step], into)
            if stored is not into:
                part.copy_(read_values(kind, stored)[:, last])
        if self.architecture.norm_offset and is_norm(name):
            flat -= self.architecture.norm_offset

    def stored_spec(self, name: str) -> QuantSpec | None:
        """Return the QuantSpec equivalent to a tensor's GGUF type, or None if there is none."""
        spec = SPECS.get(self.kind(name))
        return spec if spec is not None and spec.fits(self._shape(name)[-1]) else None

    def read_groups(self, name: str, slices: tuple[slice, ...]) -> QuantizedGroups:
        """Return the stored integers, scales and minima of a slice.

        Args:
            name: name of a quantized tensor.
            slices: one slice per dim; the last must cover complete rows.

        Shape:
            see `QuantizedGroups`; R is the number of rows in the slice, over all leading dims
        """
        rows, _ = self._find_rows(name, slices)
        return unpack_blocks(self.kind(name), self._read_rows(name, rows))

    def _head_dim(self, name: str) -> int:
        """Return the head dim of a tensor with permuted rows; 0 if its rows are not permuted."""
        if not self.architecture.permutes or not is_permuted(name):
            return 0
        kind, rows = self.architecture.kind, self._entries[name].shape[0]
        metadata = self.header.metadata
        heads = metadata.get(f"{kind}.attention.head_count", 0)
        if ".attn_k." in name:
            heads = metadata.get(f"{kind}.attention.head_count_kv", heads)
        if type(heads) is not int or heads < 1 or rows % (2 * heads):
            raise self.damaged(
                f"{name} has {rows} rows, which is not a multiple of 2 x {heads} attention heads"
            )
        return rows // heads

    def _row_bytes(self, name: str) -> int:
        entry = self._entries[name]
        values, block_bytes = BLOCKS[entry.kind]
        return self._row_shape(name)[-1] // values * block_bytes

    def _row_shape(self, name: str) -> tuple[int, ...]:
        """Return the tensor's shape; a permuted bias is a matrix with one column."""
        shape = self._shape(name)
        return (*shape, 1) if len(shape) == 1 and self._head_dims[name] else shape

    def _find_rows(self, name: str, slices: tuple[slice, ...]) -> tuple[Tensor, slice]:
        """Return the indices of the stored rows in a slice, and the slice of columns."""
        shape = self._row_shape(name)
        if len(shape) > len(slices):
            slices = (*slices, slice(0, 1))
        lead = shape[:-1]
        rows = torch.arange(math.prod(lead)).view(lead)[slices[:-1]].reshape(-1)
        head_dim = self._head_dims[name]
        return restore_rows(rows, head_dim) if head_dim else rows, slices[-1]

    def _read_rows(self, name: str, rows: Tensor, into: Tensor | None = None) -> Tensor:
        """Read stored rows by index; return their bytes, (R, bytes) in uint8.

        If `into` is not None, ascending rows are read into this tensor, which is then returned.
        """
        entry, size = self._entries[name], self._row_bytes(name)
        order = rows.sort()
        # Rows with at most one unneeded row between them are read at once.
        breaks = (order.values.diff() > 2).nonzero().flatten() + 1
        stored = torch.empty(len(rows), size, dtype=torch.uint8) if into is None else into
        try:
            checked = self if entry.path is None else self._parts[entry.path]
            with checked.path.open("rb", buffering=0) as file:
                checked.check_same(file.fileno())
                parts = zip(
                    *(torch.tensor_split(t, breaks) for t in (order.values, stored)), strict=True
                )
                for numbers, target in parts:
                    self._read_span(file, entry, numbers, target)
        except OSError as error:
            raise self.damaged(os.strerror(error.errno or 0)) from error
        # `index_select` copies whole rows; indexing copies byte by byte.
        in_order = bool((order.values == rows).all())
        return stored if in_order else stored.index_select(0, order.indices.argsort())

    def _read_span(
        self, file: BinaryIO, entry: GgufTensor, numbers: Tensor, target: Tensor
    ) -> None:
        """Read the rows with ascending indices `numbers` into `target` (R, bytes), in one read."""
        if not len(numbers):
            return
        size, first = target.shape[1], int(numbers[0])
        count = int(numbers[-1]) - first + 1
        is_whole = count == len(numbers)
        data = target if is_whole else torch.empty(count, size, dtype=torch.uint8)
        view = memoryview(data.numpy().reshape(-1))
        file.seek(entry.start + first * size)
        done = 0
        while done < len(view):
            got = file.readinto(view[done:])  # type: ignore[attr-defined]
            if not got:
                raise self.damaged("the file ends too early")
            done += got
        if not is_whole:
            torch.index_select(data, 0, numbers - first, out=target)


def _identify(path: Path) -> tuple[int, int, int]:
    """Open a file and return its identity (see `safe_file.read_file_identity`).

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return read_file_identity(file.fileno())
    except OSError as error:
        raise CheckpointError(
            f"cannot read {str(path)!r} ({error.strerror}). Check its path and permissions."
        ) from error
