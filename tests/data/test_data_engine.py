"""The engine: the same bytes however the work is cut, shared out and interrupted."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prepare_cases import prepare_plainly, written

from bmforge.data import Document, DocumentStage, PrepareConfig, prepare, show_preparation
from bmforge.data.clean.drop import Drop
from bmforge.data.prepare import encode, stages
from bmforge.data.prepare import journal as journal_module
from bmforge.data.prepare.documents import (
    NORMALISE,
    DocumentsTask,
    make_documents,
    read_digests,
)
from bmforge.data.prepare.engine import Limits, SkippedEntry, StagePart, run_parts
from bmforge.data.prepare.funnel import Amount, Dropped, Funnel
from bmforge.data.prepare.journal import Journal, write_hashed
from bmforge.data.prepare.shards import plan_shards
from bmforge.data.sources.files import read_records
from bmforge.data.sources.record import ReadOptions
from bmforge.errors import ConfigError, DataError

CONFIG = PrepareConfig(vocab_size=300, validation_fraction=0.2, shard_bytes=2000)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of many lengths in three files, with copies across them and empty ones."""
    folder = tmp_path_factory.mktemp("texts")
    texts = [f"text number {i} " * (1 + i % 7) for i in range(120)]
    for name, part in (("a", texts[:90]), ("b", texts[80:]), ("c", ["", *texts[5:8], " \n"])):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in part)
        (folder / f"{name}.jsonl").write_text(lines)
    (folder / "d.txt").write_text("one more\r\n")
    return folder


