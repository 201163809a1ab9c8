"""Writing a file so that a kill at any instant leaves the old or the new one, whole."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["replace_file", "sync_directory"]


def replace_file(path: str | Path, content: str | bytes) -> None:
    """Put `content` (text as UTF-8) into `path`: written beside, synced, renamed into place."""
    path = Path(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    if path.exists() and path.read_bytes() == data:
        return
    beside = path.with_name(f".{path.name}.partial")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names inside directory `path` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
