"""Stores crawled pages in a web archive, and the outcome of each URL in a journal.

A page is written and synced, then recorded in the journal with the end offset of its record. When
an interrupted crawl continues, bytes after the last recorded end are truncated, and unrecorded URLs
are requested again.
"""

from __future__ import annotations

import gzip
import json
import os
import uuid
from base64 import b32encode
from hashlib import sha1
from pathlib import Path
from typing import Any, BinaryIO

from bmforge.data.collect.fetch import Response
from bmforge.errors import ConfigError, DataError

__all__ = ["Archive"]

_PAGES, _JOURNAL = "pages.warc.gz", "collected.jsonl"

fcntl: Any
try:
    import fcntl
except ImportError:  # not available on Windows
    fcntl = None


class Archive:
    """Web archive with a journal, in one directory; use as a context manager.

    Attributes:
        known: dict from URL to its last journal record.

    Raises:
        ConfigError: another process writes to the archive.
        DataError: the journal is damaged, or the archive is shorter than recorded.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.known: dict[str, dict[str, Any]] = {}
        self._journal: BinaryIO = (folder / _JOURNAL).open("ab")
        try:
            self._lock(folder)
            end = self._read_journal(folder / _JOURNAL)
            self._pages = (folder / _PAGES).open("ab")
            if self._pages.tell() < end:
                raise DataError(
                    f"{str(folder / _PAGES)!r} has {self._pages.tell()} bytes, but its journal "
                    f"lists {end}, so the file was truncated or replaced. Collect into another "
                    "directory."
                )
            self._pages.truncate(end)
        except BaseException:
            self._journal.close()
            raise

    def _lock(self, folder: Path) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._journal.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"another process is collecting pages in {str(folder)!r}. Wait until the "
                "process ends, or choose another directory."
            ) from error

    def _read_journal(self, path: Path) -> int:
        """Load the journal; return the end offset of the last archived page."""
        lines = path.read_bytes()
        complete = lines.rfind(b"\n") + 1
        self._journal.truncate(complete)
        end = 0
        try:
            for line in lines[:complete].splitlines():
                record = json.loads(line)
                self.known[record["url"]] = record
                end = max(end, int(record["end"]))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{str(path)!r} is not the journal of a collection ({error}). Collect into "
                "another directory."
            ) from error
        return end

    def add_page(self, url: str, response: Response, date: str) -> None:
        """Append a response to the archive as a separately compressed WARC record."""
        block = response.head + response.body
        head = (
            "WARC/1.1\r\nWARC-Type: response\r\n"
            f"WARC-Target-URI: {url}\r\nWARC-Date: {date}\r\n"
            f"WARC-Record-ID: <urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'{date} {url}')}>\r\n"
            f"WARC-Block-Digest: sha1:{_digest(block)}\r\n"
            f"WARC-Payload-Digest: sha1:{_digest(response.body)}\r\n"
            "Content-Type: application/http; msgtype=response\r\n"
            f"Content-Length: {len(block)}\r\n\r\n"
        )
        self._pages.write(gzip.compress(head.encode() + block + b"\r\n\r\n", mtime=0))
        _sync(self._pages)

    def note(self, url: str, outcome: str, **metadata: Any) -> None:
        """Record the outcome of a URL, and metadata, in the journal."""
        record = {"url": url, "outcome": outcome, "end": self._pages.tell(), **metadata}
        self._journal.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        _sync(self._journal)
        self.known[url] = record

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pages.close()
        self._journal.close()


def _digest(data: bytes) -> str:
    return b32encode(sha1(data).digest()).decode()


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
