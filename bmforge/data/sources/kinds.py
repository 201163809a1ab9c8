"""The table of what is read, and how a stream's kind is told: by its first bytes, then its name."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import BinaryIO

from bmforge.data.sources.archives import Member, drop_member, tar_members, zip_members
from bmforge.data.sources.books import read_docx, read_epub
from bmforge.data.sources.encoding import SAMPLE_BYTES, detect_encoding
from bmforge.data.sources.html import read_html
from bmforge.data.sources.lines import read_jsonl, read_text_file
from bmforge.data.sources.packed import inner_name, packing_of, unpack
from bmforge.data.sources.pdf import read_pdf
from bmforge.data.sources.record import Reader, ReadOptions, Record, Where, fail
from bmforge.data.sources.tables import read_arrow, read_csv, read_parquet, read_tsv
from bmforge.data.sources.warc import read_arc, read_warc
from bmforge.errors import BmforgeError, DataError

__all__ = ["SOURCES", "Source", "kind_of", "read_stream"]

_HEAD_BYTES = 1024
_DEEPEST = 4  # archives in archives
_TAR_MAGIC = 257, b"ustar"


@dataclass(frozen=True)
class Source:
    """How one kind of file is read.

    Attributes:
        suffixes: of names that say this kind.
        magic: first bytes that say it, whatever the name.
        read: yields the entries; None where `members` yields streams that are read in turn.
        in_memory: it must be read from any place, so a packed one is unpacked whole.
        unpacks: packed like this it unpacks itself, record by record.
    """

    suffixes: tuple[str, ...]
    magic: tuple[bytes, ...] = ()
    read: Reader | None = None
    members: Callable[[BinaryIO, Where, ReadOptions], Iterator[Member]] | None = None
    in_memory: bool = False
    unpacks: str = ""


SOURCES: dict[str, Source] = {
    "text": Source((".txt", ".md"), read=read_text_file),
    "jsonl": Source((".jsonl", ".ndjson"), read=read_jsonl),
    "csv": Source((".csv",), read=read_csv),
    "tsv": Source((".tsv",), read=read_tsv),
    "html": Source((".html", ".htm", ".xhtml"), read=read_html),
    "parquet": Source((".parquet",), (b"PAR1",), read_parquet, in_memory=True),
    "arrow": Source((".arrow",), (b"ARROW1",), read_arrow, in_memory=True),
    "pdf": Source((".pdf",), (b"%PDF-",), read_pdf),
    "warc": Source((".warc", ".wet"), (b"WARC/",), read_warc, unpacks=".gz"),
    "arc": Source((".arc",), (b"filedesc:",), read_arc),
    "epub": Source((".epub",), read=read_epub),
    "docx": Source((".docx",), read=read_docx),
    "zip": Source((".zip",), (b"PK\x03\x04", b"PK\x05\x06"), members=zip_members, in_memory=True),
    "tar": Source((".tar",), members=tar_members),
}
_BY_SUFFIX = {suffix: kind for kind, source in SOURCES.items() for suffix in source.suffixes}
_PAGES = (b"<!doctype html", b"<html")


def kind_of(head: bytes, name: str) -> str:
    """Return the kind of an unpacked stream: a key of `SOURCES`, or "" for none.

    Args:
        head: its first bytes, as many as are at hand.
        name: of the file or member, with what says that it is packed or without.
    """
    said = _BY_SUFFIX.get(PurePosixPath(inner_name(name)).suffix, "")
    if said in ("epub", "docx"):  # both are zip files
        return said
    for kind, source in SOURCES.items():
        if head.startswith(source.magic):
            return kind
    at, magic = _TAR_MAGIC
    if head[at:].startswith(magic):
        return "tar"
    if not said and head.lstrip()[:20].lower().startswith(_PAGES):
        return "html"
    return said


def read_stream(
    stream: BinaryIO, name: str, where: Where, options: ReadOptions, depth: int = 0
) -> Iterator[Record]:
    """Yield the entries of a stream of any kind, packed or not, archives member by member.

    Args:
        stream: buffered, so that its first bytes can be looked at.
        depth: of archives and packings around it.

    Raises:
        DataError: it cannot be read, or not any further.
    """
    head = _peek(stream, _HEAD_BYTES)
    packing = packing_of(head, name)
    kind = kind_of(head, name)
    if packing and (kind == "" or SOURCES[kind].unpacks != packing):
        if depth >= _DEEPEST:
            yield drop_member(where, "archive_depth", depth, _DEEPEST)
            return
        inner = unpack(stream, packing, str(where))
        yield from read_stream(inner, inner_name(name), where, options, depth + 1)
        return
    if kind == "":
        yield drop_member(where, "unknown_kind", PurePosixPath(name).suffix)
        return
    source = SOURCES[kind]
    if source.in_memory and not (depth == 0 and stream.seekable()):
        stream = io.BufferedReader(io.BytesIO(stream.read()))  # type: ignore[arg-type]
    if source.read is not None:
        if kind in ("jsonl", "csv", "tsv") and not where.encoding:
            found = detect_encoding(_peek(stream, SAMPLE_BYTES))
            where = replace(where, encoding="" if found == "utf-8" else found)
        yield from source.read(stream, where, options)
        return
    if depth >= _DEEPEST:
        yield drop_member(where, "archive_depth", depth, _DEEPEST)
        return
    assert source.members is not None
    for member, inside in source.members(stream, where, options):
        if isinstance(inside, Record):
            yield inside
            continue
        place = Where(where.source, f"{where.inside}/{member}" if where.inside else member)
        try:
            yield from read_stream(inside, member, place, options, depth + 1)
        except DataError as error:
            yield fail(place.whole(), 0, error)
        except BmforgeError:
            raise
        except Exception as error:  # a parser may stumble over a damaged member in any way
            said = DataError(f"{place} cannot be read ({type(error).__name__}: {error})")
            yield fail(place.whole(), 0, said)


def _peek(stream: BinaryIO, size: int) -> bytes:
    return stream.peek(size)[:size]  # type: ignore[attr-defined]
