"""A place for a program to keep values under names while it looks for a fault."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from bmforge.compat.bmtrain.runtime import config

__all__ = ["append", "clear", "extend", "get", "set"]


def clear(key: str | None = None) -> None:
    """Forget one name, or all."""
    if key is None:
        config.debugged.clear()
    else:
        config.debugged.pop(key, None)


def set(key: str, value: Any) -> None:
    """Keep a value; a tensor is copied to the host."""
    config.debugged[key] = value.detach().cpu() if isinstance(value, Tensor) else value


def get(key: str, default: Any = None) -> Any:
    """Return what is kept under a name."""
    return config.debugged.get(key, default)


def append(key: str, value: Any) -> None:
    """Add to the list under a name."""
    config.debugged.setdefault(key, []).append(value)


def extend(key: str, values: Iterable[Any]) -> None:
    """Add several to the list under a name."""
    config.debugged.setdefault(key, []).extend(values)