@pytest.fixture(scope="module")
def plain(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return prepare_plainly(corpus, tmp_path_factory.mktemp("plain"), CONFIG)[1]


@pytest.mark.parametrize("shard_bytes", [1, 700, 5000])
def test_bytes_do_not_depend_on_the_cut(
    corpus: Path, plain: dict[str, bytes], tmp_path: Path, shard_bytes: int
) -> None:
    report = prepare(corpus, tmp_path, replace(CONFIG, shard_bytes=shard_bytes))
    assert written(tmp_path) == plain
    assert (report.documents, report.duplicates, report.empty) == (121, 13, 2)
    assert report.funnel is not None
    assert report.funnel.missing() == Amount()
    assert report.funnel.read.documents == 136


def test_two_workers_write_the_same(corpus: Path, plain: dict[str, bytes], tmp_path: Path) -> None:
    prepare(corpus, tmp_path, replace(CONFIG, workers=2))
    assert written(tmp_path) == plain


def test_sorts_on_disk_choose_the_same(
    corpus: Path, plain: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "SORT_BYTES", 100)
    prepare(corpus, tmp_path, CONFIG)
    assert written(tmp_path) == plain


class Killed(BaseException):
    """Stands for a kill: nothing may tidy up behind it but what the next start does."""


def test_going_on_after_a_kill_at_every_write(
    corpus: Path, plain: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at the n-th sync, for every n: the rest is done, and no finished shard again."""
    sync, made = os.fsync, make_documents
    left, done = [0], []

    def fragile(descriptor: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Killed
        sync(descriptor)

    def counted(part: StagePart, beat: Callable[..., None]) -> dict[str, Any]:
        result = made(part, beat)
        done.append(part.number)
        return result

    monkeypatch.setattr(os, "fsync", fragile)
    monkeypatch.setattr(stages, "make_documents", counted)
    monkeypatch.setattr(journal_module.fcntl, "flock", lambda *args: None)
    config = replace(CONFIG, shard_bytes=8000)
    shards = len(plan_shards(sorted(corpus.iterdir()), 8000).shards)
    kills, report = 0, None
    while report is None:
        left[0] = 1 + kills % 23
        try:
            report = prepare(corpus, tmp_path, config)
        except Killed:
            kills += 1
            assert kills < 300
    assert kills > 10
    assert written(tmp_path) == plain
    assert len(done) <= shards + kills  # at most the shard at hand is lost with each
    assert sorted(set(done)) == list(range(shards))


def test_a_kill_leaves_half_a_line_and_half_a_file(
    corpus: Path, plain: dict[str, bytes], tmp_path: Path
) -> None:
    config = replace(CONFIG, keep_stages=True)
    prepare(corpus, tmp_path, config)
    work = tmp_path / "preparing.tmp"
    lines = (work / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (work / "journal.jsonl").write_bytes(b"".join(lines[:3]) + lines[3][:20])
    (work / "stages" / "documents" / "000001.digests").write_bytes(b"half")
    (work / "stages" / "documents" / "000000.jsonl.77.partial").write_bytes(b"half")
    states = {s.stage: s for s in show_preparation(corpus, tmp_path, config)}
    assert (states["documents"].done, states["split"].done) == (2, 0)
    prepare(corpus, tmp_path, replace(CONFIG, keep_stages=False), overwrite=True)
    assert written(tmp_path) == plain


def test_a_changed_setting_redoes_what_reads_it(corpus: Path, tmp_path: Path) -> None:
    config = replace(CONFIG, keep_stages=True)
    prepare(corpus, tmp_path, config)

    def to_do(**changes: Any) -> list[str]:
        states = show_preparation(corpus, tmp_path, replace(config, **changes))
        return [state.stage for state in states if state.done < state.parts]

    assert to_do() == to_do(workers=3) == []
    assert to_do(vocab_size=301) == ["tokenizer", "encode"]
    assert to_do(seed=1) == ["split", "tokenizer", "encode"]
    assert to_do(skip_bad=True)[0] == "documents"
    fresh = tmp_path / "fresh"
    again = prepare(corpus, tmp_path, replace(config, seed=1, keep_stages=False), overwrite=True)
    assert again.validation == prepare(corpus, fresh, replace(CONFIG, seed=1)).validation
    for name in written(fresh):
        assert (tmp_path / name).read_bytes() == (fresh / name).read_bytes()


def test_two_at_once_are_refused(corpus: Path, tmp_path: Path) -> None:
    with (
        Journal(tmp_path / "preparing.tmp"),
        pytest.raises(ConfigError, match="another process is preparing"),
    ):
        prepare(corpus, tmp_path, CONFIG)


def test_a_file_that_changes_while_it_is_read(corpus: Path, tmp_path: Path) -> None:
    (shard,) = plan_shards([corpus / "d.txt"], 1000).shards
    path = str(corpus / "d.txt")
    task = DocumentsTask(shard, tmp_path, (NORMALISE,), ReadOptions(), False, False, {path: (1, 1)})
    with pytest.raises(DataError, match="changed while it was being read"):
        make_documents(StagePart(0, task), lambda *where: None)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text('ab{}" \r\u00e9\u4e2d', max_size=10), max_size=30),
    st.integers(1, 120),
    st.booleans(),
)
def test_lines_are_cut_at_line_ends(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], size: int, ended: bool
) -> None:
    """Every line once, with its number, whatever the cut; a shard is at most a line too long."""
    folder = tmp_path_factory.mktemp("cut")
    content = ("\n".join(lines) + ("\n" if ended else "")).encode()
    (folder / "a.jsonl").write_bytes(content)
    plan = plan_shards([folder / "a.jsonl"], size)
    found = []
    for shard in plan.shards:
        assert shard.size_bytes <= size + 31
        for piece in shard.ranges:
            if not content.strip():
                continue
            try:
                records = list(
                    read_records(
                        Path(piece.path), ReadOptions(),
                        begin=piece.begin, end=piece.end, line=piece.line,
                    )
                )  # fmt: skip
            except DataError:  # only blank lines
                records = []
            found += [(record.place, record.size_bytes) for record in records]
    split = content.split(b"\n")
    expected = [
        (str(n), len(line) + (n < len(split))) for n, line in enumerate(split, 1) if line.strip()
    ]
    assert found == expected


def test_a_worker_loads_a_tokenizer_once(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tokenizer that encodes leaks memory, so a worker would grow with every shard."""
    prepare(corpus, tmp_path / "out", PrepareConfig(vocab_size=300, keep_stages=True))
    stages_folder = tmp_path / "out" / "preparing.tmp" / "stages"
    tokenizer = stages_folder / "tokenizer"
    chosen = encode.DocumentSplit(
        stages_folder / "documents",
        (len(read_digests(stages_folder / "documents", 0)),),
        stages_folder / "duplicates" / "kept",
        stages_folder / "split" / "held_out",
        None,
        0,
    )
    loaded: list[str] = []
    load = encode.load_tokenizer
    monkeypatch.setattr(encode, "load_tokenizer", lambda path: loaded.append(path) or load(path))
    for round_number in (1, 2):
        for attempt in range(3):
            folder = tmp_path / f"{round_number}-{attempt}"
            task = encode.EncodeTask(0, chosen, tokenizer, 0, folder, False)
            encode.encode_shard(StagePart(0, task), lambda entry, in_reading, name: None)
        assert len(loaded) == round_number
        (tokenizer / "other.txt").write_text("changed")  # loaded again


def test_small_files_share_a_shard(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"{number}.txt").write_bytes(b"x" * 100)
    files = sorted(tmp_path.iterdir())
    shards = plan_shards(files, 350).shards
    assert [len(shard.ranges) for shard in shards] == [3, 3, 3, 1]
    (tmp_path / "4.txt").write_bytes(b"y" * 100)
    changed = plan_shards(files, 350).shards
    assert [a.key == b.key for a, b in zip(shards, changed, strict=True)] == [
        True,
        False,
        True,
        True,
    ]
    with pytest.raises(ConfigError, match="shard_bytes=0"):
        plan_shards(files, 0)


def no_vowels(document: Document) -> Document | Drop:
    """A user's own step."""
    if "7" in document.text:
        return Drop("has_seven", 7, None, document.text[:10])
    return replace(document, text="".join(c for c in document.text if c not in "aeiou"))


def test_own_steps_and_every_drop_has_a_reason(corpus: Path, tmp_path: Path) -> None:
    steps = [DocumentStage("no vowels", no_vowels)]
    report = prepare(corpus, tmp_path / "few", CONFIG, steps=steps)
    assert report.funnel is not None
    raw = [json.loads(line)["text"] for name in "abc" for line in (corpus / f"{name}.jsonl").open()]
    seven = [text for text in raw if "7" in text]
    assert report.funnel.dropped["has_seven"].documents == len(seven)
    assert report.funnel.dropped["has_seven"].text_bytes == sum(map(len, seven))
    others = sum(map(len, [*raw, "one more\r\n"])) - sum(map(len, seven))
    gone = sum(report.funnel.dropped[rule].text_bytes for rule in ("duplicate", "empty"))
    assert report.funnel.kept.text_bytes == others - gone
    assert report.funnel.changed["no vowels"][0] == report.funnel.read.documents - len(seven) - 2
    samples = [json.loads(line) for line in (tmp_path / "few" / "dropped.jsonl").open()]
    mine = [one["id"] for one in samples if one["rule"] == "has_seven"]
    assert len(mine) == 20
    everything = replace(CONFIG, keep_dropped=True)
    prepare(corpus, tmp_path / "all", everything, steps=steps)
    kept = [json.loads(line) for line in (tmp_path / "all" / "dropped.jsonl").open()]
    assert len(kept) == report.funnel.read.documents - report.documents
    ids = sorted(one["id"] for one in kept if one["rule"] == "has_seven")
    assert mine == ids[:20]
    with pytest.raises(ConfigError, match="the steps"):
        prepare(corpus, tmp_path / "few", CONFIG)
    assert prepare(corpus, tmp_path / "few", CONFIG, steps=steps).reused


def die_always(document: Document) -> Document:
    """Kill the process at one document, every time."""
    if "number 33 " in document.text:
        os.kill(os.getpid(), signal.SIGKILL)
    return document


def test_a_worker_that_is_killed_once_costs_nothing(
    corpus: Path, plain: dict[str, bytes], tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    step = DocumentStage("die once", DieOnce(str(mark)))
    report = prepare(corpus, tmp_path / "out", replace(CONFIG, workers=1), steps=[step])
    assert mark.exists()
    assert report.documents == 121
    assert written(tmp_path / "out") == plain


class DieOnce:
    """A step that kills its process at one document, the first time."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __call__(self, document: Document) -> Document:
        if "number 33 " in document.text and not Path(self.mark).exists():
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return document


def test_a_document_that_kills_workers_is_left_out_and_named(corpus: Path, tmp_path: Path) -> None:
    step = DocumentStage("die", die_always)
    report = prepare(corpus, tmp_path, replace(CONFIG, workers=1), steps=[step])
    assert report.documents == 120
    assert report.funnel is not None
    assert report.funnel.missing() == Amount()
    assert report.funnel.dropped["crash"].documents == 1
    (sample,) = [
        entry
        for line in (tmp_path / "dropped.jsonl").open()
        if (entry := json.loads(line))["rule"] == "crash"
    ]
    assert sample["source"] == str(corpus / "a.jsonl")
    assert sample["place"] == "34"
    assert sample["excerpt"].endswith("a.jsonl:34")
    assert sample["value"] == -signal.SIGKILL
    assert show_preparation(corpus, tmp_path, CONFIG)[0].done == 0


def wait_forever(part: StagePart, beat: Callable[[int, bool, str], None]) -> list[str]:
    """Work on four entries, of which the third never ends."""
    done = []
    for entry in range(4):
        beat(entry, False, f"entry {entry}")
        if entry == 2 and not part.skipped:
            signal.pause()
        done.append(f"{entry}" + "".join(b.rule for b in part.skipped if b.entry == entry))
    return done


def grow(part: StagePart, beat: Callable[[int, bool, str], None]) -> str:
    """Stay at its only entry, unless that is to be left out."""
    if part.skipped:
        return part.skipped[0].rule
    beat(0, False, "the large one")
    signal.pause()
    return "done"


def test_an_entry_that_never_ends_is_left_out() -> None:
    skips: list[tuple[int, SkippedEntry]] = []
    limits = Limits(seconds=3.0, memory_bytes=1 << 40)
    parts = [StagePart(7, None)]
    (found,) = run_parts(wait_forever, parts, 1, limits, lambda n, b: skips.append((n, b)))
    assert found == (7, ["0", "1", "2time", "3"])
    ((number, skip),) = skips
    assert (number, skip.entry, skip.rule, skip.name) == (7, 2, "time", "entry 2")


def test_an_entry_that_takes_too_much_memory_is_left_out() -> None:
    limits = Limits(seconds=1e9, memory_bytes=1_000_000)  # every process is larger
    skips: list[SkippedEntry] = []
    (found,) = run_parts(grow, [StagePart(0, None)], 1, limits, lambda n, b: skips.append(b))
    assert found == (0, "memory")
    assert skips[0].value > 1_000_000


def insist(part: StagePart, beat: Callable[[int, bool, str], None]) -> None:
    """Stay at an entry, whatever is to be left out."""
    beat(0, False, "the stubborn one")
    signal.pause()


def test_an_entry_that_cannot_be_left_out_ends_the_work() -> None:
    limits = Limits(seconds=1e9, memory_bytes=1)
    with pytest.raises(
        DataError,
        match=r"the stubborn one cannot be processed: .*The stage cannot skip a single entry",
    ):
        list(run_parts(insist, [StagePart(0, None)], 1, limits, lambda n, b: None))


def refuse(part: StagePart, beat: Callable[[int, bool, str], None]) -> None:
    """Fail, but for part 0."""
    if part.number:
        raise DataError(f"part {part.number} is bad")


def test_the_first_part_that_fails_is_named() -> None:
    parts = [StagePart(number, None) for number in range(5)]
    for workers in (0, 2):
        with pytest.raises(DataError, match="part 1 is bad"):
            list(run_parts(refuse, parts, workers, Limits(1e9, 1 << 40), lambda n, b: None))


def test_samples_do_not_depend_on_the_order() -> None:
    documents = [Document(f"text {i}", "a", str(i)) for i in range(100)]
    lowest = sorted(document.id for document in documents)[:20]
    halves = [Dropped(False), Dropped(False)]
    for number, document in enumerate(documents):
        halves[number % 2].add(document, Drop("rule", number, 5, "text"))
    joined = Dropped(False)
    for half in reversed(halves):
        joined.add_lines(half.lines())
    assert [json.loads(line)["id"] for line in joined.lines().splitlines()] == lowest


def test_a_funnel_adds_up() -> None:
    one, two = Funnel(), Funnel()
    for funnel in (one, two):
        funnel.read.add(3, 30)
        funnel.kept.add(2, 20)
        funnel.drop("short", 1, 10)
        funnel.change("step", 1, 4)
    one.merge(two)
    assert one.missing() == Amount()
    assert Funnel.from_record(json.loads(json.dumps(one.to_record()))) == one
    one.read.add(1, 5)
    assert one.missing() == Amount(1, 5)


def test_nothing_half_written_has_a_name(tmp_path: Path) -> None:
    files: dict[str, str] = {}

    def write_half() -> None:
        with write_hashed(tmp_path / "a", files) as file:
            file.write(b"half")
            raise Killed

    with pytest.raises(Killed):
        write_half()
    assert not files
    assert list(tmp_path.iterdir()) == []
