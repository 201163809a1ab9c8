from __future__ import annotations

import csv
import gzip
import json
import re
import sys
from pathlib import Path

import pytest
import zstandard

from bmforge.data import (
    Document,
    PrepareConfig,
    SkipCount,
    prepare,
    python_topics,
    read_documents,
)
from bmforge.data.sources.files import parse_record, read_records
from bmforge.data.sources.record import ReadOptions
from bmforge.errors import DataError, MissingDependencyError


def write_lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records), "utf-8")
    return path


def test_files_and_directories_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.md").write_text("zwei", "utf-8")
    (tmp_path / "a.txt").write_bytes("\ufeffeins\n".encode())
    (tmp_path / "ignored.png").write_bytes(b"\0")
    (tmp_path / ".hidden.txt").write_text("no")
    lines = write_lines(tmp_path / "c.jsonl", {"text": "drei"}, {"text": "vier"})
    lines.write_text(lines.read_text() + "\n\n")
    found = list(read_documents(tmp_path))
    assert found == [
        Document("eins\n", str(tmp_path / "a.txt"), "1"),
        Document("zwei", str(tmp_path / "b" / "two.md"), "1"),
        Document("drei", str(lines), "1"),
        Document("vier", str(lines), "2"),
    ]
    assert [d.text for d in read_documents([lines, tmp_path / "a.txt"])] == [
        "drei",
        "vier",
        "eins\n",
    ]


def test_packed_files(tmp_path: Path) -> None:
    text = "".join(json.dumps({"body": f"text {i} " * 50}) + "\n" for i in range(3000)).encode()
    half = len(text) // 2
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text))
    pack = zstandard.ZstdCompressor().compress
    (tmp_path / "b.jsonl.zst").write_bytes(pack(text[:half]) + pack(text[half:]))  # two frames
    (tmp_path / "c.txt.zst").write_bytes(pack("Ä".encode()))
    first, second = (
        [d.text for d in read_documents(tmp_path / name, text_field="body")]
        for name in ("a.jsonl.gz", "b.jsonl.zst")
    )
    assert first == second == [f"text {i} " * 50 for i in range(3000)]
    assert [d.text for d in read_documents(str(tmp_path / "c.txt.zst"))] == ["Ä"]


