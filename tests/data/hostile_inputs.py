"""Generates files that try to use much memory or time, or to end a run.

Each entry of `TEXTS` is a piece that is repeated up to a size. Each entry of `FILES` is a function
of a size in bytes, which is about the size of the file.

    python tests/data/hostile_inputs.py FOLDER SIZE NAME...

prints the CPU time and the peak memory of `prepare` for each file.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import resource
import struct
import sys
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from bmforge.data import PrepareConfig, prepare
from bmforge.data.report import read_kept
from bmforge.data.sources.pdf_process import shared_pdf_process

SENTENCE = "The ferry leaves at six in the morning and comes back late at night.\n"
MEGABYTE = 1 << 20

# Pieces of texts that regular expressions, word segmentation or masking may take long for.
TEXTS: dict[str, str] = {
    "at signs": "a@",
    "address without end": "a.b-c_d+",
    "domains": "a@b.",
    "schemes": "http://",
    "host names": "www.",
    "colons": "::",
    "hexadecimal groups": "f:",
    "dotted numbers": "1.1.",
    "digits with hyphens": "1-",
    "digits with spaces": "1 ",
    "telephone": "(010)6278",
    "IBAN": "DE89 3704 ",
    "key begins": "-----BEGIN RSA PRIVATE KEY-----\n",
    "token": "eyJhbGciOi.eyJ",
    "keys": "sk-AKIAghp_hf_",
    "apostrophes": "'",
    "contractions": "n't've'd",
    "hyphens": "a-b-",
    "commas": "a,b,",
    "slashes": "a/b|",
    "menu": "Home | News > Shop | ",
    "brackets": "[1][edit]{",
    "parentheses": "((((",
    "dots": ". . .. ...",
    "ellipses": "…",
    "blank lines": " \n\t\n",
    "ideographic spaces": "\u3000\u00a0",
    "line separators": "a\u2028\x85",
    "hard wraps": "word-\nword-\n",
    "combining marks": "a\u0301\u0323",
    "marks alone": "\u0301",
    "soft hyphens": "a\u00ad\u200b\u200c\u200d",
    "directions": "\u202e\u2066\u2069a",
    "wrong decoding": "Ã©â€™Ã¤",
    "wrong Chinese": "ä¸\u00adæ–‡",
    "joined emoji": "👨\u200d👩\u200d👧",
    "Han": "的一是在",
    "rare Han": "𠀀𠀁",
    "advertisement": "加微信abc12345立即购买",
    "Thai": "สวัสดีครับ",
    "Khmer": "សួស្តី",
    "Hindi": "लड़का।",
    "Hangul parts": "\u1100\u1161\u11a8",
    "Arabic with marks": "مَرْحَبًا؟",
    "full width": "ＡＢＣ１２３",
    "long word": "x",
    "capitals": "A.B.",
    "copyright": "copyright © 2020 all rights reserved\n",
    "cookies": "we use cookies by using ",
    "lists": "- \n• \n",
    "equal sentences": SENTENCE,
}


def _zip(members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, raw in members.items():
            archive.writestr(name, raw)
    return out.getvalue()


def _page(body: bytes, head: bytes = b"") -> bytes:
    return b"<!DOCTYPE html><html><head>%s</head><body>%s</body></html>" % (head, body)


def _tar_of_odd_members(size: int) -> bytes:
    out = io.BytesIO()
    kinds = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)
    names = ("/etc/passwd", "../../out.txt", "a/../../b.txt", "\udcff.txt", "x" * 300)
    with tarfile.open(fileobj=out, mode="w") as archive:
        for number in range(size // 3000):
            for kind, name in zip(kinds, names, strict=True):
                info = tarfile.TarInfo(f"{name}{number}")
                info.type, info.linkname = kind, "/dev/zero"
                archive.addfile(info)
            info = tarfile.TarInfo(f"/absolute{number}.txt")
            info.size = len(SENTENCE)
            archive.addfile(info, io.BytesIO(SENTENCE.encode()))
    return out.getvalue()


def _nested_zip(size: int) -> bytes:
    raw = _zip({"a.txt": b"a " * (20 * size)})
    for level in range(5):
        raw = _zip({f"{level}-{number}.zip": raw for number in range(8)})
    return raw


def make_overlapping_zip(size: int) -> bytes:
    """Return a zip archive whose directory lists one compressed member many times."""
    raw = SENTENCE.encode() * (3 * MEGABYTE // len(SENTENCE))
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = packer.compress(raw) + packer.flush()
    crc = zlib.crc32(raw)
    sizes = (crc, len(packed), len(raw), 5, 0)
    local = struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 8, 0, 0, *sizes) + b"a.txt" + packed
    entry = struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, 20, 0, 8, 0, 0, *sizes, 0, 0, 0, 0, 0)
    count = size // 1000
    directory = (entry + b"a.txt") * count
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, len(directory), len(local), 0)
    return local + directory + end


def _xlsx(shared: bytes, sheet: bytes) -> bytes:
    return _zip(
        {
            "xl/workbook.xml": b"<a/>",
            "xl/sharedStrings.xml": b"<sst><si><t>%s</t></si></sst>" % shared,
            "xl/worksheets/sheet1.xml": b"<a>%s</a>" % sheet,
        }
    )


def _epub(chapter: bytes, spine: bytes, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    container = b'<container><rootfiles><rootfile full-path="c.opf"/></rootfiles></container>'
    item = b'<item id="a" href="a.xhtml" media-type="application/xhtml+xml"/>'
    package = b"<package><manifest>%s</manifest><spine>%s</spine></package>" % (item, spine)
    members = {"META-INF/container.xml": container, "c.opf": package, "a.xhtml": chapter}
    return _zip(members, method)


def make_packed_epub(size: int, method: int, stated_bytes: int) -> bytes:
    """Return a book with one chapter of `size` bytes, whose size the zip directory misstates."""
    chapter = b"<p>%s</p>" % (b"a" * (size - 7))
    raw = bytearray(_epub(chapter, b'<itemref idref="a"/>', method))
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        start = archive.start_dir
    entry = raw.index(b"a.xhtml", start) - 46
    raw[entry + 24 : entry + 28] = stated_bytes.to_bytes(4, "little")
    return bytes(raw)


def _pdf(objects: list[bytes]) -> bytes:
    out, offsets = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    head = b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    trailer = b"trailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF"
    return out + head + table + trailer % (len(objects) + 1, len(out))


def _stream(raw: bytes, entries: bytes = b"") -> bytes:
    packed = zlib.compress(raw, 9)
    head = b"<<%s/Filter/FlateDecode/Length %d>>" % (entries, len(packed))
    return head + b"stream\n" + packed + b"\nendstream"


def _pdf_pages(kids: bytes, count: int, content: bytes) -> bytes:
    """Return a PDF with one page object, which `kids` may list several times."""
    font = b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"
    resources = b"<</Font<</F 5 0 R>>/XObject<</X 6 0 R>>>>"
    form = b"/Type/XObject/Subtype/Form/BBox[0 0 9 9]/Resources<</XObject<</X 6 0 R>>>>"
    page = b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 600 800]/Contents 4 0 R/Resources%s>>"
    pages = b"<</Type/Pages/Kids[%s]/Count %d>>" % (kids, count)
    return _pdf(
        [
            b"<</Type/Catalog/Pages 2 0 R>>",
            pages,
            page % resources,
            _stream(content),
            font,
            _stream(b"/X Do ", form),
        ]
    )


def make_nested_pdf(levels: int, size: int = 0) -> bytes:
    """Return a PDF with one page and a chain of forms, each of which draws the next ten times.

    The last form has a text of `size` bytes.
    """
    form = b"/Type/XObject/Subtype/Form/BBox[0 0 9 9]/Resources<</XObject<</X %d 0 R>>/Font%s>>"
    page = b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 600 800]/Contents 4 0 R/Resources%s>>"
    fonts = b"<</F 5 0 R>>"
    text = b"BT /F 9 Tf (%s) Tj ET" % (b"word " * (size // 5))
    return _pdf(
        [
            b"<</Type/Catalog/Pages 2 0 R>>",
            b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
            page % (b"<</XObject<</X 6 0 R>>/Font%s>>" % fonts),
            _stream(b"/X Do " * 10),
            b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
            *(_stream(b"/X Do " * 10, form % (7 + level, fonts)) for level in range(levels)),
            _stream(text, form % (6 + levels, fonts)),
        ]
    )


def make_parquet(size: int, edit: Callable[[bytes], bytes] = bytes) -> bytes:
    """Return a table of 4,000 rows with the same long text, stored once in the dictionary."""
    text = pyarrow.array(["a b " * (size // 4)]).dictionary_encode().dictionary
    rows = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 4000), text)
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), out, compression="zstd")
    return edit(out.getvalue())


def make_arrow(size: int) -> bytes:
    rows = pyarrow.DictionaryArray.from_arrays([0] * 4000, ["a b " * (size // 4)])
    table, out = pyarrow.table({"text": rows}), io.BytesIO()
    options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
    with pyarrow.ipc.new_file(out, table.schema, options=options) as writer:
        writer.write_table(table)
    return out.getvalue()


def _web_archive(body: bytes, encoding: str, count: int = 1) -> bytes:
    http = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Encoding: %s\r\n\r\n%s"
    block = http % (encoding.encode(), body)
    record = b"WARC/1.0\r\nWARC-Type: response\r\nContent-Type: application/http\r\n"
    return (record + b"Content-Length: %d\r\n\r\n%s\r\n\r\n" % (len(block), block)) * count


def _brotli(size: int) -> bytes:
    import brotli

    return brotli.compress(b"<p>a" * (20 * size), quality=1)


FILES: dict[str, Callable[[int], bytes]] = {
    "links.tar": _tar_of_odd_members,
    "nested.zip": _nested_zip,
    "names.zip": lambda size: _zip({f"{'../' * 9}{n}\n\x1b.txt": b"a" for n in range(size // 300)}),
    "members.txt.gz": lambda size: gzip.compress(b"a ") * (size // 22),
    "deep.jsonl": lambda size: b'{"text":' * (size // 8) + b"\n" + b'{"text": "a sound line"}\n',
    "keys.jsonl": lambda size: b"{%s}\n" % b",".join(b'"%d":1' % n for n in range(size // 10)),
    "numbers.json": lambda size: b'{"text": %s}' % (b"1" * size),
    "escapes.jsonl": lambda size: b'{"text": "%s"}\n' % (b"\\ud800" * (size // 6)),
    "cells.ipynb": lambda size: b'{"cells": [%s{}]}' % (b"{}," * (size // 3)),
    "columns.csv": lambda size: b"text," * (size // 7) + b"x\n" + b"," * (size // 7) + b"\n",
    "times.srt": lambda size: b"1\n00:00:00,0 --> " * (size // 18),
    "utf16.txt": lambda size: b"\xff\xfe" + b"\x00\xd8a\x00" * (size // 4) + b"\x00",
    "gb18030.txt": lambda size: b"\xb5\xc4\x81\x30\xff\xfe" * (size // 6),
    "shift.txt": lambda size: b"\x1b$B$\x22\x1b(B\x1b" * (size // 9),
    "attributes.html": lambda size: _page(
        b"<p %s>text" % b" ".join(b"a%d=1" % n for n in range(size // 10))
    ),
    "nested tables.html": lambda size: _page(b"<table><tr><td>a" * (size // 17)),
    "nested lists.html": lambda size: _page(b"<ul><li>an item" * (size // 16)),
    "comments.html": lambda size: _page(b"<!--" * (size // 4)),
    "scripts.html": lambda size: _page(b"<script>" * (size // 8)),
    "entities.html": lambda size: _page(b"&amp;&#x41;&notin" * (size // 18)),
    "meta.html": lambda size: _page(b"a", b"<meta charset=gbk " * (size // 18)),
    "formatting.html": lambda size: _page(b"<b><i><p>a" * (size // 10)),
    "forms.docx": lambda size: _zip(
        {"word/document.xml": b"<a>" + b"<p><t>a</t></p><tr>" * size + b"</a>"}
    ),
    "paragraphs.docx": lambda size: _zip(
        {
            "padding.bin": random.Random(0).randbytes(size * 9 // 10),
            "word/document.xml": b"<a>" + b"<p><t>abc</t></p>" * (2 * size) + b"</a>",
        }
    ),
    "shared.xlsx": lambda size: _xlsx(b"a b " * (size // 4), b'<c t="s"><v>0</v></c>' * 50_000),
    "rows.xlsx": lambda size: _xlsx(
        b"a", b'<dimension ref="A1:XFD1048576"/><row r="1048576"><c r="XFD9"><v>1</v></c></row>'
    ),
    "index.xlsx": lambda size: _xlsx(b"a", b'<c t="s"><v>%s</v></c>' % (b"9" * size)),
    "entities.epub": lambda size: _epub(
        b'<!DOCTYPE a [<!ENTITY a "%s">]><p>%s</p>' % (b"a" * 1000, b"&a;" * (size // 3)),
        b'<itemref idref="a"/>',
    ),
    "bzip2.epub": lambda size: make_packed_epub(1000 * size, zipfile.ZIP_BZIP2, 100),
    "lzma.epub": lambda size: make_packed_epub(1000 * size, zipfile.ZIP_LZMA, 1000 * size),
    "pages.pdf": lambda size: _pdf_pages(
        b"3 0 R " * (size // 6), size // 6, b"BT /F 9 Tf (%s) Tj ET" % (b"words " * 2000)
    ),
    "loop.pdf": lambda size: _pdf_pages(b"2 0 R 3 0 R" * (size // 12), size // 6, b"/X Do "),
    "nested.pdf": lambda size: make_nested_pdf(8, size),
    "operators.pdf": lambda size: _pdf_pages(b"3 0 R", 1, b"BT /F 9 Tf (a) Tj ET " * size),
    "footer.parquet": lambda size: make_parquet(
        1000, lambda raw: raw[:-8] + struct.pack("<L", 2**31 - 1) + b"PAR1"
    ),
    "flipped.parquet": lambda size: make_parquet(
        1000, lambda raw: raw[:-60] + bytes(byte ^ 0x55 for byte in raw[-60:-8]) + raw[-8:]
    ),
    "brotli.warc": lambda size: _web_archive(_brotli(size), "br"),
    "twice.warc": lambda size: _web_archive(
        gzip.compress(gzip.compress(b"<p>a" * 20 * size)), "gzip, gzip"
    ),
    "records.warc": lambda size: _web_archive(gzip.compress(b"<p>a" * MEGABYTE), "gzip", 8),
    "heads.warc": lambda size: b"WARC/1.0\r\n" * (size // 10),
    "lines.warc": lambda size: b"WARC/1.0\r\n" + b"a: b\r\n" * (size // 6) + b"\r\n",
    "lengths.arc": lambda size: b"filedesc: 1 1 1 999999999\n" * (size // 27),
}


def _prepare(folder: Path, out: Path) -> dict[str, Any]:
    """Prepare a folder with all steps but the rules; return CPU seconds, memory and the result."""
    config = PrepareConfig(
        vocab_size=300,
        skip_bad=True,
        mask_private=True,
        rules="none",
        text_repairs=("repair", "invisible", "width", "boilerplate", "wrapped"),
        near_duplicates=0.8,
        validation_fraction=0.0,
    )
    begin = time.process_time()
    report = prepare([folder], out, config)
    assert report.funnel is not None
    # The peak of this process alone; `getrusage` starts from that of the parent.
    status = Path("/proc/self/status").read_text()
    shared_pdf_process().close()
    children_kb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return {
        "seconds": time.process_time() - begin,
        "memory_mb": (int(status.partition("VmHWM:")[2].split()[0]) + children_kb) >> 10,
        "documents": report.documents,
        "missing": report.funnel.missing().documents,
        "is_sound_kept": any(SENTENCE.strip() == text for text in read_kept(out, 10**6)),
    }


def main(folder: Path, size: int, names: list[str]) -> None:
    """Print a JSON line for each file, which is prepared in a child process with a sound file."""
    for name in names:
        root = folder / f"{names.index(name)}"
        root.mkdir()
        (root / name).write_bytes(FILES[name](size))
        (root / "sound.txt").write_text(SENTENCE)
        sys.stdout.flush()
        if not (child := os.fork()):
            result: dict[str, Any]
            try:
                result = _prepare(root, folder / f"{root.name} out")
            except BaseException as error:
                result = {"error": repr(error)}
            print(json.dumps({"name": name, **result}), flush=True)
            os._exit(0)
        if status := os.waitpid(child, 0)[1]:
            print(json.dumps({"name": name, "error": f"exit status {status}"}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
