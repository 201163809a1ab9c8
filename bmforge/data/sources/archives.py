"""Lists the members of .zip and .tar archives and reads each into memory."""

from __future__ import annotations

import bz2
import copy
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import BinaryIO

from bmforge.data.clean.drop import Drop
from bmforge.data.sources.record import ReadOptions, Record, Where, failed_record, show_name
from bmforge.errors import DataError

__all__ = [
    "UNREADABLE",
    "Member",
    "drop_member",
    "open_zip",
    "read_zip_member",
    "tar_members",
    "zip_members",
]

_MOST_MEMBERS = 1_000_000
_HIGHEST_RATIO = 100  # maximum compression ratio of large members
_LARGE_BYTES = 1 << 25
_LZMA_MEMORY_BYTES = 1 << 27  # the dictionary of LZMA's highest level has 64 MB
# Exceptions of the standard library for archives that are damaged or have another format.
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


def open_zip(stream: BinaryIO, where: Where) -> zipfile.ZipFile:
    """Open a zip archive.

    Raises:
        DataError: the archive is damaged.
    """
    try:
        return zipfile.ZipFile(stream)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise DataError(
            f"file {str(where)!r} is not a readable ZIP archive ({error}). Download it again, or "
            "remove it from the input."
        ) from error


def read_zip_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, most_bytes: int) -> bytes:
    """Read a member of a ZIP archive, up to a limit of `most_bytes` bytes.

    zipfile decompresses bzip2 and LZMA data without a limit, in which 1 kB may become 1 GB. So
    their compressed bytes are read, and decompressed here in steps.

    Raises:
        UNREADABLE: the member is damaged or encrypted, or its method is not supported.
    """
    if member.compress_type not in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        with archive.open(member) as part:
            return part.read(most_bytes)
    stored = copy.copy(member)
    stored.compress_type, stored.file_size = zipfile.ZIP_STORED, member.compress_size
    del stored.CRC
    with archive.open(stored) as part:
        packed = part.read()
    unpacker: bz2.BZ2Decompressor | lzma.LZMADecompressor = bz2.BZ2Decompressor()
    if member.compress_type == zipfile.ZIP_LZMA:
        # PKWARE's APPNOTE 5.8.8: version (2 bytes), size of the properties (2), properties (5).
        # An .lzma file has the properties, the size (8; -1: the data have an end mark), the data.
        size = -1 if member.flag_bits & 2 else member.file_size
        packed = packed[4:9] + size.to_bytes(8, "little", signed=True) + packed[9:]
        unpacker = lzma.LZMADecompressor(lzma.FORMAT_ALONE, memlimit=_LZMA_MEMORY_BYTES)
    most_bytes = min(most_bytes, member.file_size)  # the stated size, as for other methods
    raw = unpacker.decompress(packed, most_bytes)
    is_whole = most_bytes == member.file_size
    if len(raw) < most_bytes or (is_whole and zlib.crc32(raw) != member.CRC):
        raise zipfile.BadZipFile(f"the compressed data of {member.filename!r} is damaged")
    return raw


def zip_members(stream: BinaryIO, where: Where, options: ReadOptions) -> Iterator[Member]:
    """Yield the name of each file in a zip archive, with its stream or an error record."""
    archive = open_zip(stream, where)
    archive_bytes, total = stream.seek(0, io.SEEK_END), 0
    for count, member in enumerate(archive.infolist()):
        if 0 <= where.end <= count:  # end of the range
            return
        total += member.file_size
        if member.is_dir() or count < where.line - 1:
            continue
        if count >= _MOST_MEMBERS:
            yield "", drop_member(where, "archive_members", count, _MOST_MEMBERS)
            return
        name, size = member.filename, member.file_size
        inside = replace(where, inside=_join(where, name))
        ratio = size / max(member.compress_size, 1)
        if member.flag_bits & 1:
            yield name, drop_member(inside, "archive_encrypted", name, None, size)
        elif size > where.budget_bytes:
            yield name, drop_member(inside, "archive_size", size, where.budget_bytes, size)
        elif total > max(_LARGE_BYTES, _HIGHEST_RATIO * archive_bytes):
            # The directory may list the same compressed data many times.
            total_ratio = total / max(archive_bytes, 1)
            yield name, drop_member(inside, "archive_ratio", total_ratio, _HIGHEST_RATIO, size)
        elif size > _LARGE_BYTES and ratio > _HIGHEST_RATIO:
            yield name, drop_member(inside, "archive_ratio", ratio, _HIGHEST_RATIO, size)
        else:
            read = partial(read_zip_member, archive, member, where.budget_bytes + 1)
            yield name, _open(read, inside)


def tar_members(stream: BinaryIO, where: Where, options: ReadOptions) -> Iterator[Member]:
    """Yield the name and stream of each regular file in a tar archive; links are skipped."""
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for count, member in enumerate(archive, where.line - 1):
                if 0 <= where.end <= member.offset:  # end of the range
                    return
                if count >= _MOST_MEMBERS:
                    yield "", drop_member(where, "archive_members", count, _MOST_MEMBERS)
                    return
                name, size = member.name, member.size
                inside = replace(where, inside=_join(where, name))
                if member.isfile() and size > where.budget_bytes:
                    yield name, drop_member(inside, "archive_size", size, where.budget_bytes, size)
                elif member.isfile():
                    yield name, _open(partial(_read_tar_member, archive, member, inside), inside)
                elif not member.isdir():
                    rule = "archive_link" if member.islnk() or member.issym() else "archive_special"
                    yield name, drop_member(inside, rule, name)
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"file {str(where)!r} is damaged, or is not a tar archive ({error}). Download it "
            "again, or remove it from the input."
        ) from error


def _join(where: Where, name: str) -> str:
    return f"{where.inside}/{show_name(name)}" if where.inside else show_name(name)


def _read_tar_member(archive: tarfile.TarFile, member: tarfile.TarInfo, inside: Where) -> bytes:
    with archive.extractfile(member) as part:  # type: ignore[union-attr]
        return part.read(inside.budget_bytes + 1)


def _open(read: Callable[[], bytes], inside: Where) -> BinaryIO | Record:
    """Read a member into memory; return an error record if it is larger than its header states."""
    try:
        raw = read()
    except UNREADABLE as error:
        return failed_record(
            inside.whole(),
            0,
            DataError(
                f"{inside} cannot be read ({error}). Download the archive again, or remove it from "
                "the input."
            ),
        )
    if len(raw) > inside.budget_bytes:
        return drop_member(inside, "archive_size", len(raw), inside.budget_bytes, len(raw))
    return io.BufferedReader(io.BytesIO(raw))  # type: ignore[arg-type]


def drop_member(
    where: Where, rule: str, value: float | str, bound: float | None = None, size_bytes: int = 0
) -> Record:
    """Return a record that counts an archive member as dropped, with its size."""
    shown = show_name(value) if isinstance(value, str) else value  # a name, or a part of one
    return Record(where.whole(), size_bytes, lambda: Drop(rule, shown, bound, str(where)))
