"""Archives are cut at members, and nothing is lost or met twice; damage is met as without cuts."""

from __future__ import annotations

import gzip
import io
import random
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prepare_cases import written

from bmforge.data import PrepareConfig, prepare
from bmforge.data.prepare.shards import FileRange, plan_shards
from bmforge.data.sources.file_ranges import split_kind
from bmforge.data.sources.files import read_records
from bmforge.data.sources.record import ReadOptions
from bmforge.errors import DataError

DRAW = random.Random(3)
TEXTS = [
    f"text {n} of the archive " + " ".join(DRAW.choices(["mill", "river", "wheel", "stone"], k=30))
    for n in range(60)
]
CONFIG = PrepareConfig(vocab_size=300, validation_fraction=0.1, skip_bad=True)


def record(number: int, text: str) -> bytes:
    body = text.encode()
    head = (
        f"WARC/1.1\r\nWARC-Type: {'resource' if number % 9 else 'metadata'}\r\n"
        f"WARC-Record-ID: <urn:uuid:{number}>\r\nWARC-Date: 2024-05-06T07:08:09Z\r\n"
        f"WARC-Target-URI: https://a.example/{number}\r\nContent-Type: text/plain\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body + b"\r\n\r\n"


def make_zip() -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.mkdir("deep")
        for number, text in enumerate(TEXTS):
            name = f"deep/{number}.txt" if number % 7 else f"{number}.jsonl"
            line = f'{{"text": "{text}"}}\n{{"text": "{text} again"}}\n'
            archive.writestr(name, text if number % 7 else line)
    return held.getvalue()


def make_tar(format: int = tarfile.GNU_FORMAT) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w", format=format) as archive:
        for number, text in enumerate(TEXTS):
            folder = "long" * 40 if number % 5 == 0 else "a"  # a header of its own for the name
            info = tarfile.TarInfo(f"{folder}/{number}.txt")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
            if number % 11 == 0:
                link = tarfile.TarInfo(f"link{number}")
                link.type, link.linkname = tarfile.SYMTYPE, "elsewhere"
                archive.addfile(link)
    return held.getvalue()


def make(kind: str) -> bytes:
    if kind == "zip":
        return make_zip()
    if kind in ("tar", "pax.tar"):
        return make_tar(tarfile.PAX_FORMAT if kind == "pax.tar" else tarfile.GNU_FORMAT)
    records = [record(number, text) for number, text in enumerate(TEXTS)]
    if kind == "warc":
        return b"".join(records)
    packed = [gzip.compress(one) for one in records]
    if kind == "damaged.warc.gz":
        packed[20] = packed[20][:40] + b"\xff\xff\xff\xff" + packed[20][44:]
        packed[40] = packed[40][:-30]
    return b"".join(packed)


KINDS = ["zip", "tar", "pax.tar", "warc", "warc.gz", "damaged.warc.gz"]


def read_piece(path: Path, piece: FileRange) -> Iterator[str]:
    """Yield place, size and document of each entry, or what is wrong with it."""
    for one in read_records(path, ReadOptions(), begin=piece.begin, end=piece.end, line=piece.line):
        try:
            said = repr(one.parse())
        except DataError as error:
            said = str(error)
        yield f"{one.place} {one.size_bytes} {said}"


def entries(path: Path, shard_bytes: int) -> tuple[int, list[str]]:
    """Return how many shards there are, and what each entry is, in order."""
    found: list[str] = []
    shards = plan_shards([path], shard_bytes).shards
    for shard in shards:
        for piece in shard.ranges:
            try:
                found += read_piece(path, piece)
            except DataError as error:
                found.append(str(error))
    return len(shards), found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shard_bytes", [700, 3000])
def test_parts_are_the_whole(tmp_path: Path, kind: str, shard_bytes: int) -> None:
    if "warc" in kind:
        pytest.importorskip("fastwarc", reason="needs the extra data")
    path = tmp_path / f"a.{kind}"
    path.write_bytes(make(kind))
    assert split_kind(path) == "members"
    one, whole = entries(path, 1 << 30)
    shards, found = entries(path, shard_bytes)
    assert one == 1
    assert shards >= 3
    assert found == whole
    assert len(whole) >= 50


@pytest.mark.parametrize("kind", ["zip", "tar", "damaged.warc.gz"])
def test_a_preparation_does_not_depend_on_the_cut(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("fastwarc", reason="needs the extra data")
    path = tmp_path / f"a.{kind}"
    path.write_bytes(make(kind))
    found = []
    for size, workers in ((1 << 30, 0), (1500, 2)):
        out = tmp_path / str(size)
        report = prepare(path, out, replace(CONFIG, shard_bytes=size, workers=workers))
        found.append((written(out), report.funnel))
    assert found[0] == found[1]


def test_a_header_for_all_members_is_not_cut_off(tmp_path: Path) -> None:
    held = io.BytesIO()
    with tarfile.open(
        fileobj=held, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "of all"}
    ) as archive:
        for number, text in enumerate(TEXTS):
            info = tarfile.TarInfo(f"{number}.txt")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    path = tmp_path / "a.tar"
    path.write_bytes(held.getvalue())
    assert len(plan_shards([path], 700).shards) == 1
    assert len(entries(path, 700)[1]) == len(TEXTS)


@pytest.mark.parametrize(("kind", "left"), [("zip", -3000), ("tar", 50_100)])
def test_a_damaged_archive_is_read_as_without_cuts(tmp_path: Path, kind: str, left: int) -> None:
    path = tmp_path / f"a.{kind}"
    path.write_bytes(make(kind)[:left])
    found = entries(path, 700)[1]
    assert found == entries(path, 1 << 30)[1]
    assert "Download it again, or remove it from the input." in found[-1]
