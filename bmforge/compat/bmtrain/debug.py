"""Dictionary in which a program stores named values for debugging."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from bmforge.compat.bmtrain.runtime import config

__all__ = ["append", "clear", "extend", "get", "set"]


def clear(key: str | None = None) -> None:
    """Remove the value stored under a name; if None, remove all values."""
    if key is None:
        config.debugged.clear()
    else:
        config.debugged.pop(key, None)


def set(key: str, value: Any) -> None:
    """Store a value under a name; a tensor is copied to the host."""
    config.debugged[key] = value.detach().cpu() if isinstance(value, Tensor) else value


def get(key: str, default: Any = None) -> Any:
    """Return the value stored under a name, or a default."""
    return config.debugged.get(key, default)


def append(key: str, value: Any) -> None:
    """Append a value to the list stored under a name."""
    config.debugged.setdefault(key, []).append(value)


def extend(key: str, values: Iterable[Any]) -> None:
    """Append several values to the list stored under a name."""
    config.debugged.setdefault(key, []).extend(values)
