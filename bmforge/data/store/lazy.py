"""Lazy arrays, whose elements are read on access: several concatenated arrays, or spans of one
array.

They support the part of numpy's interface that readers of a token store use: length, dtype, and
indexing with an integer, a slice, or an array. Results are numpy arrays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ConcatenatedArray", "LazyArray", "GatheredArray"]


class LazyArray(ABC):
    """Base class of lazy one-dimensional arrays, which concatenate several arrays or spans.

    Attributes:
        dtype: dtype of the results.
    """

    dtype: np.dtype[Any]

    def __init__(self, lengths: NDArray[np.int64]) -> None:
        self._ends = np.cumsum(lengths, dtype=np.int64)
        self._starts = self._ends - lengths

    def __len__(self) -> int:
        """Return the number of elements."""
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def shape(self) -> tuple[int]:
        """Shape of the array."""
        return (len(self),)

    @abstractmethod
    def _read(self, number: int, start: int, end: int) -> NDArray[Any]:
        """Read the elements `start` to `end` of the array or span with index `number`."""

    @abstractmethod
    def _take(self, number: int, places: NDArray[np.int64]) -> NDArray[Any]:
        """Read the elements at the positions `places` of the array or span with index `number`."""

    def __getitem__(self, key: Any) -> Any:
        """Return an element, a slice with step 1, or the elements at an array of positions."""
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step != 1:
                raise IndexError(f"a slice with step {step} is not supported. Use step 1.")
            return self._slice(start, stop)
        places = np.asarray(key)
        if places.ndim == 0:
            (index,) = self._checked(places[None]).tolist()
            return self._slice(index, index + 1)[0]
        return self._places(self._checked(places))

    def _checked(self, places: NDArray[Any]) -> NDArray[np.int64]:
        if places.dtype == np.bool_:
            places = np.flatnonzero(places)
        places = places.astype(np.int64)
        places = np.where(places < 0, places + len(self), places)
        if len(places) and not (places.min() >= 0 and places.max() < len(self)):
            wrong = places[(places < 0) | (places >= len(self))][0]
            raise IndexError(f"index {wrong} is out of range for an array of {len(self)} elements.")
        return places

    def _slice(self, start: int, stop: int) -> NDArray[Any]:
        parts = []
        number = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            begin, end = int(self._starts[number]), int(self._ends[number])
            last = min(stop, end)
            if last > start:
                parts.append(self._read(number, start - begin, last - begin))
                start = last
            number += 1
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=self.dtype)

    def _places(self, places: NDArray[np.int64]) -> NDArray[Any]:
        values = np.empty(len(places), dtype=self.dtype)
        numbers = np.searchsorted(self._ends, places, side="right")
        for number in np.unique(numbers).tolist():
            in_part = numbers == number
            values[in_part] = self._take(number, places[in_part] - self._starts[number])
        return values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return all elements as a numpy array."""
        return self._slice(0, len(self)).astype(dtype or self.dtype)


class ConcatenatedArray(LazyArray):
    """Lazy concatenation of several arrays.

    Args:
        parts: one-dimensional arrays, memory-mapped or not.
        dtype: dtype of the results.
        offsets: value added to the elements of each array (default: nothing is added).
    """

    def __init__(
        self, parts: Sequence[NDArray[Any]], dtype: Any, offsets: Sequence[int] | None = None
    ) -> None:
        super().__init__(np.array([len(part) for part in parts], dtype=np.int64))
        self.dtype = np.dtype(dtype)
        self._parts, self._offsets = list(parts), list(offsets or [0] * len(parts))

    def _read(self, number: int, start: int, end: int) -> NDArray[Any]:
        return self._moved(self._parts[number][start:end], number)

    def _take(self, number: int, places: NDArray[np.int64]) -> NDArray[Any]:
        return self._moved(self._parts[number][places], number)

    def _moved(self, values: NDArray[Any], number: int) -> NDArray[Any]:
        plain = values.astype(self.dtype, copy=False)
        offset = self._offsets[number]
        return plain + offset if offset else plain


class GatheredArray(LazyArray):
    """Lazy concatenation of spans of one array; adjacent spans are merged.

    Args:
        base: numpy array or lazy array.
        spans: start and end of each span, in order, shape (count, 2).

    Memory: 32 bytes per merged span.
    """

    def __init__(self, base: Any, spans: NDArray[np.int64]) -> None:
        spans = spans[spans[:, 1] > spans[:, 0]]
        opens = np.ones(len(spans), dtype=np.bool_)
        opens[1:] = spans[1:, 0] != spans[:-1, 1]
        self._from = spans[opens, 0]
        last = np.flatnonzero(np.append(opens[1:], True)) if len(spans) else opens
        super().__init__(spans[last, 1] - self._from if len(spans) else self._from)
        self._base, self.dtype = base, base.dtype

    def _read(self, number: int, start: int, end: int) -> NDArray[Any]:
        begin = int(self._from[number])
        values: NDArray[Any] = self._base[begin + start : begin + end]
        return values

    def _take(self, number: int, places: NDArray[np.int64]) -> NDArray[Any]:
        values: NDArray[Any] = self._base[self._from[number] + places]
        return values

    def _places(self, places: NDArray[np.int64]) -> NDArray[Any]:
        numbers = np.searchsorted(self._ends, places, side="right")
        values: NDArray[Any] = self._base[self._from[numbers] + places - self._starts[numbers]]
        return values
