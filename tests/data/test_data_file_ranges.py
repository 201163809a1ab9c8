"""Large packed files and Parquet are cut into shards, and nothing is lost or met twice."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from bmforge.data import PrepareConfig, prepare
from bmforge.data.prepare.shards import plan_shards
from bmforge.data.sources.document import Document
from bmforge.data.sources.file_ranges import find_parts, split_kind
from bmforge.data.sources.files import read_records
from bmforge.data.sources.record import ReadOptions

DRAW = random.Random(5)
HAN = "春眠不觉晓处处闻啼鸟夜来风雨声花落知多少床前明月光疑是地上霜举头望低思故乡"
TEXTS = [f"text {n} " + "".join(DRAW.choices(HAN, k=5 + n % 40)) for n in range(300)]
LINES = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in TEXTS)


def zstd(data: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    half = len(data) // 2  # two frames
    pack = zstandard.ZstdCompressor().compress
    return pack(data[:half]) + pack(data[half:])


def parquet(path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(arrow.table({"text": TEXTS}), path, row_group_size=17)


PACK: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstd,
}


def write(folder: Path, kind: str, encoding: str = "utf-8") -> Path:
    """Write the texts as one file of that kind."""
    if kind == "parquet":
        parquet(folder / "a.parquet")
        return folder / "a.parquet"
    path = folder / f"a.jsonl.{kind}"
    path.write_bytes(PACK[kind](LINES.encode(encoding)))
    return path


def read_plan(path: Path, shard_bytes: int) -> tuple[int, list[Document]]:
    """Return how many shards there are, and all documents in their pieces."""
    found, shards = [], plan_shards([path], shard_bytes).shards
    for shard in shards:
        for piece in shard.ranges:
            part = read_records(
                Path(piece.path),
                ReadOptions(),
                begin=piece.begin,
                end=piece.end,
                line=piece.line,
            )
            found += [record.parse() for record in part]
    return len(shards), found  # type: ignore[return-value]


@pytest.mark.parametrize("kind", [*PACK, "parquet"])
@pytest.mark.parametrize("shard_bytes", [1500, 9000])
def test_parts_are_the_whole(tmp_path: Path, kind: str, shard_bytes: int) -> None:
    path = write(tmp_path, kind)
    shards, found = read_plan(path, shard_bytes)
    whole = [record.parse() for record in read_records(path, ReadOptions())]
    assert [document.text for document in found] == TEXTS
    assert found == whole  # places and ids too
    assert shards > 3


def test_texts_of_another_encoding(tmp_path: Path) -> None:
    path = write(tmp_path, "gz", "gb18030")
    shards, found = read_plan(path, 6000)
    assert (shards > 3, [document.text for document in found]) == (True, TEXTS)


def test_a_packed_file_has_at_most_sixteen_parts(tmp_path: Path) -> None:
    path = write(tmp_path, "gz")
    parts = find_parts(path, "packed", 100)
    assert 8 < len(parts.at) + 1 <= 16
    assert parts.units == len(LINES.encode())
    for place, line in parts.at:
        before = LINES.encode()[:place]
        assert before.endswith(b"\n")
        assert before.count(b"\n") + 1 == line


def test_what_cannot_be_cut_is_whole(tmp_path: Path) -> None:
    whole = gzip.compress(LINES.encode())
    for name, data in (
        ("cut.jsonl.gz", whole[:-9]),
        ("flipped.jsonl.gz", whole[:50] + b"\0\0\0" + whole[53:]),
        ("twice.jsonl.gz.gz", gzip.compress(whole)),
        ("wide.jsonl.gz", gzip.compress(LINES.encode("utf-16"))),
        ("text.txt.gz", gzip.compress(LINES.encode())),
    ):
        path = tmp_path / name
        path.write_bytes(data)
        how = split_kind(path)
        assert how != "packed" or find_parts(path, how, 1000).at == ()
        (shard,) = plan_shards([path], 1000).shards
        assert [piece.end for piece in shard.ranges] == [-1]


@pytest.mark.parametrize("kind", ["gz", "parquet"])
def test_prepared_bytes_do_not_depend_on_the_cut(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, kind)
    made = []
    for number, (shard_bytes, workers) in enumerate([(1 << 30, 0), (5000, 0), (9000, 2)]):
        out = tmp_path / str(number)
        config = PrepareConfig(vocab_size=300, shard_bytes=shard_bytes, workers=workers)
        assert prepare(path, out, config).documents == len(TEXTS)
        files = (p for p in out.rglob("*") if p.is_file() and p.name != "prepared.toml")
        made.append({p.relative_to(out): p.read_bytes() for p in files})
    assert made[0] == made[1] == made[2]
