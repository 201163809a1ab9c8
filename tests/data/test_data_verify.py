"""A prepared corpus is compared with its record, and its counts with plain ones."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bmforge.data import PrepareConfig, prepare, verify_store
from bmforge.data.prepare.record import read_record
from bmforge.data.prepare.shards import InputFile
from bmforge.data.prepare.summary import Summary, choose_grouping, group_of
from bmforge.data.sources.document import Document
from bmforge.errors import DataError

CONFIG = PrepareConfig(vocab_size=300, validation_fraction=0.2, shard_bytes=1200)


def write_texts(folder: Path) -> dict[str, list[str]]:
    """Two files with copies within and across them, near copies, and empty texts."""
    folder.mkdir()
    texts = [f"text number {i} of a few about the river " * (2 + i % 5) for i in range(40)]
    near = [f"{text} again" for text in texts[3:12]]
    files = {"a": [*texts[:25], "", *texts[2:6]], "b": [*texts[20:], *near, " "]}
    for name, part in files.items():
        lines = "".join(
            json.dumps({"text": text, "date": f"20{10 + n % 3}-05"}) + "\n"
            for n, text in enumerate(part)
        )
        (folder / f"{name}.jsonl").write_text(lines)
    return files


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    write_texts(folder / "in")
    prepare(folder / "in", folder / "out", replace(CONFIG, near_duplicates=0.8))
    return folder / "out"


@pytest.fixture
def copy(prepared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(prepared, tmp_path / "out")


def test_a_whole_corpus_has_nothing_wrong(prepared: Path) -> None:
    assert verify_store(prepared) == []
    report, _ = read_record(prepared)
    assert {output.path for output in report.outputs} == {
        path.relative_to(prepared).as_posix()
        for path in prepared.rglob("*")
        if path.is_file() and path.name != "prepared.toml"
    }
    parts = next(output.parts for output in report.outputs if output.path == "train/tokens.bin")
    assert len(parts) > 3
    assert parts[-1].end == (prepared / "train" / "tokens.bin").stat().st_size


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.999])
def test_a_flipped_byte_is_found_with_its_shard(copy: Path, share: float) -> None:
    path = copy / "train" / "tokens.bin"
    data = bytearray(path.read_bytes())
    place = int(share * len(data))
    data[place] ^= 4
    path.write_bytes(data)
    parts = next(
        output.parts for output in read_record(copy)[0].outputs if output.path == "train/tokens.bin"
    )
    (hit,) = (
        part
        for before, part in zip([0, *(part.end for part in parts)], parts, strict=False)
        if before <= place < part.end
    )
    first, second = verify_store(copy)
    assert "the content of train/tokens.bin does not match" in first
    assert f"shard {hit.shard} is damaged" in second
    assert hit.inputs in second
    assert ".jsonl from line" in hit.inputs


DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    ("gone", lambda out: (out / "train" / "tokens.idx").unlink(), "tokens.idx does not exist"),
    (
        "cut",
        lambda out: (out / "dropped.jsonl").write_bytes((out / "dropped.jsonl").read_bytes()[:99]),
        "dropped.jsonl has 99 bytes",
    ),
    (
        "tokenizer",
        lambda out: (out / "tokenizer" / "tokenizer.json").write_bytes(b"{}"),
        "tokenizer.json has 2 bytes",
    ),
    ("count", lambda out: edit(out, "\ntokens = ", "\ntokens = 1"), "prepared.toml lists 1"),
    (
        "eos",
        lambda out: edit(out, "eos_id = 0", "eos_id = "),
        "documents do not end with the token 10",
    ),
    ("kept", lambda out: edit(out, "documents = ", "documents = 1"), "the stages keep"),
]


def edit(out: Path, old: str, new: str) -> None:
    """Put a digit into the first number of that name in the record."""
    record = (out / "prepared.toml").read_text("utf-8")
    if new.endswith("= "):
        old, new = old, new + "10"
    (out / "prepared.toml").write_text(record.replace(old, new, 1), "utf-8")


@pytest.mark.parametrize(
    ("change", "said"), [one[1:] for one in DAMAGE], ids=[d[0] for d in DAMAGE]
)
def test_damage_is_named(copy: Path, change: Callable[[Path], object], said: str) -> None:
    change(copy)
    assert said in "\n".join(verify_store(copy))


def test_a_record_of_an_older_form_has_counts_alone(copy: Path) -> None:
    record = (copy / "prepared.toml").read_text("utf-8")
    head, _, tail = record.partition("[summary")
    old = head + tail[tail.index("[[inputs]]") :] if "[[inputs]]" in tail else head
    (copy / "prepared.toml").write_text(old, "utf-8")
    assert verify_store(copy) == []


def test_a_directory_without_a_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no prepared\.toml"):
        verify_store(tmp_path)


def test_counts_are_those_of_a_plain_reading(tmp_path: Path) -> None:
    files = write_texts(tmp_path / "in")
    report = prepare(tmp_path / "in", tmp_path / "out", CONFIG)
    summary = report.summary
    assert summary is not None
    seen: set[str] = set()
    for name, texts in files.items():
        expected: Counter[str] = Counter()
        for text in texts:
            kept = "empty" if not text.strip() else "duplicate" if text in seen else "kept"
            seen.add(text)
            expected[kept] += 1
        found = summary.sources[str(tmp_path / "in" / f"{name}.jsonl")]
        assert {outcome: counts[0] for outcome, counts in found.items()} == expected
    for table in (summary.years, summary.languages, summary.lengths):
        documents, text_bytes, tokens = (
            sum(column) for column in zip(*table.values(), strict=True)
        )
        assert documents == report.documents
        assert text_bytes == report.train.text_bytes + report.validation.text_bytes
        ends = report.train.documents + report.validation.documents
        assert tokens == report.train.tokens + report.validation.tokens
        assert ends >= documents
    assert set(summary.years) == {"2010", "2011", "2012"}
    assert list(summary.languages) == ["unknown"]


def test_counts_do_not_depend_on_the_cut(tmp_path: Path) -> None:
    write_texts(tmp_path / "in")
    config = replace(CONFIG, near_duplicates=0.8)
    found = [
        prepare(tmp_path / "in", tmp_path / str(size), replace(config, shard_bytes=size)).summary
        for size in (300, 1 << 20)
    ]
    assert found[0] == found[1]
    assert found[0] is not None
    assert sum(count for (count,) in found[0].clusters.values()) > 5


def test_groups_of_sources() -> None:
    files = [InputFile(f"/in/{n % 50}/{n}.html", 1, 0, "") for n in range(60)]
    assert choose_grouping(files[:40]) == "file"
    assert choose_grouping(files) == "all"
    assert choose_grouping([*files[:39], *files[:10], *files[50:52]]) == "folder"
    many = [InputFile(f"/in/{n % 3}/{n}.html", 1, 0, "") for n in range(60)]
    assert choose_grouping(many) == "folder"
    assert group_of("/in/2/59.html", "folder") == "/in/2"


def test_the_rarest_of_many_values_are_put_together() -> None:
    summary = Summary()
    for number in range(60):
        for _ in range(60 - number):
            summary.add_kept(Document("x", "a", language=f"l{number:02d}"), 3, 2)
    short = summary.shortened().languages
    assert len(short) == 51
    assert short["others"] == [55, 165, 110]
    assert sum(counts[0] for counts in short.values()) == sum(range(1, 61))
