"""Reads the header of a GGUF file: the metadata, and the positions of the tensors.

Files may be untrusted, so every count, length, offset and product is checked against the size of
the file before memory is allocated.

Source: the format's description, docs/gguf.md of ggml-org/ggml (version 3; 2 is supported too).
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from bmforge.errors import CheckpointError

__all__ = ["BLOCKS", "GgufHeader", "GgufTensor", "is_gguf", "read_gguf_header"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
# Larger than the header of any known vocabulary; the rest of a larger file is tensors.
_MAX_HEADER_BYTES = 1 << 30
_MAX_ALIGNMENT = 1 << 16
_DEFAULT_ALIGNMENT = 32
# Minimum bytes of a metadata entry (an empty name, a type, a byte) and of a tensor's entry (an
# empty name, no dims, a type, an offset).
_LEAST_ENTRY_BYTES, _LEAST_TENSOR_BYTES = 13, 24
_STRING, _ARRAY = 8, 9
# type of a metadata value -> format of struct and numpy
_NUMBERS = {
    **{0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f"},
    **{7: "<?", 10: "<Q", 11: "<q", 12: "<d"},
}
# supported tensor type -> (its GGUF type number, values per block, bytes per block)
_KINDS = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "IQ2_XXS": (16, 256, 66),
    "IQ2_XS": (17, 256, 74),
    "IQ3_XXS": (18, 256, 98),
    "IQ1_S": (19, 256, 50),
    "IQ4_NL": (20, 32, 18),
    "IQ3_S": (21, 256, 110),
    "IQ2_S": (22, 256, 82),
    "IQ4_XS": (23, 256, 136),
    "IQ1_M": (29, 256, 56),
    "BF16": (30, 1, 2),
    "TQ1_0": (34, 256, 54),
    "TQ2_0": (35, 256, 66),
    "MXFP4": (39, 32, 17),
    "NVFP4": (40, 64, 36),
}
BLOCKS: dict[str, tuple[int, int]] = {kind: layout[1:] for kind, layout in _KINDS.items()}
_BY_NUMBER = {number: kind for kind, (number, _, _) in _KINDS.items()}
# Names of unsupported tensor types, for error messages.
_OTHERS = {
    **{9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
}
_PART = re.compile(r"(.*-)(\d{5})(-of-(\d{5})\.gguf)")


class GgufTensor(NamedTuple):
    """Type, shape and position of a tensor in a GGUF file.

    Args:
        kind: storage format of the values; a key of `BLOCKS`.
        shape: shape in torch's order: values of the last dimension are contiguous.
        start: offset of the first byte in the file.
        size: size in bytes.
        path: file that contains the tensor if it is another part of a split file; otherwise None.
    """

    kind: str
    shape: tuple[int, ...]
    start: int
    size: int
    path: Path | None = None


class GgufHeader(NamedTuple):
    """Header of a GGUF file.

    Args:
        path: path of the file.
        metadata: dictionary from key to number, string, bool, list of strings, or numpy array.
        tensors: dictionary from name to tensor.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def is_gguf(path: str | Path) -> bool:
    """Return True if a path is a file with the suffix .gguf."""
    return Path(path).suffix == ".gguf" and Path(path).is_file()


def read_gguf_header(path: str | Path) -> GgufHeader:
    """Read the header of a GGUF file.

    Memory use is a few times the header's size; headers above 1 GiB raise an error.

    Raises:
        CheckpointError: the file does not exist, is not a GGUF file, is truncated, or is
            inconsistent.
    """
    path = Path(path)
    header = _read_file(path)
    parts = header.metadata.get("split.count", 1)
    return header if parts in (0, 1) else _join_parts(header, parts)


def _read_file(path: Path) -> GgufHeader:
    try:
        with path.open("rb") as file:
            return _read(file, os.fstat(file.fileno()).st_size, path)
    except OSError as error:
        raise CheckpointError(
            f"cannot read {str(path)!r} ({error.strerror}). Check its path and permissions."
        ) from error


def _join_parts(first: GgufHeader, parts: Any) -> GgufHeader:
    """Return the header of a split file: metadata of the first part, tensors of all parts.

    Raises:
        CheckpointError: `first` is not the first part, or another part is missing or belongs to
            another model.
    """
    path = first.path
    name = _PART.fullmatch(path.name)
    if name is None or type(parts) is not int or int(name[4]) != parts:
        raise CheckpointError(
            f"{str(path)!r} is part of a split file (split.count={parts}), so its name must end "
            "with -00001-of-0000N.gguf. Rename the parts, or merge them with llama.cpp's "
            "gguf-split --merge."
        )
    if first.metadata.get("split.no", 0) != 0 or int(name[2]) != 1:
        raise CheckpointError(
            f"{str(path)!r} is part {int(name[2])} of {parts} of a split file. Use the path of "
            f"the first part: {name[1]}00001{name[3]}."
        )
    tensors = dict(first.tensors)
    for number in range(2, parts + 1):
        part = _read_file(path.with_name(f"{name[1]}{number:05d}{name[3]}"))
        if (part.metadata.get("split.no"), part.metadata.get("split.count")) != (number - 1, parts):
            raise CheckpointError(
                f"{str(part.path)!r} is not part {number} of {parts}. Download all parts again."
            )
        twice = tensors.keys() & part.tensors.keys()
        if twice:
            raise CheckpointError(
                f"{str(part.path)!r} contains {min(twice)!r}, which is also in another part. "
                "Download all parts again."
            )
        tensors |= {key: value._replace(path=part.path) for key, value in part.tensors.items()}
    count = first.metadata.get("split.tensors.count", len(tensors))
    if count != len(tensors):
        raise CheckpointError(
            f"the parts of {str(path)!r} contain {len(tensors)} tensors, but "
            f"split.tensors.count={count}. Download all parts again."
        )
    return first._replace(tensors=tensors)


