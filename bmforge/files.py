"""Files: written so that a kill at any instant leaves the old or the new one, and read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from bmforge.errors import DataError

__all__ = [
    "partial_name",
    "read_bytes",
    "read_json",
    "replace_file",
    "replacing",
    "sync_directory",
]


def replace_file(path: str | Path, content: str | bytes) -> None:
    """Put `content` (text as UTF-8) into `path`: written beside, synced, renamed into place."""
    path = Path(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    if path.exists() and path.read_bytes() == data:
        return
    with replacing(path) as file:
        file.write(data)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Give a file to write; it is synced and renamed to `path` when all went well."""
    beside = path.with_name(partial_name(path.name))
    with beside.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
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
