"""Files of at most 1 MB that want much memory or time: bounded, and never a crash."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import pytest

MEGABYTE = 1 << 20


def bomb(size: int, piece: bytes = b"a \n") -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    block = piece * (MEGABYTE // len(piece))
    return b"".join(packer.compress(block) for _ in range(size)) + packer.flush()


def zip_bomb(name: str, size: int, head: bytes = b"", piece: bytes = b"a \n") -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        if name.startswith("word/"):
            archive.writestr("other", b"")
        with archive.open(name, "w", force_zip64=True) as part:
            part.write(head)
            for _ in range(size):
                part.write(piece * (MEGABYTE // len(piece)))
    return out.getvalue()


def web_archive(kind: str, body: bytes, encoding: str = "") -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n"
    head += f"Content-Encoding: {encoding}\r\n" if encoding else ""
    http = head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
    record = (
        "WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: http://example.org/\r\n"
        "Content-Type: application/http; msgtype=response\r\n"
        f"Content-Length: {len(http)}\r\n\r\n"
    )
    return record.encode() + http + b"\r\n\r\n"


FILES = {
    "lines.txt.gz": lambda: bomb(900),
    "blank.txt.gz": lambda: bomb(900, b"\n"),
    "wide.txt.gz": lambda: bomb(900, "语\n".encode()),
    "one.jsonl.gz": lambda: bomb(900, b"["),
    "table.csv.gz": lambda: gzip.compress(b"text\n") + bomb(900, b"a,"),
    "page.html.gz": lambda: bomb(900, b"<b>"),
    "text.txt.bz2": lambda: bz2.compress(b"a" * (200 * MEGABYTE)),
    "text.txt.xz": lambda: lzma.compress(b"a" * (200 * MEGABYTE)),
    "members.zip": lambda: zip_bomb("a.txt", 900),
    "inner.zip": lambda: zip_bomb("a.zip", 90),
    "book.docx": lambda: zip_bomb("word/document.xml", 250, b"<a>", b"<p/>"),
    "slow.docx": lambda: zip_bomb("word/document.xml", 250, b"<a>", b"<p>"),
    "body.warc": lambda: web_archive("text/html", bomb(900), "gzip"),
    "record.warc.gz": lambda: gzip.compress(web_archive("text/plain", b"a" * (500 * MEGABYTE))),
    "deep.json": lambda: b"[" * MEGABYTE,
    "list.json": lambda: b"[" + b"1," * (MEGABYTE // 2 - 2) + b"1]",
    "deep.html": lambda: b"<x>" * (MEGABYTE // 3),
    "links.html": lambda: b"<a href=x>" * (MEGABYTE // 10),
    "ruby.html": lambda: b"<ruby>" * (MEGABYTE // 6),
    "lines.html": lambda: b"<p>This is a sentence of the page that is long.</p>" * 20_000,
    "private.txt": lambda: b" ".join(b"p%d@example.org" % n for n in range(50_000)),
    "digits.txt": lambda: b"1" * MEGABYTE,
    "dots.txt": lambda: b"a." * (MEGABYTE // 2),
    "colons.txt": lambda: b"1:" * (MEGABYTE // 2),
    "text.jsonl": lambda: json.dumps({"text": "a" * (MEGABYTE - 20)}).encode(),
}
pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
SHORT = ("blank.txt.gz", "body.warc", "slow.docx", "private.txt")
PROGRAM = """
import sys
from pathlib import Path
from bmforge.data import PrepareConfig, prepare
from bmforge.errors import BmforgeError
config = PrepareConfig(vocab_size=300, skip_bad=True, mask_private=True, rules="mixed",
                       text_repairs=("repair", "invisible", "width", "boilerplate", "wrapped"),
                       near_duplicates=0.8)
try:
    prepare([sys.argv[1]], sys.argv[2], config)
except BmforgeError:
    pass
# The peak of this process alone; `getrusage` starts from that of the parent.
status = Path("/proc/self/status").read_text()
print(int(status.partition("VmHWM:")[2].split()[0]) >> 10)
"""


def check(tmp_path: Path, name: str) -> None:
    raw = FILES[name]()
    assert len(raw) <= 1.1 * MEGABYTE
    (tmp_path / name).write_bytes(raw)
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / name), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert int(ran.stdout.split()[-1]) <= 1024


@pytest.mark.parametrize("name", SHORT)
def test_a_small_file_takes_no_large_memory(tmp_path: Path, name: str) -> None:
    check(tmp_path, name)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in FILES if name not in SHORT])
def test_other_small_files_take_no_large_memory(tmp_path: Path, name: str) -> None:
    check(tmp_path, name)
