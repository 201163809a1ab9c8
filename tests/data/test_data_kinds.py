"""Every kind of source: what is read of it, what a damaged one loses, and what is bounded."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import random
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest

from bmforge.data import Document, PrepareConfig, SkipCount, prepare, read_documents
from bmforge.data.clean.drop import Drop
from bmforge.data.sources import packed
from bmforge.data.sources.encoding import decode, detect_encoding
from bmforge.data.sources.files import read_records
from bmforge.data.sources.pdf import join_pages
from bmforge.data.sources.record import ReadOptions
from bmforge.errors import DataError

CHINESE = "春眠不觉晓，处处闻啼鸟。夜来风雨声，花落知多少。床前明月光，疑是地上霜。"
TRADITIONAL = "國破山河在，城春草木深。感時花濺淚，恨別鳥驚心。烽火連三月，家書抵萬金。"
JAPANESE = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。"
KOREAN = "나는 고양이다. 이름은 아직 없다. 어디서 태어났는지 모른다. "


def entries(path: Path, **options: Any) -> list[Document | Drop | str]:
    """Return each entry of a file: a document, why there is none, or its error."""
    found: list[Document | Drop | str] = []
    for record in read_records(path, ReadOptions(**options)):
        try:
            found.append(record.parse())
        except DataError as error:
            found.append(str(error))
    return found


def texts(path: Path, **options: Any) -> list[str]:
    return [one.text for one in entries(path, **options) if isinstance(one, Document)]


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (CHINESE, "gb18030"),
        (TRADITIONAL, "gb18030"),
        (TRADITIONAL, "big5"),
        (CHINESE, "utf-16"),
        (CHINESE, "utf-16-le"),
        (TRADITIONAL, "utf-16-be"),
        ("Plain English text, and some more of it.", "utf-16-le"),
        (JAPANESE, "shift_jis"),
        (KOREAN, "euc-kr"),
    ],
)
def test_encodings_are_told(tmp_path: Path, text: str, encoding: str) -> None:
    raw = (text * 4).encode(encoding)
    (tmp_path / "a.txt").write_bytes(raw)
    assert texts(tmp_path / "a.txt") == [text * 4]
    lines = "".join(json.dumps({"text": one}, ensure_ascii=False) + "\n" for one in [text] * 9)
    (tmp_path / "b.jsonl").write_bytes(lines.encode(encoding))
    assert texts(tmp_path / "b.jsonl") == [text] * 9


def test_pages_of_windows() -> None:
    pytest.importorskip("resiliparse")
    for text, encoding in (
        ("Les élèves étaient très étonnés, déjà, à l'école de Genève. ", "cp1252"),
        ("Мой дядя самых честных правил, когда не в шутку занемог. ", "cp1251"),
    ):
        assert decode((text * 4).encode(encoding), "x").text == text * 4


def test_encodings_that_are_said_or_damaged() -> None:
    raw = "naïve café".encode("latin-1")
    assert decode(raw, "x", ["ISO-8859-1"]).text == "naïve café"
    assert decode("短".encode(), "x", ["gb2312-nonsense"]).text == "短"
    damaged = (CHINESE * 4).encode()
    damaged = damaged[:100] + b"\xff" + damaged[101:]
    assert detect_encoding(damaged) == ""
    with pytest.raises(DataError, match="invalid characters"):
        decode(damaged, "x", errors="strict")


def test_tables(tmp_path: Path) -> None:
    rows = [["id", "body", "url"], ["1", 'two\nlines, "quoted"', "u"], ["2", "中文", ""], ["3"]]
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    found = entries(tmp_path / "a.csv", text_field="body")
    assert [one.text for one in found[:2]] == ['two\nlines, "quoted"', "中文"]  # type: ignore[union-attr]
    assert found[0].url == "u"  # type: ignore[union-attr]
    assert "1 columns, but the header has 3" in str(found[2])
    (tmp_path / "b.tsv").write_bytes(("x\ttext\n1\t" + CHINESE + "\n").encode("gb18030"))
    assert texts(tmp_path / "b.tsv") == [CHINESE]
    with pytest.raises(DataError, match=r"no field 'text'.*body"):
        entries(tmp_path / "a.csv")
    raw = b"text\ngood\nb\xffd\nalso good\n"
    (tmp_path / "c.csv").write_bytes(raw)
    found = entries(tmp_path / "c.csv")
    assert [isinstance(one, Document) for one in found] == [True, False, True]


def test_nested_fields(tmp_path: Path) -> None:
    record = {"a": {"b": [{"c": "deep"}]}, "a.x": "flat", "date": "2024-05-01", "license": "MIT"}
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    (found,) = entries(tmp_path / "a.jsonl", text_field="a.b.0.c")
    assert isinstance(found, Document)
    assert (found.text, found.date, found.license) == ("deep", "2024-05-01", "MIT")
    assert texts(tmp_path / "a.jsonl", text_field="a.x") == ["flat"]
    assert "no field 'a.b.1.c'" in str(entries(tmp_path / "a.jsonl", text_field="a.b.1.c"))


def test_parquet_and_arrow(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.ipc
    import pyarrow.parquet

    table = arrow.table(
        {"text": [f"text {i}" for i in range(600)], "n": list(range(600)), "url": ["u"] * 600}
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    with pyarrow.ipc.new_file(tmp_path / "b.arrow", table.schema) as file:
        file.write_table(table)
    with pyarrow.ipc.new_stream(tmp_path / "c.arrow", table.schema) as file:
        file.write_table(table)
    (tmp_path / "d.parquet.gz").write_bytes(gzip.compress((tmp_path / "a.parquet").read_bytes()))
    for name in ("a.parquet", "b.arrow", "c.arrow", "d.parquet.gz"):
        assert texts(tmp_path / name) == [f"text {i}" for i in range(600)]
    with pytest.raises(DataError, match=r"no column 'body' \(columns: \['text', 'n', 'url'\]"):
        entries(tmp_path / "a.parquet", text_field="body")
    (tmp_path / "e.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    with pytest.raises(DataError, match="is not a Parquet file"):
        entries(tmp_path / "e.parquet")


PAGE = """<!DOCTYPE html><html lang="zh-CN"><head><meta charset="{charset}"><title>春晓</title>
<link rel="license" href="https://creativecommons.org/licenses/by/4.0/">
<meta property="article:published_time" content="2024-05-01T10:00:00Z"></head><body>
<nav><ul><li><a href="/">首页</a></li><li><a href="/login">登录</a></li></ul></nav>
<main><article><h1>春晓</h1><p>{text}</p><p>{text}</p></article></main>
<footer>Copyright 2024 <a href="/icp">ICP</a></footer></body></html>"""


@pytest.mark.parametrize("charset", ["utf-8", "gb2312"])
def test_pages(tmp_path: Path, charset: str) -> None:
    pytest.importorskip("resiliparse")
    page = PAGE.format(text=CHINESE, charset=charset)
    (tmp_path / "a.html").write_bytes(page.encode("gb18030" if charset == "gb2312" else charset))
    (found,) = entries(tmp_path / "a.html")
    assert isinstance(found, Document)
    assert found.text.count(CHINESE) == 2
    assert "春晓" in found.text
    assert not any(word in found.text for word in ("登录", "Copyright", "首页"))
    assert (found.language, found.date) == ("zh", "2024-05-01")
    assert found.license == "https://creativecommons.org/licenses/by/4.0/"
    assert 0 < found.scores["link_ratio"] < 0.3


def test_pages_that_no_parser_sees(tmp_path: Path) -> None:
    (tmp_path / "deep.html").write_text("<html>" + "<div>" * 20_000 + "text")
    (tmp_path / "large.html").write_bytes(b"<html>" + b"x" * (1 << 23))
    (tmp_path / "wide.html").write_text("<html>" + "<div>a</div>" * 20_000)
    assert [one.rule for one in entries(tmp_path / "deep.html")] == ["page_too_deep"]  # type: ignore[union-attr]
    assert [one.rule for one in entries(tmp_path / "large.html")] == ["page_too_large"]  # type: ignore[union-attr]
    pytest.importorskip("resiliparse")
    assert not isinstance(entries(tmp_path / "wide.html")[0], str)


def make_warc(bodies: list[bytes], pack: bool) -> list[bytes]:
    """Return WARC records of pages, as they stand in a file."""
    found = []
    for number, body in enumerate(bodies):
        http = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\n\r\n" + body
        head = (
            f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: http://example.org/{number}\r\n"
            f"WARC-Date: 2024-05-0{number + 1}T00:00:00Z\r\n"
            f"WARC-Record-ID: <urn:uuid:{number}>\r\nContent-Type: application/http\r\n"
            f"Content-Length: {len(http)}\r\n\r\n"
        )
        record = head.encode() + http + b"\r\n\r\n"
        found.append(gzip.compress(record) if pack else record)
    return found


@pytest.mark.parametrize("pack", [False, True])
def test_web_archives(tmp_path: Path, pack: bool) -> None:
    pytest.importorskip("fastwarc")
    name = "a.warc.gz" if pack else "a.warc"
    bodies = [f"page {i} {CHINESE}".encode() for i in range(5)]
    records = make_warc(bodies, pack)
    (tmp_path / name).write_bytes(b"".join(records))
    found = entries(tmp_path / name)
    assert [one.text.encode() for one in found] == bodies  # type: ignore[union-attr]
    assert (found[1].url, found[1].date) == ("http://example.org/1", "2024-05-02")  # type: ignore[union-attr]
    middle = bytearray(records[2])
    if pack:
        middle[30] ^= 0xFF
    else:
        middle = bytearray(records[2].replace(b"Content-Length: ", b"Content-Length: 9"))
    half = records[4][: len(records[4]) // 2]
    damaged = [*records[:2], bytes(middle), records[3], half]
    (tmp_path / name).write_bytes(b"".join(damaged))
    kept = texts(tmp_path / name)
    assert kept[:2] == [bodies[0].decode(), bodies[1].decode()]
    if pack:
        assert kept == [bodies[i].decode() for i in (0, 1, 3)]
        assert sum(isinstance(one, str) for one in entries(tmp_path / name)) == 2
    other = records[0].replace(b"200 OK", b"404 No") if not pack else None
    if other:
        (tmp_path / name).write_bytes(other)
        assert [one.rule for one in entries(tmp_path / name)] == ["http_status"]  # type: ignore[union-attr]


def test_arc(tmp_path: Path) -> None:
    pages = [
        b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\n" + b"page %d" % i for i in (1, 2)
    ]
    head = b"1 0 InternetArchive\nURL IP-address Archive-date Content-type Archive-length\n"
    file = b"filedesc://a.arc 0.0.0.0 20240501 text/plain %d\n" % len(head) + head + b"\n"
    for number, page in enumerate(pages):
        line = f"http://example.org/{number} 127.0.0.1 20240501000000 text/plain {len(page)}\n"
        file += line.encode() + page + b"\n"
    (tmp_path / "a.arc").write_bytes(file)
    found = entries(tmp_path / "a.arc")
    assert [(one.text, one.url) for one in found] == [  # type: ignore[union-attr]
        ("page 1", "http://example.org/0"),
        ("page 2", "http://example.org/1"),
    ]
    (tmp_path / "b.arc").write_bytes(file[:-4])
    assert "truncated" in str(entries(tmp_path / "b.arc")[-1])


def test_a_response_of_an_arc_file_is_decoded(tmp_path: Path) -> None:
    """The HTTP headers state how: compressed, in chunks, in a character set, or not at all."""
    text = "Городской совет обсудил новый мост через реку."
    plain = text.encode("koi8-r")
    bodies = {
        "Content-Encoding: gzip": gzip.compress(plain),
        "Content-Encoding: deflate": zlib.compress(plain),
        "Transfer-Encoding: chunked": b"%x\r\n%b\r\n0\r\n\r\n" % (len(plain), plain),
        "Server: a": plain,
    }
    file = b""
    for head, body in bodies.items():
        page = f"HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=koi8-r\r\n{head}\r\n\r\n"
        size = len(page) + len(body)
        file += f"http://a.example/ 127.0.0.1 20240501000000 text/plain {size}\n".encode()
        file += page.encode() + body + b"\n"
    (tmp_path / "a.arc").write_bytes(b"filedesc://a 0.0.0.0 20240501 text/plain 0\n\n" + file)
    found = entries(tmp_path / "a.arc")
    assert [one.text for one in found] == [text] * len(bodies)  # type: ignore[union-attr]
    assert {one.date for one in found} == {"2024-05-01"}  # type: ignore[union-attr]


def test_archives_and_packings(tmp_path: Path) -> None:
    """Members of members, each read as what it is; what is not read is named."""
    lines = b'{"text": "one"}\n{"text": "two"}\n'
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:xz") as tar:
        for name, content in (("deep/a.jsonl", lines), ("../up.txt", b"three")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("link.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    with zipfile.ZipFile(tmp_path / "all.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inner.tar.xz", inner.getvalue())
        archive.writestr("four.txt.bz2", bz2.compress(b"four"))
        archive.writestr("five.txt.xz", lzma.compress(b"five"))
        archive.writestr("picture.png", b"\x89PNG")
        archive.writestr("empty.txt", b"")
        archive.writestr("six.md", b"six")
    found = entries(tmp_path / "all.zip")
    assert texts(tmp_path / "all.zip") == ["one", "two", "three", "four", "five", "six"]
    assert [one.place for one in found[:3]] == [  # type: ignore[union-attr]
        "inner.tar.xz/deep/a.jsonl:1",
        "inner.tar.xz/deep/a.jsonl:2",
        "inner.tar.xz/../up.txt",
    ]
    assert [one.rule for one in found if isinstance(one, Drop)] == ["archive_link", "unknown_kind"]
    assert next(one for one in found if isinstance(one, str)).startswith("file")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["all.zip"]
    report = prepare(tmp_path, tmp_path / "out", PrepareConfig(vocab_size=300, skip_bad=True))
    assert report.funnel is not None
    assert (report.documents, report.skipped) == (6, 1)
    assert report.funnel.dropped["archive_link"].documents == 1


def test_an_archive_of_macos_is_read(tmp_path: Path) -> None:
    """Its files of attributes have the names of texts; each is named, and none ends the run."""
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("one.txt", b"The text of the first file is longer than its attributes.")
        archive.writestr("__MACOSX/._one.txt", bytes.fromhex("00051607 00020000") + b"Mac OS X")
    report = prepare(tmp_path, tmp_path / "out", PrepareConfig(vocab_size=300))
    assert report.documents == 1
    assert report.funnel is not None
    assert report.funnel.dropped["unknown_kind"].documents == 1


def test_archives_in_archives_end(tmp_path: Path) -> None:
    content = b"deep down"
    for depth in range(7):
        held = io.BytesIO()
        with zipfile.ZipFile(held, "w") as archive:
            archive.writestr("a.txt" if depth == 0 else "a.zip", content)
        content = held.getvalue()
    (tmp_path / "a.zip").write_bytes(content)
    assert [one.rule for one in entries(tmp_path / "a.zip")] == ["archive_depth"]  # type: ignore[union-attr]


def test_bombs_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_LARGE_BYTES", 1 << 20)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"x" * (1 << 23)))
    with pytest.raises(DataError, match="a decompression bomb"):
        entries(tmp_path / "a.txt.gz")
    (tmp_path / "b.txt.gz").write_bytes(
        gzip.compress(random.Random(0).randbytes(1 << 21).hex().encode())
    )
    assert len(texts(tmp_path / "b.txt.gz")[0]) == 1 << 22


# Where a byte of the packed data makes each of Python's unpackers raise an error of its own.
@pytest.mark.parametrize(
    ("method", "at"), [(zipfile.ZIP_DEFLATED, 35), (zipfile.ZIP_BZIP2, 40), (zipfile.ZIP_LZMA, 46)]
)
def test_a_damaged_member_loses_itself_only(tmp_path: Path, method: int, at: int) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", method) as archive:
        for number in range(3):
            archive.writestr(f"{number}.txt", f"text {number} " * 50)
        start = archive.infolist()[1].header_offset
    raw = bytearray((tmp_path / "a.zip").read_bytes())
    raw[start + at] ^= 0xFF
    (tmp_path / "a.zip").write_bytes(bytes(raw))
    found = entries(tmp_path / "a.zip")
    assert [isinstance(one, Document) for one in found] == [True, False, True]
    assert "1.txt" in str(found[1])
    skipped = SkipCount()
    kept = list(read_documents(tmp_path / "a.zip", skip_bad=True, skipped=skipped))
    assert (len(kept), skipped.count) == (2, 1)


@pytest.mark.parametrize(("method", "at"), [(zipfile.ZIP_DEFLATED, 47), (zipfile.ZIP_LZMA, 60)])
def test_a_damaged_book_is_named(tmp_path: Path, method: int, at: int) -> None:
    with zipfile.ZipFile(tmp_path / "a.docx", "w", method) as archive:
        archive.writestr("word/document.xml", "<w/>" + " " * 1000 + "".join(map(chr, range(99))))
    raw = bytearray((tmp_path / "a.docx").read_bytes())
    raw[at] ^= 0xFF
    (tmp_path / "a.docx").write_bytes(bytes(raw))
    with pytest.raises(DataError, match=r"a\.docx' cannot be read"):
        list(read_documents(tmp_path / "a.docx"))


def test_books(tmp_path: Path) -> None:
    word = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    with zipfile.ZipFile(tmp_path / "a.docx", "w") as archive:
        archive.writestr(
            "word/document.xml",
            f'<w:document xmlns:w="{word}"><w:body><w:p><w:r><w:t>{CHINESE}</w:t></w:r></w:p>'
            "<w:p><w:r><w:t>a</w:t><w:tab/><w:t>b</w:t></w:r></w:p></w:body></w:document>",
        )
    assert texts(tmp_path / "a.docx") == [f"{CHINESE}\na\tb"]
    box = "<w:r><w:txbxContent><w:p><w:r><w:t>box</w:t></w:r></w:p></w:txbxContent></w:r>"
    old = "http://schemas.openxmlformats.org/markup-compatibility/2006"
    with zipfile.ZipFile(tmp_path / "box.docx", "w") as archive:
        archive.writestr(
            "word/document.xml",
            '<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main">'
            "<w:body><w:p><w:pPr><w:tabs><w:tab/></w:tabs></w:pPr><w:r><w:t>a</w:t></w:r>"
            f"<o:AlternateContent xmlns:o='{old}'><o:Choice>{box}</o:Choice>"
            f"<o:Fallback>{box}</o:Fallback></o:AlternateContent><w:r><w:t>b</w:t></w:r></w:p>"
            "</w:body></w:document>",
        )
    assert texts(tmp_path / "box.docx") == ["ab\nbox"]
    with zipfile.ZipFile(tmp_path / "b.epub", "w") as archive:
        archive.writestr(
            "META-INF/container.xml",
            '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
            '<rootfile full-path="OEBPS/book.opf"/></rootfiles></container>',
        )
        archive.writestr(
            "OEBPS/book.opf",
            '<package xmlns="http://www.idpf.org/2007/opf"><manifest>'
            '<item id="one" href="1.xhtml"/><item id="two" href="two%20b.xhtml"/></manifest>'
            '<spine><itemref idref="two"/><itemref idref="one"/></spine></package>',
        )
        page = "<html xmlns='http://www.w3.org/1999/xhtml'><head><title>no</title></head>"
        page += "<body>{}</body></html>"
        archive.writestr(
            "OEBPS/1.xhtml", page.format("<p>one <b>bold</b>\n<i>word</i></p><p>next</p>")
        )
        archive.writestr("OEBPS/two b.xhtml", page.format("<h1>Head</h1>tail"))
    assert texts(tmp_path / "b.epub") == ["Head\ntail\n\none bold word\nnext"]
    with zipfile.ZipFile(tmp_path / "c.docx", "w") as archive:
        archive.writestr("word/document.xml", '<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>')
    assert "entities" in str(entries(tmp_path / "c.docx")[0])


def test_pages_of_a_pdf_are_joined() -> None:
    page = "A Running Head\nfirst lines of {0} and exam-\nple {0} text\nChapter 3, page {1}"
    joined = join_pages([page.format(w, n) for n, w in enumerate("abcd", 7)])
    assert joined.split("\n") == [f"first lines of {w} and example {w} text" for w in "abcd"]
    assert join_pages(["one\ntwo"]) == "one\ntwo"


def test_pdf(tmp_path: Path) -> None:
    pytest.importorskip("pypdfium2")
    figure_module = pytest.importorskip("matplotlib.figure")
    from matplotlib.backends.backend_pdf import PdfPages

    words = [f"This is sentence number {i} of a text that is set in lines." for i in range(12)]
    with PdfPages(tmp_path / "a.pdf") as file:
        for page in range(3):
            figure = figure_module.Figure()
            for row, line in enumerate(words[4 * page : 4 * page + 4]):
                figure.text(0.1, 0.8 - 0.1 * row, line)
            figure.text(0.1, 0.95, "Running Head")
            file.savefig(figure)
    assert texts(tmp_path / "a.pdf") == ["\n".join(words)]
    with PdfPages(tmp_path / "b.pdf") as file:
        figure = figure_module.Figure()
        figure.add_axes((0, 0, 1, 1)).imshow([[0, 1], [1, 0]])
        figure.axes[0].axis("off")
        file.savefig(figure)
    assert [one.rule for one in entries(tmp_path / "b.pdf")] == ["pdf_scan"]  # type: ignore[union-attr]
    (tmp_path / "c.pdf").write_bytes((tmp_path / "a.pdf").read_bytes()[:300])
    assert "is not a PDF" in str(entries(tmp_path / "c.pdf")[0])


def test_kinds_are_told_by_content(tmp_path: Path) -> None:
    (tmp_path / "packed").write_bytes(gzip.compress(b"no name says what this is"))
    (tmp_path / "page").write_bytes(b"\n<!DOCTYPE html><html><div>" + b"<div>" * 999)
    (tmp_path / "wrong.txt").write_bytes(gzip.compress(b"text after all"))
    assert [one.rule for one in entries(tmp_path / "packed")] == ["unknown_kind"]  # type: ignore[union-attr]
    assert [one.rule for one in entries(tmp_path / "page")] == ["page_too_deep"]  # type: ignore[union-attr]
    assert texts(tmp_path / "wrong.txt") == ["text after all"]
