"""Copies standard input and named pipes to files, because inputs are read more than once."""

from __future__ import annotations

import os
import shutil
import stat
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
    """Replace ``-``, named pipes and ``<(...)`` with temporary copies in `folder`.

    If the first bytes do not identify a format, a stream is read as JSON lines if it begins with
    ``{`` or is compressed, and otherwise as one text.

    Raises:
        ConfigError: ``-`` is named twice, or standard input is a terminal.
    """
    if inputs is None:
        yield None
        return
    named = [inputs] if isinstance(inputs, str | os.PathLike) else list(inputs)
    if not any(map(_is_stream, named)):
        yield named
        return
    if named.count(STANDARD_INPUT) > 1:
        raise ConfigError("standard input ('-') can be read only once. Pass '-' only once.")
    if STANDARD_INPUT in named and (sys.stdin is None or sys.stdin.isatty()):
        raise ConfigError(
            "'-' reads standard input, but standard input is a terminal. Pipe a text to the "
            "command, for example with `cat FILE | ...`."
        )
    target = folder / _NAME
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    try:
        yield [
            _keep_stream(name, target, number) if _is_stream(name) else name
            for number, name in enumerate(named)
        ]
    finally:
        shutil.rmtree(target, ignore_errors=True)
        for left in (folder, folder.parent):  # removed only if empty
            with suppress(OSError):
                left.rmdir()


def _is_stream(name: Name) -> bool:
    if name == STANDARD_INPUT:
        return True
    try:
        mode = os.stat(name).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISSOCK(mode)


def _keep_stream(name: Name, target: Path, number: int) -> Path:
    if name == STANDARD_INPUT:
        return _keep(sys.stdin.buffer, target / _NAME)
    try:
        with Path(name).open("rb") as stream:
            return _keep(stream, target / f"{number}-{Path(name).name}")
    except OSError as error:
        raise ConfigError(
            f"input {str(name)!r} cannot be read as a stream ({error}). Check its permissions."
        ) from error


def _keep(stream: BinaryIO, path: Path) -> Path:
    head = stream.read(_HEAD_BYTES)
    packing = packing_of(head, path.name)
    if packing or not kind_of(head, path.name):  # the content of a compressed stream is unknown
        is_lines = bool(packing) or head.lstrip()[:1] == b"{"
        if not kind_of(b"", path.name):
            suffix = f"{'.jsonl' if is_lines else '.txt'}{packing}"
            path = path.with_name(f"{path.name}{suffix}")
    with path.open("wb") as file:
        file.write(head)
        shutil.copyfileobj(stream, file, _CHUNK_BYTES)
    return path
