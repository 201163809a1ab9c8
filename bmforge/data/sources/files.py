"""Reads documents from files of every format in `kinds.py`, one at a time.

A bad file or line raises a `DataError` that names it; with ``skip_bad=True`` it is counted and
skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bmforge.data.clean.drop import Drop
from bmforge.data.sources.document import Document
from bmforge.data.sources.file_ranges import read_part
from bmforge.data.sources.kinds import SOURCES, kind_of, read_stream
from bmforge.data.sources.packed import PACKED
from bmforge.data.sources.record import ReadOptions, Record, Where, show_name
from bmforge.errors import BmforgeError, DataError
from bmforge.files import refuse_pipe
from bmforge.logging import get_logger

__all__ = [
    "SOURCES",
    "SkipCount",
    "advise_skipping",
    "list_files",
    "parse_record",
    "python_topics",
    "read_documents",
    "read_records",
]

_SUFFIXES = tuple(suffix for source in SOURCES.values() for suffix in source.suffixes)
_HEAD_BYTES = 1024
_KEPT_MESSAGES = 5
_LEAST_BUDGET = 1 << 25
_MOST_BUDGET = 1 << 30
_HIGHEST_RATIO = 100


@dataclass
class SkipCount:
    """Number of skipped lines and files, and the first few error messages."""

    count: int = 0
    messages: list[str] = field(default_factory=list)

    def add(self, message: str) -> None:
        """Count a skipped entry, and store its error message if it is among the first few."""
        self.count += 1
        if len(self.messages) < _KEPT_MESSAGES:
            self.messages.append(message)


def read_documents(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    skip_bad: bool = False,
    text_field: str = "text",
    errors: str = "replace",
    encoding: str = "",
    skipped: SkipCount | None = None,
) -> Iterator[Document]:
    """Yield every document in `paths`, files in order, directories recursively and sorted.

    The unit of a document depends on the format: a whole text or page, a line of .jsonl, a row of a
    table, a record of a web archive. Any file may be compressed or in an archive. A path that does
    not exist is an error even with `skip_bad`.

    Args:
        paths: files and directories.
        skip_bad: True to skip damaged entries, count them, and report the count at the end.
        text_field: field of a .jsonl line that contains the text.
        errors: "replace" to decode single invalid bytes as U+FFFD, "strict" to raise an error.
        encoding: encoding of files that are not UTF-8 (default: the declared or detected one).
        skipped: counter to update (default: a new one).

    Raises:
        DataError: a file is missing, empty, binary, not UTF-8 or damaged, or a line does not parse.
        MissingDependencyError: a .zst file is read, and zstandard is not installed.
    """
    count = SkipCount() if skipped is None else skipped
    before = count.count
    options = ReadOptions(text_field, errors=errors, encoding=encoding)
    for path in list_files(paths):
        try:
            for record in read_records(path, options):
                yield from _parse(record, count if skip_bad else None)
        except DataError as error:
            if not skip_bad:
                raise advise_skipping(error) from error
            count.add(str(error))
    if count.count > before:
        lines = "".join(f"\n  {message}" for message in count.messages)
        get_logger().warning("skipped %d invalid lines or files:%s", count.count - before, lines)


def _parse(record: Record, skipped: SkipCount | None) -> Iterator[Document]:
    """Yield the document of a record; a bad record is counted in `skipped`, if given."""
    try:
        parsed = parse_record(record)
    except DataError as error:
        if skipped is None:
            raise
        skipped.add(str(error))
        return
    if isinstance(parsed, Document):
        yield parsed


def list_files(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    unread: list[Path] | None = None,
) -> list[Path]:
    """List the input files in paths and directories, in reading order.

    Args:
        paths: files and directories.
        unread: list to which files of unsupported formats in the directories are added.

    Raises:
        DataError: a path does not exist, contains no input file, or has an unknown suffix.
    """
    named = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not named:
        raise DataError("the list of inputs is empty. Pass at least one file or directory.")
    files: list[Path] = []
    for path in map(Path, named):
        if str(path).startswith(("http:/", "https:/")) and not path.exists():
            url = str(path).replace(":/", "://", 1)  # a Path has no double slashes
            raise DataError(
                f"input {url!r} is a URL. Collect pages with bmforge data collect {url} --out "
                "DIRECTORY, or download the file, and pass the result."
            )
        refuse_pipe(path)
        if path.is_dir():
            files += _walk(path, [] if unread is None else unread)
        elif not path.exists():
            raise DataError(f"input {str(path)!r} does not exist. Check the path.")
        elif not _is_input(path):
            raise DataError(
                f"input {str(path)!r} has an unknown suffix (supported: "
                f"{', '.join(_SUFFIXES)}, optionally followed by {' or '.join(PACKED)}). "
                "Rename or convert the file."
            )
        else:
            files.append(path)
    return files


def python_topics() -> Iterator[Document]:
    """Yield a demo corpus: the topics of Python's `help()` (465 kB of English), sorted by name."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield Document(topics[name], f"pydoc_data.topics/{name}")


