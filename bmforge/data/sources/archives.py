"""Archives: the members of .zip and .tar, each read as what it is; nothing is written anywhere."""

from __future__ import annotations

import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import BinaryIO

from bmforge.data.clean.drop import Drop
from bmforge.data.sources.record import ReadOptions, Record, Where, fail
from bmforge.errors import DataError

__all__ = ["UNREADABLE", "Member", "drop_member", "tar_members", "zip_members"]

_MOST_MEMBERS = 1_000_000
_LARGEST_BYTES = 1 << 30
_HIGHEST_RATIO = 500  # of unpacked to packed, for what is large
_LARGE_BYTES = 1 << 26
# What the standard library raises where an archive or a member of it is damaged or of another kind.
UNREADABLE = (
    zipfile.BadZipFile,
    tarfile.TarError,
    lzma.LZMAError,
    zlib.error,
    OSError,
    EOFError,
    RuntimeError,
    NotImplementedError,
    ValueError,
)
Member = tuple[str, "BinaryIO | Record"]


def zip_members(stream: BinaryIO, where: Where, options: ReadOptions) -> Iterator[Member]:
    """Yield name and stream of each file of a zip archive, or the record that says why not."""
    try:
        archive = zipfile.ZipFile(stream)
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise DataError(f"file {str(where)!r} cannot be read as zip ({error})") from error
    for count, member in enumerate(archive.infolist()):
        if 0 <= where.end <= count:  # of a part
            return
        if member.is_dir() or count < where.line - 1:
            continue
        if count >= _MOST_MEMBERS:
            yield "", drop_member(where, "archive_members", count, _MOST_MEMBERS)
            return
        ratio = member.file_size / max(member.compress_size, 1)
        if member.flag_bits & 1:
            yield member.filename, drop_member(where, "archive_encrypted", member.filename)
        elif member.file_size > _LARGEST_BYTES:
            size = member.file_size
            yield member.filename, drop_member(where, "archive_size", size, _LARGEST_BYTES)
        elif member.file_size > _LARGE_BYTES and ratio > _HIGHEST_RATIO:
            yield member.filename, drop_member(where, "archive_ratio", ratio, _HIGHEST_RATIO)
        else:
            yield member.filename, _open(partial(archive.open, member), where, member.filename)


def tar_members(stream: BinaryIO, where: Where, options: ReadOptions) -> Iterator[Member]:
    """Yield name and stream of each file of a tar archive; links are no files."""
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for count, member in enumerate(archive, where.line - 1):
                if 0 <= where.end <= member.offset:  # of a part
                    return
                if count >= _MOST_MEMBERS:
                    yield "", drop_member(where, "archive_members", count, _MOST_MEMBERS)
                    return
                if member.islnk() or member.issym():
                    yield member.name, drop_member(where, "archive_link", member.name)
                elif member.isfile() and member.size > _LARGEST_BYTES:
                    yield (
                        member.name,
                        drop_member(where, "archive_size", member.size, _LARGEST_BYTES),
                    )
                elif member.isfile():
                    opener = partial(archive.extractfile, member)
                    yield member.name, _open(opener, where, member.name)
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"file {str(where)!r} cannot be read on as tar ({error})") from error


def _open(opener: Callable[[], object], where: Where, name: str) -> BinaryIO | Record:
    """Return what a member holds, in memory; it may not be larger than it says."""
    try:
        with opener() as member:  # type: ignore[attr-defined]
            raw = member.read(_LARGEST_BYTES + 1)
    except UNREADABLE as error:
        place = where.place(name)
        return fail(place, 0, DataError(f"{where.source}:{place} cannot be read ({error})"))
    if len(raw) > _LARGEST_BYTES:
        return drop_member(where, "archive_size", len(raw), _LARGEST_BYTES)
    return io.BufferedReader(io.BytesIO(raw))  # type: ignore[arg-type]


def drop_member(where: Where, rule: str, value: float | str, bound: float | None = None) -> Record:
    """Return the record of a member that is not read."""
    return Record(where.whole(), 0, lambda: Drop(rule, value, bound, str(where)))
