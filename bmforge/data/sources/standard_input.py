"""Standard input as a source: kept in a file first, as a text must be read more than once."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from bmforge.data.sources.kinds import kind_of
from bmforge.data.sources.packed import packing_of
from bmforge.errors import ConfigError

__all__ = ["STANDARD_INPUT", "keep_standard_input"]

STANDARD_INPUT = "-"
_NAME = "standard_input"
_HEAD_BYTES = 1024
_CHUNK_BYTES = 1 << 20
Name = str | os.PathLike[str]


@contextmanager
def keep_standard_input(
    inputs: Name | Iterable[Name] | None, folder: Path
) -> Iterator[list[Name] | None]:
    """Give the inputs with a file in `folder` in the place of ``-``; it is removed at the end.

    What its first bytes do not tell is lines of JSON if it begins with ``{`` or is packed, else one
    text.

    Raises:
        ConfigError: ``-`` is there twice, or nobody writes to standard input.
    """
    if inputs is None:
        yield None
        return
    named = [inputs] if isinstance(inputs, str | os.PathLike) else list(inputs)
    if STANDARD_INPUT not in named:
        yield named
        return
    if named.count(STANDARD_INPUT) > 1:
        raise ConfigError("standard input ('-') can be read once: name it once")
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError(
            "'-' reads standard input: send something there, as with `cat FILE | ...`"
        )
    place = folder / _NAME
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    try:
        kept = _keep(sys.stdin.buffer, place)
        yield [kept if name == STANDARD_INPUT else name for name in named]
    finally:
        shutil.rmtree(place, ignore_errors=True)
        for left in (folder, folder.parent):  # where nothing else came of it
            with suppress(OSError):
                left.rmdir()


def _keep(stream: BinaryIO, place: Path) -> Path:
    head = stream.read(_HEAD_BYTES)
    packing = packing_of(head, "")
    known = not packing and kind_of(head, "")
    is_lines = bool(packing) or head.lstrip()[:1] == b"{"  # a packed one cannot be looked into
    suffix = "" if known else f"{'.jsonl' if is_lines else '.txt'}{packing}"
    path = place / f"{_NAME}{suffix}"
    with path.open("wb") as file:
        file.write(head)
        shutil.copyfileobj(stream, file, _CHUNK_BYTES)
    return path
