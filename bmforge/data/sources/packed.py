"""Decompresses gz, bz2, xz and zst streams while reading."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from pathlib import Path
from typing import Any, BinaryIO

from bmforge.errors import MissingDependencyError

__all__ = ["PACKED", "inner_name", "open_unpacked", "packing_of", "decompress_stream"]

PACKED = (".gz", ".bz2", ".xz", ".zst")
_MAGIC = {
    ".gz": b"\x1f\x8b",
    ".bz2": b"BZh",
    ".xz": b"\xfd7zXZ\x00",
    ".zst": b"\x28\xb5\x2f\xfd",
}
_CHUNK_BYTES = 1 << 20
_HIGHEST_RATIO = 100  # maximum compression ratio of large streams; text compresses far less
_LARGE_BYTES = 1 << 25


def inner_name(name: str) -> str:
    """Return a file's name without its compression suffix: ``a.txt`` for ``a.txt.gz``."""
    name = name.lower()
    if name.endswith(".tgz"):
        return name.removesuffix(".tgz") + ".tar"
    for packed in PACKED:
        name = name.removesuffix(packed)
    return name


def packing_of(head: bytes, name: str) -> str:
    """Detect a stream's compression by its first bytes, then its name; "" if uncompressed."""
    for suffix, magic in _MAGIC.items():
        if head.startswith(magic):
            return suffix
    return next((suffix for suffix in PACKED if name.lower().endswith(suffix)), "")


def decompress_stream(stream: BinaryIO, packing: str, name: str, most_bytes: int = 0) -> BinaryIO:
    """Return a stream of the decompressed bytes.

    Reading raises `OSError` if the compression ratio is implausible for text, or if the output
    exceeds `most_bytes` (0: no limit).
    """
    raw: Any
    if packing == ".gz":
        raw = gzip.GzipFile(fileobj=stream)
    elif packing == ".bz2":
        raw = bz2.BZ2File(stream)
    elif packing == ".xz":
        raw = lzma.LZMAFile(stream)  # noqa: SIM115
    else:
        raw = io.BufferedReader(_ZstdReader(stream, name))
    return io.BufferedReader(_RatioLimitedStream(raw, stream, most_bytes), _CHUNK_BYTES)  # type: ignore[return-value]


def open_unpacked(path: Path) -> BinaryIO:
    """Open a file for reading; compressed files are decompressed according to their name."""
    file = io.BufferedReader(io.FileIO(path))
    packing = packing_of(b"", path.name)
    return decompress_stream(file, packing, str(path)) if packing else file  # type: ignore[return-value]


class _RatioLimitedStream(io.RawIOBase):
    """Decompressed stream that fails if its output is implausibly large for its input."""

    def __init__(self, unpacked: Any, packed: BinaryIO, most_bytes: int) -> None:
        super().__init__()
        self._unpacked, self._packed, self._count_bytes = unpacked, packed, 0
        self._most_bytes = most_bytes

    def readable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the number of decompressed bytes read so far."""
        return self._count_bytes

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` with decompressed bytes; return 0 at the end."""
        try:
            # Unlike read, read1 returns the data in front of a truncation before it raises.
            data = self._unpacked.read1(len(buffer))
        except lzma.LZMAError as error:
            raise OSError(f"the file contains damaged xz data ({error})") from error
        buffer[: len(data)] = data
        self._count_bytes += len(data)
        allowed = max(_LARGE_BYTES, _HIGHEST_RATIO * self._packed.tell())
        if self._count_bytes > allowed:
            raise OSError(
                f"the decompressed file is more than {_HIGHEST_RATIO} times larger than "
                "the compressed file (a decompression bomb)"
            )
        if 0 < self._most_bytes < self._count_bytes:
            raise OSError(
                f"a member of the archive decompresses to more than {self._most_bytes} bytes (a "
                "decompression bomb)"
            )
        return len(data)

    def close(self) -> None:
        """Close the underlying streams."""
        if not self.closed:
            self._unpacked.close()
            self._packed.close()
        super().close()


class _ZstdReader(io.RawIOBase):
    """Decompressed stream of one or more zstd frames.

    Unlike the reader of the library zstandard, it raises an error if the input is truncated.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        super().__init__()
        try:
            import zstandard
        except ImportError as error:
            raise MissingDependencyError("zstandard", "data", f"reading {name}") from error
        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._error = zstandard.ZstdError
        self._frame: Any = None
        self._packed = b""
        self._plain = b""
        self._file = file

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` with decompressed bytes; return 0 at the end."""
        while not self._plain:
            self._packed = self._packed or self._file.read(_CHUNK_BYTES)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("the last zstd frame is truncated")
                return 0
            self._frame = self._frame or self._new_frame()
            try:
                self._plain = self._frame.decompress(self._packed)
            except self._error as error:
                raise OSError(f"the file contains damaged zstd data ({error})") from error
            self._packed = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        taken = min(len(buffer), len(self._plain))
        buffer[:taken] = self._plain[:taken]
        self._plain = self._plain[taken:]
        return taken

    def close(self) -> None:
        """Close the underlying file."""
        self._file.close()
        super().close()
