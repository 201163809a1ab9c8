"""Safe reader of pickles that contain plain records: no code in a pickle runs.

A pickle may reference any function and have it called. Here all references are refused, except to
the functions with which numpy serializes numeric arrays; and even these are not called: stand-in
objects validate their arguments and build the array.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from typing import Any, Literal

import numpy as np

from bmforge.errors import DataError

__all__ = ["load_block_files", "load_plain", "read_plain"]

_DTYPE = re.compile(r"[iuf][1248]|b1")
_ALLOWED = (
    "Only numbers, strings, lists, dicts and numeric arrays are read. Save the data again as these "
    "types."
)
# Exceptions of Python's unpickler for a damaged or malicious pickle.
_UNREADABLE = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ImportError,
    OverflowError,
    MemoryError,
    RecursionError,
)


def load_plain(content: bytes) -> Any:
    """Load a pickle that contains plain data: None, numbers, strings, bytes, lists, dicts, sets.

    Numpy arrays and scalars of numbers are also supported.

    Raises:
        DataError: the pickle references other classes or functions, or is damaged.

    Memory: a small multiple of the size of `content`.
    """
    return read_plain(io.BytesIO(content))


def read_plain(stream: io.BytesIO) -> Any:
    """Load the pickle at the current position of a stream, and advance the stream to its end.

    Types and errors are those of `load_plain`.
    """
    reader = _Reader(stream)
    try:
        record = reader.load()
        return _finish(record, {}) if reader.used_names else record
    except DataError:
        raise
    except _UNREADABLE as error:
        raise DataError(
            f"the pickle is damaged ({type(error).__name__}: {error}). Download the file again."
        ) from error


class _Name:
    """Immutable stand-in for a global name that a pickle refers to."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise DataError(f"the pickle sets the state of a class or function. {_ALLOWED}")


class _ArrayClass(_Name):
    """Stand-in for ``numpy.ndarray``, which may only be an argument of other stand-ins."""

    __slots__ = ()


class _DtypeMaker(_Name):
    """Stand-in for ``numpy.dtype(name, align, copy)``."""

    __slots__ = ()

    def __call__(self, name: str, align: Any = False, copy: Any = True) -> _Dtype:
        return _Dtype(name)


class _Reconstruct(_Name):
    """Stand-in for numpy's ``_reconstruct(ndarray, (0,), b"b")``; the contents follow as state."""

    __slots__ = ()

    def __call__(self, array_class: _ArrayClass, shape: Any, kind: Any) -> _Array:
        return _Array()


class _FromBuffer(_Name):
    """Stand-in for numpy's ``_frombuffer(buffer, dtype, shape, order)``."""

    __slots__ = ()

    def __call__(
        self, buffer: Any, dtype: _Dtype, shape: Any, order: str, *arguments: Any
    ) -> _Array:
        array = _Array()
        content = bytes(buffer) if isinstance(buffer, bytearray) else buffer
        array.value = _make_array(content, dtype, shape, order == "F")
        return array


class _Scalar(_Name):
    """Stand-in for numpy's ``scalar(dtype, bytes)``."""

    __slots__ = ()

    def __call__(self, dtype: _Dtype, content: bytes) -> Any:
        return _make_array(content, dtype, (), False)[()].item()


class _Latin1(_Name):
    """Stand-in for ``_codecs.encode(text, "latin1")``, which old protocols use for bytes."""

    __slots__ = ()

    def __call__(self, text: str, encoding: str = "utf-8") -> bytes:
        if encoding not in ("latin1", "latin-1"):
            raise DataError(f"the pickle encodes text as {encoding!r:.40}. {_ALLOWED}")
        return str.encode(text, "latin1")


class _EmptyBytes(_Name):
    """Stand-in for ``bytes()``, which old protocols use for empty bytes."""

    __slots__ = ()

    def __call__(self) -> bytes:
        return b""


class _Set(_Name):
    """Stand-in for ``set([...])``, which old protocols use for sets."""

    __slots__ = ()

    def __call__(self, parts: list[Any]) -> set[Any]:
        if type(parts) is not list:
            raise DataError(f"the pickle contains a set that is not built from a list. {_ALLOWED}")
        return set(parts)


class _Dtype:
    """Numeric dtype of an array under construction."""

    __slots__ = ("name", "order")

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not _DTYPE.fullmatch(name):
            raise DataError(
                f"the pickle contains an array of dtype {name!r:.40} (supported: arrays of "
                "numbers)."
            )
        self.name = name
        self.order: Literal["<", ">", "|", "="] = "<"

    def __setstate__(self, state: Any) -> None:
        order = state[1]
        if order not in ("<", ">", "|", "=") or any(part is not None for part in state[2:5]):
            raise DataError(
                "the pickle contains an array with fields (supported: arrays of numbers)."
            )
        self.order = order


