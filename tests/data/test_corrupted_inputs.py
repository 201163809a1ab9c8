"""Corrupted inputs of every kind: none crashes or hangs, each is named, others lose nothing."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from bmforge.data import PrepareConfig, prepare
from bmforge.data.prepare.documents import read_shard
from bmforge.data.prepare.funnel import Amount

for package in ("pyarrow", "fastwarc", "resiliparse", "pypdfium2", "zstandard"):
    pytest.importorskip(package)

LINES = [f"Line {n} of a text about rivers, bridges and mills: 春眠不觉晓 {n}." for n in range(12)]
TEXT = "\n".join(LINES)


def jsonl() -> bytes:
    return "".join(json.dumps({"text": line}) + "\n" for line in LINES).encode()


def table(form: str) -> bytes:
    import pyarrow as arrow
    import pyarrow.ipc
    import pyarrow.parquet

    rows, out = arrow.table({"text": LINES, "n": list(range(len(LINES)))}), io.BytesIO()
    if form == "parquet":
        pyarrow.parquet.write_table(rows, out, row_group_size=4)
    else:
        with pyarrow.ipc.new_file(out, rows.schema) as file:
            file.write_table(rows)
    return out.getvalue()


def pdf() -> bytes:
    """A page with one line, written by hand."""
    stream = b"BT /F1 12 Tf 72 720 Td (A line of a page that is read as text.) Tj ET"
    bodies = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        b"/Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    out, places = b"%PDF-1.4\n", []
    for number, body in enumerate(bodies, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    start = len(out)
    out += b"xref\n0 6\n0000000000 65535 f \n"
    out += b"".join(b"%010d 00000 n \n" % place for place in places)
    return out + b"trailer << /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % start


def warc() -> bytes:
    out = b""
    for number, line in enumerate(LINES):
        body = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\n\r\n" + line.encode()
        out += (
            (
                f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: http://example.org/{number}\r\n"
                f"WARC-Date: 2024-05-01T00:00:00Z\r\nWARC-Record-ID: <urn:uuid:{number}>\r\n"
                f"Content-Type: application/http\r\nContent-Length: {len(body)}\r\n\r\n"
            ).encode()
            + body
            + b"\r\n\r\n"
        )
    return out


def arc() -> bytes:
    head = b"1 0 InternetArchive\nURL IP-address Archive-date Content-type Archive-length\n"
    out = b"filedesc://a.arc 0.0.0.0 20240501 text/plain %d\n" % len(head) + head + b"\n"
    for number, line in enumerate(LINES):
        page = b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\n" + line.encode()
        said = f"http://example.org/{number} 127.0.0.1 20240501000000 text/plain {len(page)}\n"
        out += said.encode() + page + b"\n"
    return out


def archive(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return out.getvalue()


def tar() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as file:
        for number, line in enumerate(LINES):
            member = tarfile.TarInfo(f"{number}.txt")
            member.size = len(line.encode())
            file.addfile(member, io.BytesIO(line.encode()))
    return out.getvalue()


def docx() -> bytes:
    word = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    runs = "".join(f"<w:p><w:r><w:t>{line}</w:t></w:r></w:p>" for line in LINES)
    body = f'<w:document xmlns:w="{word}"><w:body>{runs}</w:body></w:document>'
    return archive({"word/document.xml": body.encode()})


def epub() -> bytes:
    container = (
        '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
        '<rootfile full-path="b.opf"/></rootfiles></container>'
    )
    book = (
        '<package xmlns="http://www.idpf.org/2007/opf"><manifest><item id="one" href="1.xhtml"/>'
        '</manifest><spine><itemref idref="one"/></spine></package>'
    )
    page = f"<html xmlns='http://www.w3.org/1999/xhtml'><body><p>{TEXT}</p></body></html>"
    members = {"META-INF/container.xml": container, "b.opf": book, "1.xhtml": page}
    return archive({name: content.encode() for name, content in members.items()})


def zstd(data: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor().compress(data)


def page() -> bytes:
    parts = "".join(f"<p>{line}</p>" for line in LINES)
    return f"<html><head><title>Page</title></head><body>{parts}</body></html>".encode()


SOUND: dict[str, Callable[[], bytes]] = {
    "txt": TEXT.encode,
    "jsonl": jsonl,
    "csv": lambda: (
        "n,text\n" + "".join(f'{n},"{line}"\n' for n, line in enumerate(LINES))
    ).encode(),
    "html": page,
    "parquet": lambda: table("parquet"),
    "arrow": lambda: table("arrow"),
    "pdf": pdf,
    "warc": warc,
    "warc.gz": lambda: b"".join(
        gzip.compress(b"WARC/1.0" + one) for one in warc().split(b"WARC/1.0")[1:]
    ),
    "arc": arc,
    "epub": epub,
    "docx": docx,
    "zip": lambda: archive({f"{n}.txt": line.encode() for n, line in enumerate(LINES)}),
    "tar": tar,
    "txt.gz": lambda: gzip.compress(TEXT.encode()),
    "jsonl.bz2": lambda: bz2.compress(jsonl()),
    "jsonl.xz": lambda: lzma.compress(jsonl()),
    "jsonl.zst": lambda: zstd(jsonl()),
    "tar.gz": lambda: gzip.compress(tar()),
}


def cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(1, len(data))]


def flip(data: bytes, draw: random.Random) -> bytes:
    """Other bytes at up to eight places."""
    damaged = bytearray(data)
    for _ in range(draw.randint(1, 8)):
        damaged[draw.randrange(len(damaged))] ^= draw.randrange(1, 256)
    return bytes(damaged)


def lie(data: bytes, draw: random.Random) -> bytes:
    """A length of two or four bytes that is far too large, or a number of more digits."""
    digits = [n for n, byte in enumerate(data) if 48 <= byte < 58]
    if digits and draw.random() < 0.5:
        place = draw.choice(digits)
        return data[:place] + b"99999999" + data[place:]
    place = draw.randrange(max(len(data) - 4, 1))
    return data[:place] + draw.choice([b"\xff\xff", b"\xff\xff\xff\x7f"]) + data[place + 4 :]


def splice(data: bytes, draw: random.Random) -> bytes:
    """A piece that is taken out, or put in twice, or zeros in its place."""
    begin, end = sorted(draw.randrange(len(data)) for _ in range(2))
    middle = draw.choice([b"", data[begin:end] * 2, bytes(end - begin)])
    return data[:begin] + middle + data[end:]


def bomb(data: bytes, draw: random.Random) -> bytes:
    """Much in little, in the first packing that comes; or elements within elements."""
    large = bytes(30_000_000)
    packed = [gzip.compress, bz2.compress, zstd, lambda one: archive({"a.txt": one})]
    return draw.choice([*packed, lambda one: b"<html>" + b"<div>" * 50_000])(large)


DAMAGE = (cut, flip, lie, splice)


def write_corrupted(folder: Path, count: int, seed: int) -> dict[str, str]:
    """Write so many damaged files, and a sound one beside every tenth; return the sound texts."""
    draw, sound = random.Random(seed), {}
    made = {suffix: make() for suffix, make in SOUND.items()}
    folder.mkdir()
    for number in range(count):
        suffix = list(SOUND)[number % len(SOUND)]
        damage = bomb if number % 61 == 60 else draw.choice(DAMAGE)
        path = folder / f"{number:04d}-{damage.__name__}.{suffix}"
        path.write_bytes(damage(made[suffix], draw))
        if number % 10 == 0:
            path = folder / f"{number:04d}-sound.jsonl"
            text = f"a sound text with the number {number}"
            path.write_text(json.dumps({"text": text}) + "\n")
            sound[str(path)] = text
    return sound


@pytest.mark.parametrize(
    ("count", "seed"), [(76, 0), *(pytest.param(500, n, marks=pytest.mark.long) for n in (1, 2, 3))]
)
def test_corrupted_inputs(tmp_path: Path, count: int, seed: int) -> None:
    sound = write_corrupted(tmp_path / "in", count, seed)
    config = PrepareConfig(
        vocab_size=300,
        validation_fraction=0.0,
        skip_bad=True,
        skip_unread=True,
        keep_dropped=True,
        keep_stages=True,
        workers=1,
        shard_bytes=200_000,
        document_seconds=30.0,
    )
    report = prepare(tmp_path / "in", tmp_path / "out", config)
    assert report.funnel is not None
    assert report.funnel.missing() == Amount()
    assert not {"crash", "time", "memory"} & set(report.funnel.dropped)
    folder = tmp_path / "out" / "preparing.tmp" / "stages" / "documents"
    found: dict[str, list[str]] = {}
    for number in range(len([*folder.glob("*.digests")])):
        for document in read_shard(folder, number):
            found.setdefault(document.source, []).append(document.text)
    for path, text in sound.items():
        assert found[path] == [text]
    lines = (tmp_path / "out" / "dropped.jsonl").read_text("utf-8").splitlines()
    named = {json.loads(line)["source"] for line in lines} | set(found)
    files = {str(path) for path in (tmp_path / "in").iterdir()}
    assert not files - named, f"neither read nor named: {sorted(files - named)}"
