"""Property that is computed on first access, without the lock of Python 3.11's `functools`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["cached_property"]

Value = TypeVar("Value")


class cached_property(Generic[Value]):  # noqa: N801 - named as in functools
    """Property whose value is computed on first access and stored on the instance.

    ``functools.cached_property`` acquires a lock at the first access in Python 3.11. Python 3.12
    has no lock; use that one when 3.11 is no longer supported.
    """

    def __init__(self, find: Callable[[Any], Value]) -> None:
        self._find, self._name = find, find.__name__
        self.__doc__ = find.__doc__

    def __get__(self, instance: Any, owner: type | None = None) -> Value:
        """Compute the value and store it in the instance's dict, which is used from then on."""
        value = instance.__dict__[self._name] = self._find(instance)
        return value
