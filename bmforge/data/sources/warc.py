"""Reads web archives: WARC and WET, also compressed (per record or as a whole), and ARC."""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO

from bmforge.data.clean.drop import Drop
from bmforge.data.sources.document import Document
from bmforge.data.sources.encoding import decode
from bmforge.data.sources.html import parse_page
from bmforge.data.sources.lines import find_text
from bmforge.data.sources.metadata import read_metadata
from bmforge.data.sources.pdf import parse_pdf
from bmforge.data.sources.record import ReadOptions, Record, Where, failed_record
from bmforge.errors import DataError, MissingDependencyError

__all__ = ["list_records", "read_arc", "read_warc"]

_LARGEST_BYTES = 1 << 26  # maximum size of a record, and of a decompressed body
_CHUNK_BYTES = 1 << 20
_MEMBER = b"\x1f\x8b\x08"
_READ_TYPES = ("response", "resource", "conversion")
# Records that describe other records, or the crawl.
_OTHER_TYPES = ("warcinfo", "request", "metadata", "revisit", "continuation")
_JSON_TYPES = ("application/json", "application/ld+json", "application/x-ndjson")
_BINARY_TYPES = ("image/", "video/", "audio/", "font/")


def read_warc(stream: BinaryIO, where: Where, options: ReadOptions) -> Iterator[Record]:
    """Yield a record for each WARC response, resource and conversion that is not damaged."""
    _import(where)
    for number, (at, raw, error) in enumerate(_parts(stream), where.line):
        if 0 <= where.end <= at:  # end of the range
            return
        if error:
            failure = DataError(f"{where}, record {number}: {error}")
            yield failed_record(where.place(number), len(raw), failure)
        elif (kind := _kind(raw)) in _READ_TYPES:
            parse = partial(_parse_record, raw, where, number, options)
            yield Record(where.place(number), len(raw), parse)
        elif kind not in _OTHER_TYPES:
            drop = Drop("warc_type", kind, None, f"{where}, record {number}")
            yield Record(where.place(number), len(raw), partial(_return, drop))


def _return(drop: Drop) -> Drop:
    return drop


def list_records(stream: BinaryIO) -> Iterator[tuple[int, int]]:
    """Yield the position of each WARC record in the stream, and its decompressed length.

    A record that begins inside a compressed member has the position -1.
    """
    yield from ((at, len(raw)) for at, raw, _ in _parts(stream))


def _parts(stream: BinaryIO) -> Iterator[tuple[int, bytes, str]]:
    """Yield (position, bytes, error or "") of each WARC record."""
    packed = stream.peek(3)[:3] == _MEMBER  # type: ignore[attr-defined]
    return _members(stream) if packed else _plain_records(stream)


def _place(stream: BinaryIO, buffered: bytes) -> int:
    """Return the stream position of the first buffered byte; -1 if the stream is not seekable."""
    return stream.tell() - len(buffered) if stream.seekable() else -1


def _import(where: Where) -> Any:
    try:
        import fastwarc.warc
    except ImportError as error:
        raise MissingDependencyError("fastwarc", "data", f"reading {where}") from error
    return fastwarc.warc


def _header(lines: Iterable[bytes], header_name: bytes) -> str:
    """Return the value of a WARC header; "" if it is missing."""
    for line in lines:
        name, _, value = line.partition(b":")
        if name.strip().lower() == header_name:
            return value.strip().decode("utf-8", "replace")
    return ""


def _kind(raw: bytes) -> str:
    return _header(raw[: raw.find(b"\r\n\r\n")].split(b"\r\n"), b"warc-type").lower()


