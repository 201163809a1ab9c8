"""Journal of a `prepare` run: records the finished parts of each stage with their results.

A part's files are written to temporary names, synced and renamed; then one line with their hashes
is appended and synced. So after a kill at any instant, every recorded part is complete, and all
other parts run again. A line is valid as long as its key matches and its files are unchanged.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any, BinaryIO

from bmforge.errors import ConfigError
from bmforge.files import replace_atomically

__all__ = ["HashedFile", "Journal", "digest_file", "digest_files", "make_key", "write_hashed"]

_NAME = "journal.jsonl"
_PARTIAL = ".partial"

fcntl: Any
try:
    import fcntl
except ImportError:  # not available on Windows
    fcntl = None


def make_key(*parts: Any) -> str:
    """Return a hash of the inputs that a stage's result depends on; `parts` must be JSON data."""
    return blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def digest_file(path: Path) -> str:
    """Return the hash of a file's content, as recorded in the journal."""
    with path.open("rb") as file:
        return file_digest(file, lambda: blake2b(digest_size=16)).hexdigest()


def digest_files(folder: Path) -> dict[str, str]:
    """Return the hash of every file in a folder and its subfolders, by relative path."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): digest_file(path) for path in files}


class HashedFile:
    """Writable file that computes the hash of all bytes written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hash = file, blake2b(digest_size=16)

    def write(self, data: bytes) -> int:
        """Append bytes to the file."""
        self._hash.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        """Do nothing: compressors call this, but the file is synced once, when it is complete."""

    def hexdigest(self) -> str:
        """Return the hash of all bytes written."""
        return self._hash.hexdigest()


@contextmanager
def write_hashed(path: Path, files: dict[str, str]) -> Iterator[HashedFile]:
    """Open a file for writing; on success sync and rename it, and record its hash in `files`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A worker of a killed run may still be writing, so the name contains this process's id.
    beside = path.with_name(f"{path.name}.{os.getpid()}{_PARTIAL}")
    with replace_atomically(path, beside) as file:
        hashed = HashedFile(file)
        yield hashed
    files[path.name] = hashed.hexdigest()


class Journal:
    """Journal of a work directory, which is locked while the journal is open; a context manager.

    Args:
        work: work directory.
        for_reading: True to open read-only, without the lock.
        trusting: True to check only that recorded files exist, not their hashes.

    Raises:
        ConfigError: another process works in the directory.
    """

    def __init__(self, work: Path, *, for_reading: bool = False, trusting: bool = False) -> None:
        self.work, self._trusting = work, trusting
        self._found: dict[tuple[str, int], dict[str, Any]] = {}
        self._checked: set[Path] = set()
        self._file: BinaryIO | None = None
        path = work / _NAME
        lines = path.read_bytes() if path.exists() else b""
        if not for_reading:
            work.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
            self._lock()
            lines = path.read_bytes()
            complete = lines.rfind(b"\n") + 1  # a kill may leave an incomplete last line
            self._file.truncate(complete)
            lines = lines[:complete]
            for left in sorted(work.rglob(f"*{_PARTIAL}")):
                shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
        for line in lines.split(b"\n")[:-1]:
            try:
                record = json.loads(line)
                self._found[record["stage"], record["part"]] = record
            except (ValueError, KeyError, TypeError):
                continue  # a damaged line is ignored, so its part runs again

    def _lock(self) -> None:
        if fcntl is None or self._file is None:
            return
        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise ConfigError(
                f"another process is preparing a corpus in {str(self.work.parent)!r}. Wait until "
                "the process ends, or choose another directory."
            ) from error

    def find(self, stage: str, part: int, key: str) -> Any | None:
        """Return the recorded result of a part of a stage; None if unfinished or files changed."""
        record = self._found.get((stage, part))
        if record is None or record["key"] != key:
            return None
        folder = self.folder(stage)
        for name, digest in record["files"].items():
            if not self._is_whole(folder / name, digest):
                return None
        return record["result"]

    def _is_whole(self, path: Path, digest: str) -> bool:
        if path in self._checked:
            return True
        if not path.is_file() or (not self._trusting and digest_file(path) != digest):
            return False
        self._checked.add(path)
        return True

    def add(self, stage: str, part: int, key: str, files: Mapping[str, str], result: Any) -> None:
        """Record a finished part of a stage, with the hashes of its files and its result."""
        assert self._file is not None
        record = {"stage": stage, "part": part, "key": key, "files": dict(files), "result": result}
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._found[stage, part] = record
        self._checked -= {self.folder(stage) / name for name in files}

    def is_empty(self) -> bool:
        """Return True if no part is finished."""
        return not self._found

    def folder(self, stage: str) -> Path:
        """Return the folder that contains a stage's files."""
        return self.work / "stages" / stage

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._file is not None:
            self._file.close()
