"""Each member of a folder or archive is read, dropped with a reason, or named in an error."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from prepare_cases import prepare_plainly, written

from bmforge.data import PrepareConfig, prepare
from bmforge.data.clean.drop import Drop
from bmforge.data.prepare.funnel import Amount
from bmforge.data.prepare.record import PrepareReport
from bmforge.data.report import read_kept
from bmforge.data.sources.document import Document
from bmforge.data.sources.files import list_files, parse_record, read_documents, read_records
from bmforge.data.sources.record import ReadOptions
from bmforge.errors import DataError

SENTENCE = "The ferry number {} leaves at six in the morning and comes back late at night."


def zip_of(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, raw in members.items():
            archive.writestr(name, raw)
    return out.getvalue()


def tar_of(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, raw in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            archive.addfile(info, io.BytesIO(raw))
    return out.getvalue()


def xml(text: str) -> str:
    return f'<?xml version="1.0"?><a xmlns:w="w" xmlns:p="p" xmlns:text="t">{text}</a>'


def odt(text: str) -> bytes:
    kind = b"application/vnd.oasis.opendocument.text"
    content = xml(f"<text:h>Head</text:h><text:p>{text}</text:p>").encode()
    return zip_of({"mimetype": kind, "content.xml": content})


def pptx(text: str) -> bytes:
    slides = {
        f"ppt/slides/slide{n}.xml": xml(f"<p:p><p:r><p:t>{n} {text}</p:t></p:r></p:p>").encode()
        for n in (1, 2, 10)
    }
    return zip_of({"ppt/presentation.xml": b"<a/>", **slides})


def xlsx(text: str) -> bytes:
    shared = xml(f"<si><t>{text}</t></si>").encode()
    rows = xml('<row><c t="s"><v>0</v></c><c><v>7</v></c></row>').encode()
    return zip_of(
        {
            "xl/workbook.xml": b"<a/>",
            "xl/sharedStrings.xml": shared,
            "xl/worksheets/sheet1.xml": rows,
        }
    )


def docx(text: str) -> bytes:
    cells = "".join(f"<w:tc><w:p><w:t>{one}</w:t></w:p></w:tc>" for one in ("left", text))
    body = f"<w:p><w:t>before</w:t></w:p><w:tbl><w:tr>{cells}</w:tr></w:tbl>"
    return zip_of({"word/document.xml": xml(body).encode()})


def notebook(text: str) -> bytes:
    cells = [
        {"cell_type": "markdown", "source": [text, "\n"]},
        {"cell_type": "code", "source": "x = 1", "outputs": ["big"]},
    ]
    return json.dumps({"cells": cells}).encode()


# Suffix: what makes a file of a sentence, and the text that is read.
KINDS = {
    "txt": (str.encode, "{}"),
    "rst": (str.encode, "{}"),
    "tex": (str.encode, "{}"),
    "py": (lambda s: f"# {s}\n".encode(), "# {}"),
    "json": (lambda s: json.dumps({"text": s}, indent=2).encode(), "{}"),
    "list.json": (lambda s: json.dumps([{"text": s}]).encode(), "{}"),
    "lines.json": (lambda s: (json.dumps({"text": s}) + "\n").encode(), "{}"),
    "json.gz": (lambda s: gzip.compress((json.dumps({"text": s}) + "\n").encode()), "{}"),
    "ipynb": (notebook, "{}\n\n\nx = 1"),
    "srt": (lambda s: f"1\n00:00:01,000 --> 00:00:02,000\n<i>{s}</i>\n\n".encode(), "{}"),
    "vtt": (lambda s: f"WEBVTT\n\n00:01.000 --> 00:02.000\n{s}\n".encode(), "{}"),
    "odt": (odt, "Head\n{}"),
    "pptx": (pptx, "1 {0}\n\n2 {0}\n\n10 {0}"),
    "xlsx": (xlsx, "{}\t7"),
    "docx": (docx, "before\nleft\t{}"),
}


@pytest.mark.parametrize("suffix", KINDS)
@pytest.mark.parametrize("where", ["file", "zip", "tar.gz"])
def test_each_kind_is_read(tmp_path: Path, suffix: str, where: str) -> None:
    write, shape = KINDS[suffix]
    text = SENTENCE.format(1)
    raw, name = write(text), f"a.{suffix}"
    if where == "zip":
        raw, name = zip_of({name: raw}), "a.zip"
    elif where == "tar.gz":
        raw, name = gzip.compress(tar_of({name: raw})), "a.tar.gz"
    (tmp_path / name).write_bytes(raw)
    (found,) = read_documents(tmp_path)
    assert found.text.strip() == shape.format(text)


def test_office_files_without_their_names_are_told_by_content(tmp_path: Path) -> None:
    for number, kind in enumerate(("odt", "pptx", "xlsx", "docx")):
        (tmp_path / f"{number}.zip").write_bytes(KINDS[kind][0](SENTENCE.format(number)))
    assert len(list(read_documents(tmp_path))) == 4


def make_member(draw: random.Random, number: int, depth: int) -> tuple[str, bytes, int]:
    """Return a name, its bytes, and how many entries it must give."""
    kind = draw.choice([*KINDS, "bin", "exe", "damaged.docx", "damaged.gz", "zip", "tar"])
    name = f"{number}.{kind}"
    if kind in KINDS:
        return name, KINDS[kind][0](SENTENCE.format(number)), 1
    if kind in ("zip", "tar") and depth:
        inner = [make_member(draw, n, depth - 1) for n in range(draw.randrange(1, 5))]
        pack = zip_of if kind == "zip" else tar_of
        return name, pack({name: raw for name, raw, _ in inner}), sum(count for *_, count in inner)
    damaged = {"damaged.docx": b"PK\x03\x04nothing", "damaged.gz": b"\x1f\x8b\x08nothing"}
    return f"{number}.{kind}x", damaged.get(kind, draw.randbytes(300)), 1


@pytest.mark.parametrize("seed", range(30))
def test_no_member_of_an_archive_vanishes(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    members = [make_member(draw, number, 2) for number in range(8)]
    pack, name = draw.choice(((zip_of, "a.zip"), (tar_of, "a.tar")))
    (tmp_path / name).write_bytes(pack({one: raw for one, raw, _ in members}))
    entries = []
    for record in read_records(tmp_path / name, ReadOptions()):
        try:
            entries.append(parse_record(record))
        except DataError as error:
            entries.append(error)
    assert len(entries) == sum(count for *_, count in members)
    assert all(isinstance(one, Document | Drop | DataError) for one in entries)


@pytest.mark.parametrize("seed", range(10))
def test_no_file_of_a_folder_vanishes(tmp_path: Path, seed: int) -> None:
    """Linked folders and files are read; broken links, pipes and other kinds are named."""
    draw = random.Random(seed)
    expected: dict[str, bool] = {}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    root = tmp_path / "in"
    root.mkdir()
    (root / "a.txt").write_text("text")
    expected["a.txt"] = True
    for number in range(12):
        kind = draw.choice(("file", "odd", "folder", "link", "broken", "pipe"))
        path = root / f"{number}{'.txt' if kind != 'odd' else '.bin'}"
        if kind in ("file", "odd"):
            path.write_text("text")
        elif kind == "folder":
            (elsewhere / str(number)).mkdir()
            (elsewhere / str(number) / "b.txt").write_text("text")
            (root / f"d{number}").symlink_to(elsewhere / str(number))
            expected[f"d{number}/b.txt"] = True
            continue
        elif kind == "link":
            (elsewhere / f"{number}.txt").write_text("text")
            path.symlink_to(elsewhere / f"{number}.txt")
        elif kind == "broken":
            path.symlink_to(tmp_path / "nothing")
        else:
            os.mkfifo(path)
        expected[path.name] = kind in ("file", "link")
    (root / "loop").symlink_to(root)
    unread: list[Path] = []
    files = list_files(root, unread)
    seen = {path.relative_to(root).as_posix(): True for path in files}
    seen |= {path.relative_to(root).as_posix(): False for path in unread}
    assert seen == expected


def warc(sentences: list[str]) -> bytes:
    records = []
    for number, sentence in enumerate(sentences):
        body = f"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n{sentence}".encode()
        head = f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: http://x.org/{number}\r\n"
        head += f"Content-Type: application/http\r\nContent-Length: {len(body)}\r\n\r\n"
        records.append(gzip.compress(head.encode() + body + b"\r\n\r\n"))
    return b"".join(records)


def parquet(sentences: list[str]) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": sentences}), out, row_group_size=2)
    return out.getvalue()


def lines(sentences: list[str]) -> bytes:
    return "".join(json.dumps({"text": sentence}) + "\n" for sentence in sentences).encode()


def members(sentences: list[str]) -> dict[str, bytes]:
    return {f"{number}.txt": text.encode() for number, text in enumerate(sentences)}


# Kinds that are cut between shards: what makes a file of sentences.
CUT_KINDS: dict[str, Callable[[list[str]], bytes]] = {
    "jsonl": lines,
    "jsonl.gz": lambda texts: gzip.compress(lines(texts)),
    "parquet": parquet,
    "zip": lambda texts: zip_of(members(texts)),
    "tar": lambda texts: tar_of(members(texts)),
    "warc.gz": warc,
    "csv": lambda texts: "\n".join(["text", *texts]).encode(),
}
PLAIN = PrepareConfig(vocab_size=300, validation_fraction=0.0, skip_bad=True, skip_unread=True)


def check_shards(folder: Path, out: Path) -> PrepareReport:
    """Prepare a folder in one shard, and in small ones by workers: the bytes are the same."""
    report, plain = prepare_plainly(folder, out, PLAIN)
    for workers, shard_bytes in ((0, 300), (2, 2000)):
        config = replace(PLAIN, workers=workers, shard_bytes=shard_bytes)
        other = prepare(folder, out.with_name(f"{out.name} {workers}"), config)
        assert written(other.out_dir) == plain
        assert (other.funnel, other.summary) == (report.funnel, report.summary)
    assert report.funnel is not None
    assert report.funnel.missing().documents == report.funnel.missing().text_bytes == 0
    return report


@pytest.mark.parametrize("name", ["a", "\udcff\udcfe", "春 \n'"])
def test_a_file_with_an_odd_name_is_cut_without_loss(tmp_path: Path, name: str) -> None:
    """A name that is not UTF-8 ended a run if its file was cut."""
    folder = tmp_path / "in"
    folder.mkdir()
    sentences: list[str] = []
    for number, (kind, make) in enumerate(CUT_KINDS.items()):
        some = [SENTENCE.format(10 * number + n) for n in range(7)]
        (folder / f"{name}{number}.{kind}").write_bytes(make(some))
        sentences += some
    report = check_shards(folder, tmp_path / "out")
    assert report.documents == len(sentences)
    assert set(read_kept(report.out_dir, 1000)) == set(sentences)


@pytest.mark.parametrize("seed", range(6))
def test_prepare_counts_every_member_of_a_mixed_folder(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    folder = tmp_path / "in"
    folder.mkdir()
    count = 0
    for number in range(12):
        member, raw, entries = make_member(draw, number, 2)
        if Path(member).suffix not in (".binx", ".exex", ".gzx"):  # named in the log
            (folder / f"{draw.choice(('', chr(0xDCFF)))}{member}").write_bytes(raw)
            count += entries
    (folder / "empty.txt").write_bytes(draw.choice((b"", b"\xef\xbb\xbf", b" \r\n")))
    (folder / "last.txt").write_text("a sound text")
    report = check_shards(folder, tmp_path / "out")
    assert report.funnel is not None
    assert report.funnel.read.documents == count + 2


# Whole files without an entry; previously, they were neither read nor named.
NO_ENTRIES: dict[str, bytes] = {
    "a.csv": b"text,id\n",
    "b.parquet": parquet([]),
    "c.warc": b"",
    "d.warc.gz": gzip.compress(b""),
    "e.zip": zip_of({}),
    "f.tar": tar_of({}),
    "g.tar.gz": gzip.compress(tar_of({})),
    "h.arc": b"",
    "i.zip": zip_of({"folder/": b""}),
}


def test_files_without_entries_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name, raw in NO_ENTRIES.items():
        (folder / name).write_bytes(raw)
    (folder / "j.zip").write_bytes(zip_of(NO_ENTRIES))
    (folder / "sound.txt").write_text("a sound text")
    report = check_shards(folder, tmp_path / "out")
    assert report.funnel is not None
    assert report.funnel.dropped["no_entries"].documents == 2 * len(NO_ENTRIES)
    assert report.funnel.read.documents == 2 * len(NO_ENTRIES) + 1


def test_a_page_of_frames_is_dropped_without_an_internal_error(tmp_path: Path) -> None:
    page = "<html><frameset><frame src=b.html><noframes><p>text</p></noframes></frameset></html>"
    (tmp_path / "a.html").write_text(page)
    (record,) = read_records(tmp_path / "a.html", ReadOptions())
    parsed = parse_record(record)
    assert isinstance(parsed, Drop)
    assert parsed.rule == "no_main_text"


def test_three_levels_of_tar_gz_are_read(tmp_path: Path) -> None:
    raw = SENTENCE.format(1).encode()
    name = "a.txt"
    for level in range(3):
        raw, name = gzip.compress(tar_of({name: raw})), f"{level}.tar.gz"
    (tmp_path / name).write_bytes(raw)
    (found,) = read_documents(tmp_path)
    assert found.text == SENTENCE.format(1)


def test_a_damaged_member_counts_with_its_size(tmp_path: Path) -> None:
    damaged = b"PK\x03\x04nothing"
    raw = zip_of({"a.docx": damaged, "b.txt": b"a sound text"})
    (tmp_path / "a.zip").write_bytes(raw)
    report, _ = prepare_plainly(tmp_path / "a.zip", tmp_path / "out", PLAIN)
    assert report.funnel is not None
    assert report.funnel.dropped["unreadable"] == Amount(1, len(damaged))


def test_a_bad_chapter_costs_itself_alone(tmp_path: Path) -> None:
    container = '<container><rootfiles><rootfile full-path="c.opf"/></rootfiles></container>'
    items = "".join(
        f'<item id="i{n}" href="{n}.xhtml" media-type="{kind}"/>'
        for n, kind in enumerate(["application/xhtml+xml"] * 4 + ["image/png"])
    )
    spine = "".join(f'<itemref idref="i{n}"/>' for n in (0, 1, 2, 3, 4, 9))
    package = f"<package><manifest>{items}</manifest><spine>{spine}</spine></package>"
    doctype = '<!DOCTYPE html PUBLIC "-//W3C//DTD XHTML 1.1//EN" "xhtml11.dtd">'
    book = zip_of(
        {
            "META-INF/container.xml": container.encode(),
            "c.opf": package.encode(),
            "0.xhtml": f"{doctype}<html><body>A caf&eacute;&nbsp;here.</body></html>".encode(),
            "1.xhtml": b"<html><body><p>not <b>closed</p><br>next</body>",
            "2.xhtml": b"<html><body><p>sound</p></body></html>",
        }
    )
    (tmp_path / "a.epub").write_bytes(book)
    (found,) = read_documents(tmp_path / "a.epub")
    assert found.text == "A café here.\n\nnot closed\nnext\n\nsound"
    assert found.scores == {"damaged_parts": 2}