class _MemberReader(io.RawIOBase):
    """Decompresses one gzip member of a stream; keeps its compressed bytes for recovery."""

    def __init__(self, stream: BinaryIO, packed: bytes) -> None:
        super().__init__()
        self._stream, self._packed = stream, packed
        self._unpacker = zlib.decompressobj(31)
        self.tried = bytearray(packed)

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` with decompressed bytes; return 0 at the end of the member."""
        while not self._unpacker.eof:
            data = self._unpacker.decompress(self._packed, len(buffer))
            self._packed = self._unpacker.unconsumed_tail
            if data:
                buffer[: len(data)] = data
                return len(data)
            if not self._packed and not self._unpacker.eof:
                self._packed = self._stream.read(_CHUNK_BYTES)
                if not self._packed:
                    raise EOFError("the record is truncated")
                self.tried += self._packed
                del self.tried[:-_LARGEST_BYTES]
        return 0

    def rest(self) -> bytes:
        """Return bytes that were already read from the stream but belong to the next member."""
        return self._unpacker.unused_data


def _members(stream: BinaryIO) -> Iterator[tuple[int, bytes, str]]:
    """Yield the WARC records of each gzip member; after a damaged member, search for the next."""
    packed = b""
    while True:
        packed = (packed or stream.read(_CHUNK_BYTES)).lstrip(b"\0")
        if not packed:
            return
        at = _place(stream, packed)
        member = _MemberReader(stream, packed)
        try:
            for _, raw, error in _plain_records(io.BufferedReader(member)):  # type: ignore[arg-type]
                yield at, raw, error
                at = -1
            packed = member.rest()
        except EOFError as error:
            yield at, b"", str(error)
            return
        except zlib.error as error:
            yield at, b"", str(error)
            packed = _find_next(stream, bytes(member.tried[1:]))


def _find_next(stream: BinaryIO, buffered: bytes) -> bytes:
    """Skip damaged data; return the buffered bytes from the start of the next gzip member on."""
    while (at := buffered.find(_MEMBER)) < 0:
        more = stream.read(_CHUNK_BYTES)
        if not more:
            return b""
        buffered = buffered[-2:] + more
    return buffered[at:]


def _plain_records(stream: BinaryIO) -> Iterator[tuple[int, bytes, str]]:
    """Yield the WARC records of an uncompressed archive, using their stated lengths."""
    line = b""
    while True:
        line = line or stream.readline(_CHUNK_BYTES)
        if not line:
            return
        at = _place(stream, line)
        if not line.startswith(b"WARC/"):
            bad = line
            while line and not line.startswith(b"WARC/"):
                line = stream.readline(_CHUNK_BYTES)
            if bad.strip():
                yield at, bad, "what follows is no record"
            continue
        head = [line]
        while (line := stream.readline(_CHUNK_BYTES)).strip():
            head.append(line)
        stated = _header(head, b"content-length")
        length = int(stated) if stated.isdecimal() and stated.isascii() else -1
        raw = b"".join(line.rstrip(b"\r\n") + b"\r\n" for line in head) + b"\r\n"
        line = b""
        if not 0 <= length <= _LARGEST_BYTES:
            yield at, raw, f"its length is {stated!r}"
            while length > 0 and (skipped := stream.read(min(length, _CHUNK_BYTES))):
                length -= len(skipped)
            continue
        body = stream.read(length)
        raw += body
        if len(body) < length:
            yield at, raw, "it is cut off"
            continue
        after = stream.readline(_CHUNK_BYTES)
        if not after.strip():
            after = stream.readline(_CHUNK_BYTES)
        is_next = not after.strip() or after.startswith(
            b"WARC/"
        )  # some writers leave no blank line
        line = after if after.startswith(b"WARC/") else b""
        yield at, raw, "" if is_next else "its length is wrong"


def _parse_record(
    raw: bytes, where: Where, number: int, options: ReadOptions, default_kind: str = ""
) -> Document | Drop:
    """Parse a record; `default_kind` is the content type of a response that states none."""
    warc = _import(where)
    record_where = Where(where.source, where.place(number))
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    url = _header(lines, b"warc-target-uri")
    date = _header(lines, b"warc-date")[:10]
    length = _header(lines, b"content-length")
    body = body[: int(length)] if length.isdecimal() else body  # without the separator
    kind = _header(lines, b"content-type").partition(";")[0].strip().lower()
    charset, is_response = "", _kind(raw) == "response"
    try:
        if _header(lines, b"warc-block-digest"):
            record = next(iter(warc.ArchiveIterator(io.BytesIO(raw), parse_http=False)), None)
            if record is None or not record.verify_block_digest():
                raise DataError(
                    f"{record_where} is damaged: its content does not match its digest. Download "
                    "the file again."
                )
        # Some writers state another type, or none, so the block decides.
        if kind == "application/http" or (is_response and body.startswith(b"HTTP/")):
            record = next(iter(warc.ArchiveIterator(_as_response(body), parse_http=False)))
            record.parse_http(auto_decode="all")
            headers = record.http_headers
            has_status = headers is not None and body.startswith(b"HTTP/")
            status = headers.status_code if has_status else None
            if status != 200:
                return Drop("http_status", status, 200, url)
            kind = record.http_content_type or default_kind
            charset = record.http_charset or ""
            # Bodies are decompressed here with a limit, as a small one may expand without bound.
            body = record.reader.read(_LARGEST_BYTES + 1)
            if len(body) > _LARGEST_BYTES:
                return Drop("page_too_large", len(body), _LARGEST_BYTES, url)
        elif not kind and _kind(raw) == "conversion":
            kind = "text/plain"
    except (OSError, ValueError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{record_where} is damaged ({error}). Download the file again.") from error
    document = parse_payload(body, kind, charset, url, record_where, options)
    if isinstance(document, Drop) or document.date:
        return document
    return replace(document, url=document.url or url, date=date)


def _as_response(block: bytes) -> BinaryIO:
    """Return an HTTP response as a WARC record of the usual form, with CRLF in the HTTP headers."""
    end, usual_end = block.find(b"\n\n"), block.find(b"\r\n\r\n")
    if end >= 0 and not 0 <= usual_end < end:  # some servers end the lines with LF alone
        lines = block[:end].replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")
        block = lines + b"\r\n\r\n" + block[end + 2 :]
    head = (
        "WARC/1.0\r\nWARC-Type: response\r\nContent-Type: application/http; msgtype=response\r\n"
        f"Content-Length: {len(block)}\r\n\r\n"
    )
    return io.BytesIO(head.encode() + block + b"\r\n\r\n")


def parse_payload(
    body: bytes, kind: str, charset: str, url: str, where: Where, options: ReadOptions
) -> Document | Drop:
    """Parse the body of an HTTP response into a document, depending on its content type."""
    kind = kind.partition(";")[0].strip().lower()
    if kind.startswith(_BINARY_TYPES):
        return Drop("content_type", kind, None, url)
    if kind in ("text/html", "application/xhtml+xml") or _looks_like_page(body):
        return parse_page(body, where, options, charset=charset, url=url)
    if kind == "application/pdf" or body.startswith(b"%PDF-"):
        return parse_pdf(body, where)
    if kind in _JSON_TYPES:
        return _parse_json(body, charset, url, where, options)
    if kind.startswith("text/") and kind not in ("text/css", "text/javascript"):
        decoded = decode(
            body, str(where), [charset], errors=options.errors, encoding=options.encoding
        )
        scores = decoded.scores()
        return Document(decoded.text, where.source, where.whole(), url=url, scores=scores)
    return Drop("content_type", kind, None, url)


def _looks_like_page(body: bytes) -> bool:
    """Return True if a body is HTML although its content type is missing or different."""
    return (
        body[:200].lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith((b"<!doctype html", b"<html"))
    )


def _parse_json(
    body: bytes, charset: str, url: str, where: Where, options: ReadOptions
) -> Document | Drop:
    """Build a document from the text field of a JSON response."""
    decoded = decode(body, str(where), [charset], errors=options.errors, encoding=options.encoding)
    try:
        record = json.loads(decoded.text)
        text = find_text(record, options.text_field, str(where))
    except (ValueError, RecursionError, DataError):
        return Drop("no_text_field", options.text_field, None, url)
    metadata = {"url": url, **read_metadata(record)}
    return Document(text, where.source, where.whole(), scores=decoded.scores(), **metadata)


def read_arc(stream: BinaryIO, where: Where, options: ReadOptions) -> Iterator[Record]:
    """Yield one record per page of an ARC file.

    Source: archive.org's ARC file format, version 1: a line of URL, address, date, type and length,
    followed by that many bytes of the response.
    """
    number = 0
    while line := stream.readline(_CHUNK_BYTES):
        if not line.strip():
            continue
        number += 1
        words = line.decode("utf-8", "replace").split()
        if len(words) < 5 or not words[-1].isdigit() or int(words[-1]) > _LARGEST_BYTES:
            error = DataError(
                f"{where}, record {number}: {line[:80]!r} is not the header of an ARC record. "
                "Download the file again."
            )
            yield failed_record(where.place(number), len(line), error)
            continue
        body = stream.read(int(words[-1]))
        if len(body) < int(words[-1]):
            error = DataError(f"{where}, record {number} is truncated. Download the file again.")
            yield failed_record(where.place(number), len(body), error)
        elif not words[0].startswith("filedesc:"):
            parse = partial(_parse_arc, body, words, where, number, options)
            yield Record(where.place(number), len(body), parse)


def _parse_arc(
    body: bytes, words: list[str], where: Where, number: int, options: ReadOptions
) -> Document | Drop:
    url, date, kind = words[0], words[2], words[3].partition(";")[0]
    if not body.startswith(b"HTTP/"):
        record_where = Where(where.source, where.place(number))
        return parse_payload(body, kind, "", url, record_where, options)
    # As a WARC record, so that the HTTP headers (encodings, charset) have the same effect.
    head = (
        f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: {url}\r\n"
        f"WARC-Date: {date[:4]}-{date[4:6]}-{date[6:8]}\r\nContent-Length: {len(body)}\r\n"
        "Content-Type: application/http; msgtype=response\r\n\r\n"
    )
    return _parse_record(head.encode() + body + b"\r\n\r\n", where, number, options, kind)