class _Array:
    """Array under construction, whose contents arrive later as pickle state."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, content = state
        self.value = _make_array(content, dtype, shape, bool(is_fortran))


def _make_array(content: Any, dtype: Any, shape: Any, is_fortran: bool) -> np.ndarray:
    """Build an array, after checking dtype, shape and content size."""
    if not isinstance(dtype, _Dtype) or not isinstance(content, bytes):
        raise DataError(f"the pickle contains an array whose values are not numbers. {_ALLOWED}")
    kind = np.dtype(dtype.name).newbyteorder(dtype.order)
    sizes = tuple(shape)
    if not all(type(n) is int and n >= 0 for n in sizes):
        raise DataError(f"the pickle contains an array of shape {shape!r:.40}. {_ALLOWED}")
    if math.prod(sizes) * kind.itemsize != len(content):
        raise DataError(
            f"the pickle contains an array of shape {sizes} with {len(content)} bytes, so it is "
            "damaged. Download the file again."
        )
    flat = np.frombuffer(content, dtype=kind).astype(kind.newbyteorder("="))
    return flat.reshape(sizes, order="F" if is_fortran else "C")


_NAMES: dict[tuple[str, str], _Name] = {
    ("numpy", "ndarray"): _ArrayClass(),
    ("numpy", "dtype"): _DtypeMaker(),
    ("_codecs", "encode"): _Latin1(),
    ("__builtin__", "bytes"): _EmptyBytes(),
    ("__builtin__", "set"): _Set(),
    ("builtins", "set"): _Set(),
    **{
        (f"numpy.{core}.multiarray", name): stand_in
        for core in ("core", "_core")
        for name, stand_in in (("_reconstruct", _Reconstruct()), ("scalar", _Scalar()))
    },
    **{(f"numpy.{core}.numeric", "_frombuffer"): _FromBuffer() for core in ("core", "_core")},
}


class _Reader(pickle.Unpickler):
    """Unpickler that resolves global names only to the stand-ins."""

    used_names = False

    def find_class(self, module: str, name: str) -> Any:
        self.used_names = True
        if (module, name) not in _NAMES:
            raise DataError(
                f"the pickle references {module}.{name}"[:200]
                + (
                    ", which could run arbitrary code, so it is refused. Only numbers, strings, "
                    "lists, dicts and numeric arrays are read. Save the data again as these "
                    "types."
                )
            )
        return _NAMES[module, name]


class _FileRow(_Name):
    """Stand-in for ``FileInfo._load_from_state`` of old block datasets; returns its argument."""

    __slots__ = ()

    def __call__(self, version: Any, row: Any) -> tuple[Any, ...]:
        if version != 1 or type(row) is not tuple:
            raise DataError(
                "the pickle describes a data file in an unknown format. Download the file again."
            )
        return row


class _FileInfo(_Name):
    """Stand-in for ``FileInfo`` of old block datasets, valid only as argument of ``getattr``."""

    __slots__ = ()


class _GetRow(_Name):
    """Stand-in for ``getattr`` that resolves only ``FileInfo._load_from_state``."""

    __slots__ = ()

    def __call__(self, owner: Any, name: Any) -> _FileRow:
        if type(owner) is not _FileInfo or name != "_load_from_state":
            raise DataError(
                f"the pickle accesses the attribute {name!r:.80} of an object, which is "
                "refused, because a list of data files does not need attributes. Download the "
                "file again."
            )
        return _FileRow()


class _FileReader(pickle.Unpickler):
    """Unpickler for the file list of an old block dataset."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "getattr" and module in ("builtins", "__builtin__"):
            return _GetRow()
        if name == "FileInfo" and module.endswith("distributed_dataset"):
            return _FileInfo()
        raise DataError(
            f"the pickle references {module}.{name}"[:200]
            + ", which is refused, because a list of data files does not need it. Download the "
            "file again."
        )


def load_block_files(content: bytes) -> list[tuple[Any, ...]]:
    """Return the rows in the pickled file list of a BMTrain or ModelCenter dataset.

    Raises:
        DataError: the pickle has other content, references other functions, or is damaged.
    """
    try:
        rows = _FileReader(io.BytesIO(content)).load()
    except DataError:
        raise
    except _UNREADABLE as error:
        raise DataError(
            f"the pickle is damaged ({type(error).__name__}: {error}). Download the file again."
        ) from error
    if type(rows) is not list or not all(type(row) is tuple and len(row) == 6 for row in rows):
        raise DataError("the pickle is not a list of data files. Download the file again.")
    return rows


_OPEN = object()


def _finish(record: Any, done: dict[int, Any]) -> Any:
    """Return a copy of `record` with stand-ins replaced by arrays; raise for unsupported values.

    Args:
        record: unpickled record.
        done: dict from the ``id`` of a container to its copy; `_OPEN` while it is being copied.
    """
    if isinstance(record, _Array) and record.value is not None:
        return record.value
    if record is None or type(record) in (bool, int, float, str, bytes, bytearray):
        return record
    finished = done.get(id(record))
    if finished is _OPEN:
        raise DataError(f"the pickle contains a list or dict that contains itself. {_ALLOWED}")
    if finished is None:
        done[id(record)] = _OPEN
        finished = done[id(record)] = _finish_container(record, done)
    return finished


def _finish_container(record: Any, done: dict[int, Any]) -> Any:
    if type(record) is dict:
        return {_finish(key, done): _finish(value, done) for key, value in record.items()}
    if type(record) in (list, tuple, set, frozenset):
        return type(record)(_finish(part, done) for part in record)
    raise DataError(
        f"the pickle refers to a class or a function where a value is expected. {_ALLOWED}"
    )