def _walk(directory: Path, unread: list[Path]) -> list[Path]:
    """Return the input files below `directory`, linked folders included, sorted.

    Files of other formats, pipes and broken links are added to `unread`, except hidden ones.
    """
    paths: list[Path] = []
    seen: set[tuple[int, int]] = set()
    for folder, folders, names in os.walk(directory, followlinks=True, onerror=_raise_unlistable):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:  # a link to a folder that is already listed
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths += [Path(folder, name) for name in names if not name.startswith(".")]
    files: list[Path] = []
    for path in sorted(paths):
        (files if path.is_file() and _is_input(path) else unread).append(path)
    if not files:
        raise DataError(
            f"directory {str(directory)!r} contains no input file (needed: files ending in "
            f"{', '.join(_SUFFIXES)}, also compressed as {' or '.join(PACKED)})."
        )
    return files


def _raise_unlistable(error: OSError) -> None:
    raise DataError(
        f"directory {error.filename!r} cannot be listed ({error.strerror}). Check its permissions."
    ) from error


def _is_input(path: Path) -> bool:
    """Return True if a file has a supported format, judged by its name or else its first bytes."""
    if kind_of(b"", path.name):
        return True
    try:
        with path.open("rb") as file:
            return bool(kind_of(file.read(_HEAD_BYTES), path.name))
    except OSError:
        return False


def read_records(
    path: Path, options: ReadOptions, *, begin: int = 0, end: int = -1, line: int = 1
) -> Iterator[Record]:
    """Yield the records of one file, or of a range of it.

    Args:
        path: path of the file.
        options: reader options.
        begin, end: range in decompressed bytes at line ends, or in rows (`file_ranges.Parts`); -1
            for the end of the file.
        line: number of the line or row at `begin`.

    Raises:
        DataError: the file cannot be read, or only up to some point.
    """
    try:
        with path.open("rb") as stream:
            # Limit files unpacked in memory, as a decompression bomb could exhaust it.
            budget = min(max(_LEAST_BUDGET, _HIGHEST_RATIO * path.stat().st_size), _MOST_BUDGET)
            where = Where(show_name(str(path)), end=end, line=line, budget_bytes=budget)
            if begin:
                yield from read_part(stream, path, options, begin, where)
            else:
                yield from read_stream(stream, path.name, where, options)
    except BmforgeError:
        raise
    except Exception as error:  # a parser may stumble over a damaged file in any way
        raise DataError(
            f"file {str(path)!r} cannot be read ({type(error).__name__}: {error}). Check its "
            "permissions, and whether it was copied completely."
        ) from error


def parse_record(record: Record) -> Document | Drop:
    """Parse a record into a document, or into a `Drop` with the reason why it has no document.

    Raises:
        DataError: the entry is damaged.
    """
    try:
        return record.parse()
    except BmforgeError:
        raise
    except Exception as error:
        raise DataError(
            f"the entry at {record.place} cannot be read ({type(error).__name__}: {error}). "
            "Correct or remove it."
        ) from error


def advise_skipping(error: DataError) -> DataError:
    """Return the error for damaged input with a hint at the option that skips such input."""
    return DataError(f"{error} To skip damaged input, set skip_bad=True (--skip-bad).")