BAD_FILES = {
    "empty.txt": (b"", "is empty"),
    "blank.md": (b" \n", "is empty"),
    "empty.jsonl": (b"\n", "is empty"),
    "binary.txt": (b"ab\0cd", "binary .* offset 2"),
    "gbk.txt": ("中文".encode("gb18030"), "not UTF-8 .*offset 0.*iconv"),
    "cut.txt.gz": (gzip.compress(b"x" * 1000)[:-9], "copied completely"),
    "no.txt.gz": (b"plain text", "copied completely"),
    "cut.txt.zst": (zstandard.compress(b"x" * 1000)[:-2], "copied completely"),
    "no.txt.zst": (b"plain text", "copied completely"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file_is_named(tmp_path: Path, name: str) -> None:
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    (tmp_path / "zz.txt").write_text("good")
    with pytest.raises(DataError, match=message) as caught:
        list(read_documents(tmp_path))
    assert name in str(caught.value)
    skipped = SkipCount()
    texts = [d.text for d in read_documents(tmp_path, skip_bad=True, skipped=skipped)]
    assert texts == ["good"]
    assert skipped.count == 1


BAD_LINES = {
    "not json": (b"{oops", "not JSON"),
    "no field": (b'{"texts": "a"}', "no field 'text'.*texts"),
    "no object": (b"[1]", "no JSON object"),
    "no string": (b'{"text": 3}', "of type int"),
    "not utf-8": (b'{"text": "\xff"}', "not UTF-8"),
    "zero byte": (b'{"text": "\0"}', "binary"),
    "half a surrogate": (b'{"text": "\\ud800"}', "not valid Unicode"),
    "too deep": (b"[" * 100_000, "not JSON"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_bad_line_is_named(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, message = BAD_LINES[name]
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"text": "one"}\n' + content + b'\n{"text": "three"}\n')
    with pytest.raises(DataError, match=message) as caught:
        list(read_documents(path))
    assert f"{path}:2" in str(caught.value)

    skipped = SkipCount()
    found = list(read_documents(path, skip_bad=True, skipped=skipped))
    assert [(d.text, d.place) for d in found] == [("one", "1"), ("three", "3")]
    assert skipped.count == 1
    assert f"{path}:2" in skipped.messages[0]
    assert "skipped 1 invalid" in caplog.text


def test_a_null_text_is_empty(tmp_path: Path) -> None:
    """`prepare` drops it like an empty text, and does not stop as at a number."""
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{"a": {"text": "one"}}, {"a": {"text": None}}, {"a": None}, {"a": {"text": "two"}}]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "list.json").write_text(json.dumps(rows))
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    texts = [document.text for document in read_documents(tmp_path, text_field="a.text")]
    assert texts == ["one", "", "", "two"] * 3
    config = PrepareConfig(vocab_size=300, validation_fraction=0.0, text_field="a.text")
    report = prepare(tmp_path, tmp_path / "out", config)
    assert (report.documents, report.empty, report.duplicates) == (2, 6, 4)


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_a_table_may_have_another_delimiter(tmp_path: Path, delimiter: str) -> None:
    rows = [["id", "text"], ["1", f"one{delimiter} two, three; four"], ["2", 'a "b"\nc']]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    texts = [document.text for document in read_documents(tmp_path)]
    assert texts == [row[1] for row in rows[1:]]


READ_TABLES = {
    "stray.tsv": ('1\t"Open.\n2\tNext.\n3\tA "word".\n', ['"Open.', "Next.", 'A "word".']),
    "pair.tsv": ('1\t"Open.\n2\tClosed."\n', ['"Open.', 'Closed."']),
    "last.tsv": ('1\t"Open\n2\tend', ['"Open', "end"]),
    "lines.tsv": ('1\t"Two\nlines"\n2\t"a ""b"""\n', ["Two\nlines", 'a "b"']),
    "lines.csv": ('1,"Two\nlines"\n2,"a" b\n3,c "d"\n', ["Two\nlines", "a b", 'c "d"']),
    "open.csv": ('1,a\n2,"Open\n3,"Third" row\n4,d\n', ["a", "lines 3 to 4", "d"]),
    "end.csv": ('1,a\n2,"Open\n3,c\n4,d\n', ["a", "lines 3 to 5"]),
}


@pytest.mark.parametrize("name", READ_TABLES)
def test_a_stray_quotation_mark_joins_no_rows(tmp_path: Path, name: str) -> None:
    """With tabs, each line is a row; with commas, the lines are one error that names them."""
    content, expected = READ_TABLES[name]
    (tmp_path / name).write_text(("id\ttext\n" if name.endswith("tsv") else "id,text\n") + content)
    texts = []
    for record in read_records(tmp_path / name, ReadOptions()):
        try:
            texts.append(parse_record(record).text)  # type: ignore[union-attr]
        except DataError as error:
            texts += re.findall("lines . to .", str(error))
    assert texts == expected


def test_two_text_columns_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,text\na,b\n")
    with pytest.raises(DataError, match="several columns have the name 'text'"):
        list(read_records(tmp_path / "a.csv", ReadOptions()))


def test_bad_paths(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere.*does not exist"):
        list(read_documents(tmp_path / "nowhere", skip_bad=True))
    with pytest.raises(DataError, match="contains no input file"):
        list(read_documents(tmp_path))
    with pytest.raises(DataError, match="the list of inputs is empty"):
        list(read_documents([]))
    (tmp_path / "a.png").write_bytes(b"x")
    with pytest.raises(DataError, match=r"unknown suffix.*\.jsonl"):
        list(read_documents(tmp_path / "a.png"))


def test_zst_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt.zst").write_bytes(zstandard.compress(b"x"))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingDependencyError, match=r"\[data\]"):
        list(read_documents(tmp_path))


def test_python_topics() -> None:
    topics = list(python_topics())
    assert len(topics) > 50
    assert sum(len(d.text) for d in topics) > 400_000
    assert len({d.source for d in topics}) == len(topics)
