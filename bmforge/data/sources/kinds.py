"""Table of the supported file formats, which are detected by first bytes, then by name."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import BinaryIO

from bmforge.data.sources.archives import (
    Member,
    drop_member,
    open_zip,
    tar_members,
    zip_members,
)
from bmforge.data.sources.books import read_epub
from bmforge.data.sources.encoding import SAMPLE_BYTES, detect_encoding
from bmforge.data.sources.html import read_html
from bmforge.data.sources.lines import (
    read_json,
    read_jsonl,
    read_notebook,
    read_subtitles,
    read_text_file,
)
from bmforge.data.sources.office import (
    office_kind,
    read_docx,
    read_open_document,
    read_pptx,
    read_xlsx,
)
from bmforge.data.sources.packed import decompress_stream, inner_name, packing_of
from bmforge.data.sources.pdf import read_pdf
from bmforge.data.sources.record import Reader, ReadOptions, Record, Where, failed_record, show_name
from bmforge.data.sources.tables import read_arrow, read_csv, read_parquet, read_tsv
from bmforge.data.sources.warc import read_arc, read_warc
from bmforge.errors import BmforgeError, DataError

__all__ = ["SOURCES", "FormatReader", "kind_of", "read_stream"]

_HEAD_BYTES = 1024
_COUNT_BYTES = 1 << 20
_DEEPEST = 6  # maximum nesting of archives and compressions; a .tar.gz has both
_TAR_MAGIC = 257, b"ustar"


@dataclass(frozen=True)
class FormatReader:
    """Description of a file format and its reader.

    Attributes:
        suffixes: file name suffixes of the format.
        magic: first bytes that identify the format, whatever the file's name.
        read: function that yields the records; None for an archive.
        members: function that yields the members of an archive, each of which is read in turn.
        in_memory: True if the reader needs random access, so that a compressed file is decompressed
            in memory.
        unpacks: compression suffix that the reader handles itself, record by record.
    """

    suffixes: tuple[str, ...]
    magic: tuple[bytes, ...] = ()
    read: Reader | None = None
    members: Callable[[BinaryIO, Where, ReadOptions], Iterator[Member]] | None = None
    in_memory: bool = False
    unpacks: str = ""


_CODE = (
    "py pyi js mjs jsx ts tsx java kt kts scala c h cc cpp cxx hpp hh cs go rs rb php pl pm lua r "
    "jl m swift dart hs ml mli ex exs erl clj lisp el sh bash zsh ps1 bat sql css scss cu cuh f90 "
    "f95 pas vb asm cmake mk gradle proto graphql tf nix yaml yml toml ini cfg"
)
CODE_SUFFIXES = tuple(f".{name}" for name in _CODE.split())

SOURCES: dict[str, FormatReader] = {
    "text": FormatReader((".txt", ".md", ".markdown", ".rst", ".tex"), read=read_text_file),
    "code": FormatReader(CODE_SUFFIXES, read=read_text_file),
    "subtitles": FormatReader((".srt", ".vtt"), read=read_subtitles),
    "notebook": FormatReader((".ipynb",), read=read_notebook),
    "json": FormatReader((".json",), read=read_json),
    "jsonl": FormatReader((".jsonl", ".ndjson"), read=read_jsonl),
    "csv": FormatReader((".csv",), read=read_csv),
    "tsv": FormatReader((".tsv",), read=read_tsv),
    "html": FormatReader((".html", ".htm", ".xhtml"), read=read_html),
    "parquet": FormatReader((".parquet",), (b"PAR1",), read_parquet, in_memory=True),
    "arrow": FormatReader((".arrow",), (b"ARROW1",), read_arrow, in_memory=True),
    "pdf": FormatReader((".pdf",), (b"%PDF-",), read_pdf),
    "warc": FormatReader((".warc", ".wet"), (b"WARC/",), read_warc, unpacks=".gz"),
    "arc": FormatReader((".arc",), (b"filedesc:",), read_arc),
    "epub": FormatReader((".epub",), read=read_epub),
    "docx": FormatReader((".docx",), read=read_docx),
    "pptx": FormatReader((".pptx",), read=read_pptx),
    "xlsx": FormatReader((".xlsx",), read=read_xlsx),
    "odf": FormatReader((".odt", ".ods", ".odp"), read=read_open_document),
    "zip": FormatReader(
        (".zip",), (b"PK\x03\x04", b"PK\x05\x06"), members=zip_members, in_memory=True
    ),
    "tar": FormatReader((".tar",), members=tar_members),
}
_BY_SUFFIX = {suffix: kind for kind, source in SOURCES.items() for suffix in source.suffixes}
_ZIP_KINDS = ("epub", "docx", "pptx", "xlsx", "odf")
_PAGES = (b"<!doctype html", b"<html")
_APPLE_DOUBLE = b"\x00\x05\x16\x07"  # RFC 1740; macOS archives have one for each file, ._NAME


def kind_of(head: bytes, name: str) -> str:
    """Return the format of an uncompressed stream: a key of `SOURCES`, or "" if unknown.

    Args:
        head: first bytes of the stream, as many as are available.
        name: name of the file or member, with or without a compression suffix.
    """
    if head.startswith(_APPLE_DOUBLE):
        return ""
    known_kind = _BY_SUFFIX.get(PurePosixPath(inner_name(name)).suffix, "")
    if known_kind in _ZIP_KINDS and head.startswith(b"PK"):
        return known_kind
    for kind, source in SOURCES.items():
        if head.startswith(source.magic):
            return kind
    at, magic = _TAR_MAGIC
    if head[at:].startswith(magic):
        return "tar"
    if not known_kind and head.lstrip()[:20].lower().startswith(_PAGES):
        return "html"
    return known_kind


def read_stream(
    stream: BinaryIO, name: str, where: Where, options: ReadOptions, depth: int = 0
) -> Iterator[Record]:
    """Yield the records of a stream of any format; it may be compressed or an archive.

    Args:
        stream: buffered stream, whose first bytes can be peeked.
        name: file or member name.
        where: location of the stream.
        options: reader options.
        depth: nesting depth of archives and compressions around the stream.

    Raises:
        DataError: the stream cannot be read, or only up to some point.
    """
    is_empty = True
    for record in _read_any(stream, name, where, options, depth):
        is_empty = False
        yield record
    if is_empty and where.end < 0:  # a range of a file may have no entry, but no file vanishes
        yield drop_member(where, "no_entries", 0, 1, 0)


def _read_any(
    stream: BinaryIO, name: str, where: Where, options: ReadOptions, depth: int
) -> Iterator[Record]:
    head = _peek(stream, _HEAD_BYTES)
    packing = packing_of(head, name)
    kind = kind_of(head, name)
    if packing and (kind == "" or SOURCES[kind].unpacks != packing):
        if depth >= _DEEPEST:
            yield drop_member(where, "archive_depth", depth, _DEEPEST, _count_bytes(stream))
            return
        budget = where.budget_bytes if depth else 0
        inner = decompress_stream(stream, packing, str(where), budget)
        yield from read_stream(inner, inner_name(name), where, options, depth + 1)
        return
    if kind == "":
        suffix, size = PurePosixPath(name).suffix, _count_bytes(stream)
        yield drop_member(where, "unknown_kind", suffix, None, size)
        return
    if SOURCES[kind].in_memory and not (depth == 0 and stream.seekable()):
        raw = stream.read(where.budget_bytes + 1)
        if len(raw) > where.budget_bytes:
            yield drop_member(where, "archive_size", len(raw), where.budget_bytes, len(raw))
            return
        stream = io.BufferedReader(io.BytesIO(raw))  # type: ignore[arg-type]
    if kind == "zip" and (office := office_kind(open_zip(stream, where))):
        kind = office
        stream.seek(0)
    source = SOURCES[kind]
    if source.read is not None:
        if kind in ("jsonl", "csv", "tsv") and not where.encoding:
            detected = detect_encoding(_peek(stream, SAMPLE_BYTES))
            where = replace(where, encoding="" if detected == "utf-8" else detected)
        yield from source.read(stream, where, options)
        return
    if depth >= _DEEPEST:
        yield drop_member(where, "archive_depth", depth, _DEEPEST, _count_bytes(stream))
        return
    yield from _read_members(stream, source, where, options, depth)


def _read_members(
    stream: BinaryIO, source: FormatReader, where: Where, options: ReadOptions, depth: int
) -> Iterator[Record]:
    """Yield the records of each archive member; a damaged member does not affect others."""
    assert source.members is not None
    for member, content in source.members(stream, where, options):
        if isinstance(content, Record):
            yield content
            continue
        shown = show_name(member)
        inside = f"{where.inside}/{shown}" if where.inside else shown
        member_where = Where(where.source, inside, budget_bytes=where.budget_bytes)
        size_bytes = content.seek(0, io.SEEK_END)
        content.seek(0)
        try:
            for record in read_stream(content, member, member_where, options, depth + 1):
                size_bytes = 0  # the size of what follows this record is unknown
                yield record
        except DataError as error:
            yield failed_record(member_where.whole(), size_bytes, error)
        except BmforgeError:
            raise
        except Exception as error:  # a parser may stumble over a damaged member in any way
            failure = DataError(
                f"{member_where} cannot be read ({type(error).__name__}: {error}). Remove the "
                "file from the input."
            )
            yield failed_record(member_where.whole(), size_bytes, failure)


def _count_bytes(stream: BinaryIO) -> int:
    """Read a stream to its end and return the number of bytes."""
    count = 0
    while chunk := stream.read(_COUNT_BYTES):
        count += len(chunk)
    return count


def _peek(stream: BinaryIO, size: int) -> bytes:
    return stream.peek(size)[:size]  # type: ignore[attr-defined]
