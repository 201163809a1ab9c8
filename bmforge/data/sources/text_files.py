"""Reads whole UTF-8 text files."""

from __future__ import annotations

import os
from pathlib import Path

from bmforge.errors import DataError

__all__ = ["read_lines", "read_text"]


def read_text(path: str | os.PathLike[str]) -> str:
    r"""Read a UTF-8 file; line ends become ``\n``, and a byte order mark is removed.

    Raises:
        DataError: the file cannot be read, or is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {str(path)!r} ({error}). Pass a UTF-8 text file.") from error


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    """Return the lines of a file, including empty ones, so that line numbers are correct.

    Raises:
        DataError: the file cannot be read, or is not UTF-8.
    """
    # Not splitlines(), which also divides at Unicode's rarer line breaks inside a text.
    return read_text(path).removesuffix("\n").split("\n")
