"""Files: written so that a kill at any instant leaves the old or the new one, and read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from bmforge.errors import ConfigError, DataError

__all__ = [
    "check_place",
    "partial_name",
    "read_bytes",
    "read_json",
    "replace_file",
    "replacing",
    "sync_directory",
]


def check_place(path: str | Path, name: str) -> None:
    """Check that something can be made at `path`: said before the work that it is for.

    Args:
        path: a file or directory, which need not be there, nor the directories above it.
        name: of the setting that names it, for the message.

    Raises:
        ConfigError: it is below a file, or nothing may be written there.
    """
    given = Path(path)
    there = next(place for place in (given, *given.absolute().parents) if os.path.lexists(place))
    if there != given and not there.is_dir():
        raise ConfigError(
            f"{name}={str(path)!r} cannot be made: {str(there)!r} is no directory. Name another "
            "place."
        )
    if not os.access(there, os.W_OK):
        raise ConfigError(
            f"{name}={str(path)!r} cannot be written: {str(there)!r} is not ours to write in. Name "
            "another place, or change its permissions."
        )


def replace_file(path: str | Path, content: str | bytes) -> None:
    """Put `content` (text as UTF-8) into `path`: written beside, synced, renamed into place."""
    path = Path(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    if path.exists() and path.read_bytes() == data:
        return
    with replacing(path) as file:
        file.write(data)


@contextmanager
def replacing(path: Path, beside: Path | None = None) -> Iterator[BinaryIO]:
    """Give a file to write; it is synced and renamed to `path` when all went well.

    Args:
        beside: what it is until then; by default in the same directory, by `partial_name`.
    """
    beside = beside or path.with_name(partial_name(path.name))
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def partial_name(name: str) -> str:
    """Return the name that `replace_file` gives a file while it is written."""
    return f".{name}.partial"


def sync_directory(path: Path) -> None:
    """Make the names inside directory `path` durable, where a system lets one open directories."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:  # Windows never does; there, a rename is as durable as it gets
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_bytes(path: Path, what: str) -> bytes:
    """Return the contents of `path`.

    Raises:
        DataError: it cannot be read; the message says that it should be `what`.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read {str(path)!r} ({error.strerror}): it should be {what}"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`.

    Raises:
        DataError: it cannot be read, or holds something else.
    """
    try:
        found = json.loads(read_bytes(path, "a JSON file"))
    except ValueError as error:
        raise DataError(f"{str(path)!r} is not JSON ({error}); get the file again") from error
    if not isinstance(found, dict):
        raise DataError(f"{str(path)!r} holds a {type(found).__name__}; needed is a JSON object")
    return found
