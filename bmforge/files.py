"""Files: written so that a kill at any instant leaves the old or the new one, and opened."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from bmforge.errors import DataError

__all__ = ["open_tokenizer_json", "partial_name", "replace_file", "sync_directory"]


def replace_file(path: str | Path, content: str | bytes) -> None:
    """Put `content` (text as UTF-8) into `path`: written beside, synced, renamed into place."""
    path = Path(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    if path.exists() and path.read_bytes() == data:
        return
    beside = path.with_name(partial_name(path.name))
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    sync_directory(path.parent)


def partial_name(name: str) -> str:
    """Return the name that `replace_file` gives a file while it is written."""
    return f".{name}.partial"


def sync_directory(path: Path) -> None:
    """Make the names inside directory `path` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_tokenizer_json(content: bytes, path: Path) -> Any:
    """Return the tokenizer of the ``tokenizers`` library in a tokenizer.json's `content`.

    Truncation and padding, which such a file keeps from its last use, are switched off: texts are
    encoded whole.

    Args:
        path: where it comes from, for messages.

    Raises:
        DataError: this is no tokenizer.json.
    """
    from tokenizers import Tokenizer  # here, so that `import bmforge` stays quick

    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises a bare Exception for what it cannot read
        raise DataError(
            f"{str(path)!r} is not a tokenizer.json ({error}); get the file again"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
