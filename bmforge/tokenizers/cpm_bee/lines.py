"""Reads documents from the lines of a file, as JSON objects without duplicate keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bmforge.errors import DataError

__all__ = ["parse_document", "read_numbered"]

_NEEDED = 'Write one document per line, such as {"input": "...", "<ans>": ""}.'


def read_numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    r"""Yield (line number from 1, line) for the non-empty lines of a file.

    Lines end with ``\n``, ``\r\n`` or ``\r``, as in editors.

    Raises:
        DataError: the file cannot be read.
    """
    number = 0
    try:
        with path.open("rb") as file:
            for raw in file:
                for line in raw.splitlines():
                    number += 1
                    if line.strip():
                        yield number, line
    except OSError as error:
        raise DataError(
            f"cannot read {str(path)!r} ({error}). Pass the path of a .jsonl file."
        ) from error


def parse_document(line: bytes, where: str) -> dict[str, Any]:
    """Parse a line of a file as a document.

    Args:
        line: UTF-8 bytes.
        where: location of the line, for error messages.

    Raises:
        DataError: the line is not a JSON object in UTF-8, is nested too deeply, or has a
            duplicate key or an unpaired surrogate.
    """
    try:
        document = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_refuse_duplicate_keys)
        if b"\\u" in line:  # lone surrogates are possible only as escapes
            json.dumps(document, ensure_ascii=False).encode()
    except _DuplicateKeyError as error:
        raise DataError(
            f"{where} has the key {error.args[0]!r} twice. Rename one of the two keys."
        ) from error
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} has {error.object[error.start]!r}, an unpaired surrogate, which is not a "
            "valid character. Remove or replace the character."
        ) from error
    except RecursionError as error:
        raise DataError(f"{where} is nested too deeply. Flatten the document.") from error
    except ValueError as error:
        raise DataError(f"{where} is not JSON ({error}). {_NEEDED}") from error
    if not isinstance(document, dict):
        raise DataError(f"{where} is a {type(document).__name__}, not a JSON object. {_NEEDED}")
    return document


class _DuplicateKeyError(Exception):
    """Raised if a JSON object contains a key twice."""


def _refuse_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        names = [name for name, _ in pairs]
        raise _DuplicateKeyError(next(name for name in names if names.count(name) > 1))
    return document
