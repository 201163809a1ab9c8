"""Divides large files into ranges for shards, and reads one range of a file.

Text files are split at line ends; compressed ones at line ends of the decompressed data, so that
each range decompresses everything before it; Parquet between row groups; archives between members.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

from bmforge.data.sources.archive_ranges import MEMBERS, find_members, read_members
from bmforge.data.sources.encoding import SAMPLE_BYTES, detect_encoding
from bmforge.data.sources.kinds import SOURCES, kind_of
from bmforge.data.sources.lines import is_cut_by_bytes, is_json_lines, read_jsonl
from bmforge.data.sources.packed import decompress_stream, inner_name, packing_of
from bmforge.data.sources.record import ReadOptions, Record, Where
from bmforge.data.sources.tables import read_parquet

__all__ = ["LineSplitter", "Parts", "find_parts", "split_kind", "read_part"]

_HEAD_BYTES = 1024
_CHUNK_BYTES = 1 << 20
_LINES = ("jsonl", "json")
_MOST_PARTS = 16  # each range decompresses all earlier ones
SplitOffsets = tuple[tuple[int, int], ...]


class Parts(NamedTuple):
    """Offsets at which a file can be split.

    Attributes:
        at: pairs (offset of a split, number of the line, row or member that begins there); the
            offset is in decompressed bytes or rows, or a member's position.
        units: size of the whole file in decompressed bytes, rows, or members.
        size_bytes: decompressed size of the whole file.
    """

    at: SplitOffsets = ()
    units: int = 0
    size_bytes: int = 0


def split_kind(path: Path) -> str:
    """Return the kind of positions at which a file can be split, judged by its format.

    The result is ``"lines"``, ``"packed"`` (line ends of a compressed file), ``"rows"`` or
    ``"members"``; "" if the file cannot be split.
    """
    with path.open("rb") as file:
        head = file.read(SAMPLE_BYTES)
        packing, kind = packing_of(head, path.name), kind_of(head, path.name)
        if kind == "json" and not packing and not is_json_lines(head):
            return ""
        if kind in _LINES and not packing:
            return "lines" if is_cut_by_bytes(head) else ""
        if kind == "parquet" and not packing:
            return "rows"
        if kind in MEMBERS and packing in ("", SOURCES[kind].unpacks):
            return "members"
        if kind not in _LINES:
            return ""
        file.seek(0)
        try:
            inner = decompress_stream(file, packing, str(path)).read(SAMPLE_BYTES)
        except (OSError, EOFError, zlib.error):
            return ""
    name = inner_name(path.name)
    kind = kind_of(inner, name)
    lines = kind == "jsonl" or (kind == "json" and is_json_lines(inner))
    lines = lines and not packing_of(inner, name)
    return "packed" if lines and is_cut_by_bytes(inner) else ""


class LineSplitter:
    """Finds the first line end after every `every_bytes` bytes of a stream, chunk by chunk."""

    def __init__(self, every_bytes: int) -> None:
        self._every, self._wanted, self._line = every_bytes, every_bytes, 1
        self.offset = 0
        self._offsets: list[tuple[int, int]] = []

    def feed(self, chunk: bytes) -> None:
        """Search the next chunk of the stream for line ends."""
        start = 0
        while self._wanted < self.offset + len(chunk):
            end = chunk.find(b"\n", max(self._wanted - 1 - self.offset, start)) + 1
            if end == 0:
                break
            self._line += chunk.count(b"\n", start, end)
            self._offsets.append((self.offset + end, self._line))
            start, self._wanted = end, self.offset + end + self._every
        self._line += chunk.count(b"\n", start)
        self.offset += len(chunk)

    def split_offsets(self) -> SplitOffsets:
        """Return the offset and line number of each split, excluding the end of the stream."""
        return tuple(split for split in self._offsets if split[0] < self.offset)


def find_parts(path: Path, how: str, every_bytes: int) -> Parts:
    """Find the offsets at which to split a compressed text file (at most 16), Parquet, or archive.

    A damaged file is not split, so that its reader reports the error.
    """
    if how == "members":
        return Parts(*find_members(path, _kind(path), every_bytes))
    return _split_packed(path, every_bytes) if how == "packed" else _split_rows(path, every_bytes)


def _kind(path: Path) -> str:
    with path.open("rb") as file:
        return kind_of(file.read(_HEAD_BYTES), path.name)


def _split_packed(path: Path, every_bytes: int) -> Parts:
    splitter = LineSplitter(every_bytes)
    try:
        with path.open("rb") as file:
            packing = packing_of(file.peek(_HEAD_BYTES), path.name)
            stream = decompress_stream(file, packing, str(path))
            while chunk := stream.read(_CHUNK_BYTES):
                splitter.feed(chunk)
    except (OSError, EOFError, zlib.error):
        return Parts()
    offsets = splitter.split_offsets()
    step = -(-(len(offsets) + 1) // _MOST_PARTS)
    return Parts(offsets[step - 1 :: step], splitter.offset, splitter.offset)


def _split_rows(path: Path, every_bytes: int) -> Parts:
    try:
        import pyarrow.lib
        import pyarrow.parquet
    except ImportError:
        return Parts()
    try:
        with path.open("rb") as file:  # pyarrow needs names in UTF-8
            metadata = pyarrow.parquet.read_metadata(file)
    except (OSError, pyarrow.lib.ArrowException):
        return Parts()
    offsets, rows, part_bytes, size_bytes = [], 0, 0, 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        if part_bytes and part_bytes + group.total_byte_size > every_bytes:
            offsets.append((rows, rows + 1))
            part_bytes = 0
        rows, part_bytes = rows + group.num_rows, part_bytes + group.total_byte_size
        size_bytes += group.total_byte_size
    return Parts(tuple(offsets), rows, size_bytes)


def read_part(
    stream: BinaryIO, path: Path, options: ReadOptions, begin: int, where: Where
) -> Iterator[Record]:
    """Yield the records in a range of a file.

    Args:
        stream: stream of the whole file.
        path: path of the file.
        options: reader options.
        begin: start of the range in decompressed bytes, rows, or member positions.
        where: location, with the end of the range and the number of its first line, row or member.
    """
    how = split_kind(path)
    if how == "members":
        yield from read_members(stream, _kind(path), where, options, begin)
        return
    if how == "rows":
        yield from read_parquet(stream, where, options)
        return
    if how == "packed":
        head = stream.peek(_HEAD_BYTES)  # type: ignore[attr-defined]
        stream = decompress_stream(stream, packing_of(head, path.name), str(path))
    # Detect the encoding from the head of the file, so that all parts agree.
    detected = detect_encoding(stream.read(SAMPLE_BYTES) if how == "lines" else _peek(stream))
    if how == "lines":
        stream.seek(begin)
    else:
        _skip(stream, begin)
    where = replace(where, encoding=detected if detected != "utf-8" else "")
    yield from read_jsonl(stream, where, options)


def _peek(stream: BinaryIO) -> bytes:
    return stream.peek(SAMPLE_BYTES)[:SAMPLE_BYTES]  # type: ignore[attr-defined]


def _skip(stream: BinaryIO, count_bytes: int) -> None:
    while count_bytes:
        chunk = stream.read(min(_CHUNK_BYTES, count_bytes))
        if not chunk:
            raise EOFError("the file was truncated while it was being read")
        count_bytes -= len(chunk)
