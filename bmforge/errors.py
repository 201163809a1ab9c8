"""Error classes. Each message says what is wrong, what is allowed, and how to fix it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = [
    "BmforgeError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DistributedError",
    "MissingDependencyError",
    "ShapeError",
    "install_command",
    "suggest",
]


class BmforgeError(Exception):
    """Base class of all errors that bmforge raises for the user to fix."""


class ConfigError(BmforgeError, ValueError):
    """Raised if a setting is unknown, of the wrong type, out of range, or contradicts another."""


class ShapeError(BmforgeError, ValueError):
    """Raised if a tensor has the wrong shape, dtype or value range."""


class DataError(BmforgeError, ValueError):
    """Raised if an input file is missing, empty, damaged or in the wrong format."""


class CheckpointError(BmforgeError, RuntimeError):
    """Raised if a checkpoint is missing, damaged, from another model, or in a newer format."""


class DistributedError(BmforgeError, RuntimeError):
    """Raised if the processes do not match the layout, or one of them failed."""


class MissingDependencyError(BmforgeError, ImportError):
    """Raised if an optional package is missing; the message names the extra that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        self._arguments = package, extra, purpose
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed. "
            f"Install it with: {install_command(extra)}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Make the error picklable, so that other processes can receive it."""
        return type(self), self._arguments


def install_command(extra: str) -> str:
    """Return the pip command that adds an extra to this installation of bmforge.

    bmforge may be installed from a directory or a Git URL. pip records it in direct_url.json
    (PEP 610). Without an installation, the command installs the checkout that is imported.
    """
    try:
        text = metadata.distribution("bmforge").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return f'pip install -e "{Path(__file__).parents[1]}[{extra}]"'
    record = json.loads(text) if text else {}
    url = record.get("url", "")
    if "vcs_info" in record:
        return f'pip install "bmforge[{extra}] @ {record["vcs_info"]["vcs"]}+{url}"'
    if record.get("dir_info", {}).get("editable"):
        return f'pip install -e "{url.removeprefix("file://")}[{extra}]"'
    return f'pip install "bmforge[{extra}] @ {url}"' if url else f'pip install "bmforge[{extra}]"'


def suggest(name: str, candidates: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the candidate most similar to `name`, or ``""``.

    The name itself is never suggested.
    """
    others = [other for other in candidates if other != name]
    close = difflib.get_close_matches(name, others, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
