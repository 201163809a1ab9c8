"""Typed errors. A message says what was given, what is needed, and how to fix it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

__all__ = [
    "BmforgeError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DistributedError",
    "MissingDependencyError",
    "ShapeError",
    "suggest",
]


class BmforgeError(Exception):
    """Base of every error that bmforge raises for its user."""


class ConfigError(BmforgeError, ValueError):
    """A setting is unknown, of the wrong type, out of range, or contradicts another one."""


class ShapeError(BmforgeError, ValueError):
    """A tensor does not have the shape, dtype or range that is needed."""


class DataError(BmforgeError, ValueError):
    """An input file is missing, empty, damaged or not of the promised form."""


class CheckpointError(BmforgeError, RuntimeError):
    """A checkpoint is missing, damaged, of another model, or of a newer format."""


class DistributedError(BmforgeError, RuntimeError):
    """The processes do not fit the layout, or one of them failed."""


class MissingDependencyError(BmforgeError, ImportError):
    """An optional package is needed; the message names the extra that brings it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        self._given = package, extra, purpose
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed. "
            f"Install it with: pip install 'bmforge[{extra}]'"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Let it be pickled, as sending it to other processes does."""
        return type(self), self._given


def suggest(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the known name nearest to `name`, else ``""``."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
