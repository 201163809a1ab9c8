"""Splits archives at the boundaries of members (.zip, .tar) or of records (web archives)."""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from bmforge.data.sources.archives import UNREADABLE
from bmforge.data.sources.kinds import read_stream
from bmforge.data.sources.record import ReadOptions, Record, Where
from bmforge.data.sources.warc import list_records

__all__ = ["MEMBERS", "find_members", "read_members"]

MEMBERS = ("zip", "tar", "warc")  # kinds that are split at the boundaries of members or records
SplitOffsets = tuple[tuple[int, int], ...]


def find_members(path: Path, kind: str, every_bytes: int) -> tuple[SplitOffsets, int, int]:
    """Return the split offsets of an archive, its number of units, and its decompressed size.

    The units are members for .zip, which has a directory, and bytes for other formats. A damaged
    archive is not split, so that its reader reports the error.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if kind == "zip":
                sizes = [member.file_size for member in zipfile.ZipFile(file).infolist()]
                return _choose(enumerate(sizes), every_bytes), len(sizes), sum(sizes)
            if kind == "tar":
                return _choose(_tar_member_offsets(file), every_bytes), size, size
            places = list(list_records(file))
            total = sum(length for _, length in places)
            return _choose(places, every_bytes), size, total
    except UNREADABLE:
        return (), 0, 0


def _choose(places: Iterable[tuple[int, int]], every_bytes: int) -> SplitOffsets:
    """Choose where to split an archive; return (position, member number from 1) of each split.

    Args:
        places: position of each member (-1 if no split is possible there) and its size.
        every_bytes: approximate number of bytes between two splits.
    """
    offsets, member_bytes = [], 0
    for number, (position, size) in enumerate(places, 1):
        if position >= 0 and member_bytes and member_bytes + size > every_bytes:
            offsets.append((position, number))
            member_bytes = 0
        member_bytes += size
    return tuple(offsets)


def _tar_member_offsets(file: BinaryIO) -> Iterator[tuple[int, int]]:
    with tarfile.open(fileobj=file, mode="r:") as archive:
        for member in archive:
            if archive.pax_headers:  # global headers apply to all later members
                raise tarfile.TarError("the archive has a global header")
            yield member.offset, member.size + 2 * tarfile.BLOCKSIZE


def read_members(
    stream: BinaryIO, kind: str, where: Where, options: ReadOptions, begin: int
) -> Iterator[Record]:
    """Yield the records in a range of an archive.

    Args:
        stream: stream of the archive.
        kind: format of the archive.
        where: location, including the end of the range and the number of its first member.
        options: reader options.
        begin: position of the first member.
    """
    name = Path(where.source).name
    if kind == "zip":
        yield from read_stream(stream, name, where, options)
        return
    stream.seek(begin)
    if kind == "tar":  # offsets of a tar stream count from where it is opened
        where = replace(where, end=where.end - begin if where.end >= 0 else -1)
    yield from read_stream(stream, name, where, options)