def _read(file: BinaryIO, size: int, path: Path) -> GgufHeader:
    cursor = _Cursor(file, size, path)
    if cursor.take(4) != _MAGIC:
        raise cursor.damaged("the file does not begin with 'GGUF'")
    version = cursor.number("<I")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        variant = "in big-endian order" if swapped else f"of version {version}"
        raise CheckpointError(
            f"{str(path)!r} is GGUF {variant} (supported: versions {_VERSIONS}, little-endian). "
            "Convert the model again with a current llama.cpp."
        )
    tensor_count = cursor.count(_LEAST_TENSOR_BYTES, "tensors")
    entry_count = cursor.count(_LEAST_ENTRY_BYTES, "metadata entries")
    metadata: dict[str, Any] = {}
    for _ in range(entry_count):
        key = cursor.text()
        if key in metadata:
            raise cursor.damaged(f"the metadata key {key!r} occurs twice")
        metadata[key] = cursor.value(key, cursor.number("<I"))
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment not in _alignments():
        raise cursor.damaged(
            f"general.alignment={alignment!r} is not a power of two of at most 65536 bytes"
        )
    places = [_read_tensor(cursor, alignment) for _ in range(tensor_count)]
    first = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, tensor in places:
        if name in tensors:
            raise cursor.damaged(f"the tensor {name!r} occurs twice")
        tensors[name] = tensor._replace(start=first + tensor.start)
    _check_places(cursor, tensors, size)
    return GgufHeader(path, metadata, tensors)


def _alignments() -> Iterator[int]:
    return (1 << power for power in range(_MAX_ALIGNMENT.bit_length()))


def _read_tensor(cursor: _Cursor, alignment: int) -> tuple[str, GgufTensor]:
    """Read a tensor's name and position; `start` is relative to the first tensor."""
    name = cursor.text()
    dims = cursor.number("<I")
    if not 1 <= dims <= _MAX_DIMS:
        raise cursor.damaged(f"the tensor {name!r} has {dims} dims (allowed: 1 to {_MAX_DIMS})")
    shape = tuple(cursor.number("<Q") for _ in range(dims))[::-1]
    number, start = cursor.number("<I"), cursor.number("<Q")
    kind = _BY_NUMBER.get(number)
    if kind is None:
        type_name = _OTHERS.get(number, f"number {number}")
        raise CheckpointError(
            f"{name!r} in {str(cursor.path)!r} has the unsupported type {type_name} (supported: "
            f"{', '.join(_KINDS)}). Use a file of the model with a supported type, such as "
            "Q4_K_M or Q8_0."
        )
    values, block_bytes = BLOCKS[kind]
    if 0 in shape or shape[-1] % values:
        raise cursor.damaged(
            f"the rows of the tensor {name!r} of shape {shape} are not a multiple of the block "
            f"size of {kind} ({values} values)"
        )
    if start % alignment:
        raise cursor.damaged(
            f"the tensor {name!r} begins at byte {start}, which is not a multiple of {alignment}"
        )
    return name, GgufTensor(kind, shape, start, math.prod(shape) // values * block_bytes)


def _check_places(cursor: _Cursor, tensors: dict[str, GgufTensor], size: int) -> None:
    """Raise `CheckpointError` if tensors overlap or extend beyond the end of the file."""
    end, before = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
        if tensor.start < end:
            raise cursor.damaged(f"the tensors {before!r} and {name!r} overlap")
        end, before = tensor.start + tensor.size, name
        if end > size:
            raise cursor.damaged(
                f"the tensor {name!r} ends at byte {end}, but the file has only {size} bytes"
            )


class _Cursor:
    """Reads a GGUF header sequentially and checks bounds.

    Args:
        file: the open file, at its beginning.
        size: size of the file in bytes.
        path: path for error messages.
    """

    def __init__(self, file: BinaryIO, size: int, path: Path) -> None:
        self.file, self.path = file, path
        self.at = 0
        self.end = min(size, _MAX_HEADER_BYTES)

    def damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{str(self.path)!r} is damaged or not a GGUF file: {reason}. Download it again."
        )

    def take(self, count: int) -> bytes:
        if count > self.end - self.at:
            raise self.damaged(f"the header ends inside a field of {count} bytes")
        data = self.file.read(count)
        if len(data) != count:
            raise self.damaged("the file was truncated while it was being read")
        self.at += count
        return data

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def count(self, least_bytes: int, what: str) -> int:
        """Read an item count, and check that the rest of the file can contain that many items.

        An item has at least `least_bytes` bytes.
        """
        count = self.number("<Q")
        if count > (self.end - self.at) // least_bytes:
            raise self.damaged(
                f"the header declares {count} {what}, more than the file can contain"
            )
        return count

    def text(self) -> str:
        try:
            return self.take(self.count(1, "characters")).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(f"a string in the header is not UTF-8 ({error})") from error

    def value(self, key: str, kind: int) -> Any:
        """Read and return a metadata value of type `kind`."""
        if kind == _STRING:
            return self.text()
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise self.damaged(f"the metadata key {key!r} has the unknown type {kind}")
        of = self.number("<I")
        if of == _STRING:
            return [self.text() for _ in range(self.count(8, f"texts in {key!r}"))]
        if of not in _NUMBERS:
            what = "an array of arrays" if of == _ARRAY else f"an array of the unknown type {of}"
            raise self.damaged(f"the metadata key {key!r} is {what}, which is not supported")
        size = struct.calcsize(_NUMBERS[of])
        data = self.take(self.count(size, f"numbers in {key!r}") * size)
        return np.frombuffer(data, np.dtype(_NUMBERS[of]))
