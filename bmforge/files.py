"""Reads files, and writes them atomically: after a crash, a file has its old or its new content."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from bmforge.errors import ConfigError, DataError, suggest

__all__ = [
    "check_input",
    "check_place",
    "find_export",
    "partial_name",
    "read_bytes",
    "read_json",
    "refuse_pipe",
    "replace_file",
    "replace_atomically",
    "sync_directory",
]


def check_place(path: str | Path, name: str, *, is_file: bool = False) -> None:
    """Check that a file or directory can be created at `path`, before any work is done.

    Args:
        path: file or directory; neither `path` nor its parent directories need to exist.
        name: name of the option that sets the path, for the error message.
        is_file: whether a file will be written, instead of a directory.

    Raises:
        ConfigError: `path` exists but is a file instead of a directory (or the reverse), a parent
            is a file, or the directory is not writable.
    """
    path = Path(path)
    if path.exists() and path.is_dir() == is_file:
        kind, needed = ("directory", "file") if is_file else ("file", "directory")
        raise ConfigError(
            f"{name}={str(path)!r} is a {kind} (needed: a {needed}). Choose another path."
        )
    existing = next(p for p in (path, *path.absolute().parents) if os.path.lexists(p))
    if existing != path and not existing.is_dir():
        raise ConfigError(
            f"cannot create {name}={str(path)!r}: {str(existing)!r} is not a directory. Choose "
            "another path."
        )
    if not os.access(existing, os.W_OK):
        raise ConfigError(
            f"cannot write {name}={str(path)!r}: no permission to write in {str(existing)!r}. "
            "Choose another path, or change its permissions."
        )


def check_input(path: str, name: str) -> None:
    """Raise `DataError` if there is neither a file or directory at `path`, nor a token store.

    Args:
        path: value of the option. The files of a token store begin with its path.
        name: name of the option, for the error message.
    """
    location = Path(path)
    try:
        siblings = [] if location.exists() else [other.name for other in location.parent.iterdir()]
    except OSError:  # no such directory, or no permission
        siblings = []
    prefixes = (f"{location.name}.", f"{location.name}_")
    if location.exists() or any(other.startswith(prefixes) for other in siblings):
        return
    near = suggest(location.name, siblings)
    raise DataError(f"{name}: the file {path!r} does not exist.{near} Check the path.")


def find_export(name: str | Path) -> str | Path:
    """Return the export directory of a run directory; other names are returned unchanged.

    Raises:
        ConfigError: the run directory has no export.
    """
    if not (Path(name) / "run.toml").is_file():
        return name
    if (Path(name) / "config.json").is_file():  # the output of `bmforge compress`
        return name
    export = Path(name) / "export"
    if not export.is_dir():
        raise ConfigError(
            f"{str(export)!r} does not exist: the run is not finished, or has export=False. Run "
            "the same `bmforge train` command again to finish it."
        )
    return export


def refuse_pipe(path: str | Path) -> None:
    """Raise `DataError` for a pipe or a device, for readers that read their input twice."""
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise DataError(
            f"input {str(path)!r} is a pipe or a device, which only `bmforge prepare` can read. "
            "Write its content to a file first."
        )


def replace_file(path: str | Path, content: str | bytes) -> None:
    """Write `content` (text as UTF-8) to `path` atomically: temporary file, fsync, rename."""
    path = Path(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    if path.exists() and path.read_bytes() == data:
        return
    with replace_atomically(path) as file:
        file.write(data)


@contextmanager
def replace_atomically(path: Path, temporary: Path | None = None) -> Iterator[BinaryIO]:
    """Yield a temporary file to write; on success it is synced and renamed to `path`.

    Args:
        path: final path.
        temporary: path while it is written; by default `partial_name` in the same directory.
    """
    temporary = temporary or path.with_name(partial_name(path.name))
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            # Before the rename: a file system may store the new name before the data, and a power
            # failure would then leave an empty file under the final name.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    # Also on KeyboardInterrupt, which is not an Exception.
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # Outside the `try`: the rename has happened, so there is no temporary file to remove.
    sync_directory(path.parent)


def partial_name(name: str) -> str:
    """Return the name of the temporary file that `replace_file` writes before renaming it."""
    return f".{name}.partial"


def sync_directory(path: Path) -> None:
    """Make new file names in a directory durable (fsync), where the system supports it."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:  # Windows cannot open directories; a rename is as durable as it gets
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_bytes(path: Path, what: str) -> bytes:
    """Return the contents of `path`.

    Raises:
        DataError: the file cannot be read; the message says that `what` was expected.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read {str(path)!r} ({error.strerror}). Pass the path of {what}."
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`.

    Raises:
        DataError: the file cannot be read, or does not contain a JSON object.
    """
    try:
        content = json.loads(read_bytes(path, "a JSON file"))
    except ValueError as error:
        raise DataError(f"{str(path)!r} is not JSON ({error}). Download the file again.") from error
    if not isinstance(content, dict):
        raise DataError(
            f"{str(path)!r} contains a {type(content).__name__} (needed: a JSON object)."
        )
    return content
