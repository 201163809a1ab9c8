"""Files that attack readers, and texts that attack the steps: bounded, and counted."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
import tracemalloc
import zipfile
from collections import deque
from collections.abc import Callable
from pathlib import Path

import hostile_inputs
import pytest
from hostile_inputs import (
    FILES,
    TEXTS,
    make_arrow,
    make_nested_pdf,
    make_overlapping_zip,
    make_packed_epub,
    make_parquet,
)

from bmforge.data.clean.lines import drop_boilerplate, join_wrapped_lines
from bmforge.data.clean.normalize import normalize_text
from bmforge.data.clean.private import MaskPrivate
from bmforge.data.clean.repair import repair_text
from bmforge.data.clean.rule import explain_text
from bmforge.data.clean.rules import RULE_SETS
from bmforge.data.clean.script import detect_script, strip_invisible
from bmforge.data.clean.statistics import TextStatistics
from bmforge.data.dedup.tokens import locate_tokens
from bmforge.data.sources.books import read_epub
from bmforge.data.sources.document import Document
from bmforge.data.sources.files import parse_record, read_records
from bmforge.data.sources.pdf_process import PdfLimitError, PdfProcess
from bmforge.data.sources.record import ReadOptions, Where
from bmforge.errors import DataError

KILOBYTE, MEGABYTE = 1 << 10, 1_000_000
SHORT = ("links.tar", "shared.xlsx", "heads.warc")
IN_GROUPS = [sorted(FILES)[start : start + 8] for start in range(0, len(FILES), 8)]
needs_linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")


def check_files(folder: Path, size: int, names: list[str] | tuple[str, ...]) -> None:
    """Each file costs at most 1 GB and a minute, and never the sound file beside it."""
    program = [sys.executable, hostile_inputs.__file__, str(folder), str(size), *names]
    ran = subprocess.run(program, capture_output=True, text=True, env=dict(os.environ))
    assert ran.returncode == 0, ran.stderr[-2000:]
    results = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert [result["name"] for result in results] == list(names)
    bad = [
        result
        for result in results
        if "error" in result
        or result["memory_mb"] > 1024
        or result["seconds"] > 60
        or result["missing"]
        or not result["is_sound_kept"]
    ]
    assert not bad


@needs_linux
def test_attacking_files_cost_neither_memory_nor_the_run(tmp_path: Path) -> None:
    check_files(tmp_path, 20_000, SHORT)


@needs_linux
@pytest.mark.long
@pytest.mark.parametrize("number", range(len(IN_GROUPS)))
def test_all_attacking_files_cost_neither_memory_nor_the_run(tmp_path: Path, number: int) -> None:
    check_files(tmp_path, 200_000, IN_GROUPS[number])


@needs_linux
@pytest.mark.long
def test_a_pdf_of_nested_forms_costs_neither_memory_nor_the_run(tmp_path: Path) -> None:
    check_files(tmp_path, MEGABYTE, ["nested.pdf"])


@needs_linux
@pytest.mark.parametrize(
    ("levels", "size", "limits", "reason"),
    [(4, 10, (1 << 27, 60), "memory"), (8, MEGABYTE, (1 << 30, 1), "cpu_time")],
)
def test_a_pdf_that_exceeds_a_limit_is_named_and_the_next_is_read(
    levels: int, size: int, limits: tuple[int, int], reason: str
) -> None:
    """Four levels draw 100,000 texts; each page object takes more than 1 kB in pdfium."""
    pytest.importorskip("pypdfium2")
    process = PdfProcess(*limits)
    with pytest.raises(PdfLimitError, match=reason):
        process.read_pages(make_nested_pdf(levels, size), MEGABYTE)
    pages = process.read_pages(make_nested_pdf(1, 10), MEGABYTE)
    process.close()
    assert [page.split() for page in pages] == [["word"] * 200]


def test_a_pdf_that_exceeds_a_limit_is_dropped_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_pages(process: PdfProcess, raw: bytes, most_characters: int) -> list[str]:
        raise PdfLimitError("memory")

    monkeypatch.setattr(PdfProcess, "read_pages", read_pages)
    (tmp_path / "a.pdf").write_bytes(make_nested_pdf(1, 10))
    records = read_records(tmp_path / "a.pdf", ReadOptions())
    (parsed,) = [parse_record(record) for record in records]
    assert (parsed.rule, parsed.value) == ("pdf_too_complex", "memory")  # type: ignore[union-attr]


@pytest.mark.parametrize("make", [make_parquet, make_arrow])
def test_rows_that_share_a_long_text_are_bounded(
    tmp_path: Path, make: Callable[[int], bytes]
) -> None:
    """A table of some kilobytes has 4,000 rows of 1 MB; reading stops after 32 MB."""
    raw = make(MEGABYTE)
    assert len(raw) < 100 * KILOBYTE
    path = tmp_path / ("a.parquet" if make is make_parquet else "a.arrow")
    path.write_bytes(raw)
    sizes: list[int] = []
    records = (sizes.append(record.size_bytes) for record in read_records(path, ReadOptions()))
    with pytest.raises(DataError, match="decompression bomb"):
        deque(records, maxlen=0)
    total = sum(sizes)
    assert MEGABYTE < total < 34 * MEGABYTE


def test_a_zip_archive_that_lists_the_same_data_often_is_bounded(tmp_path: Path) -> None:
    """Each of 200 members has the same 3 MB; members beyond 32 MB in all are dropped."""
    (tmp_path / "a.zip").write_bytes(make_overlapping_zip(200_000))
    parsed = [parse_record(record) for record in read_records(tmp_path / "a.zip", ReadOptions())]
    rules = [getattr(one, "rule", "") for one in parsed]
    assert rules == [""] * 10 + ["archive_ratio"] * 190


@pytest.mark.parametrize("stated", ["its size", "100 bytes"])
@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_parts_of_a_book_are_not_read_beyond_the_limit(method: int, stated: str) -> None:
    """A chapter of 32 MB, in a file of 100 kB at most, is read up to a limit of 1 MB."""
    size = 32 * MEGABYTE
    raw = make_packed_epub(size, method, size if stated == "its size" else 100)
    assert len(raw) < 100 * KILOBYTE
    where = Where("a.epub", budget_bytes=MEGABYTE)
    (record,) = read_epub(io.BytesIO(raw), where, ReadOptions())
    tracemalloc.start()
    with pytest.raises(DataError, match="no readable chapter"):
        record.parse()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 * MEGABYTE  # the dictionary of LZMA has 8 MiB


def apply_rules(text: str) -> None:
    statistics = TextStatistics(text)
    for rules in RULE_SETS.values():
        explain_text(statistics, rules)
        if rules.rewrite:
            rules.rewrite(statistics)


mask = MaskPrivate(regions=("US", "DE", "GB", "FR"))
STEPS: dict[str, Callable[[str], object]] = {
    "mask": lambda text: mask(Document(text, "x")),
    "rules": apply_rules,
    "boilerplate": drop_boilerplate,
    "wrapped": join_wrapped_lines,
    "repair": repair_text,
    "normalize": normalize_text,
    "script": detect_script,
    "invisible": strip_invisible,
    "tokens": locate_tokens,
}


def slowdown(step: Callable[[str], object], piece: str, size: int) -> float:
    """Return the CPU time per character at four times the size, relative to `size`.

    The least of two runs counts. Times below 0.1 seconds are too short to compare.
    """
    seconds = []
    for factor in (1, 4):
        text, least = piece * (factor * size // len(piece)), 99.0
        for _ in range(2):
            begin = time.process_time()
            step(text)
            least = min(least, time.process_time() - begin)
        seconds.append(least)
    return seconds[1] / max(seconds[0], 0.1) / 4


@pytest.mark.parametrize("step", STEPS)
def test_steps_take_linear_time(step: str) -> None:
    for name in ("at signs", "hexadecimal groups", "hard wraps", "combining marks"):
        assert slowdown(STEPS[step], TEXTS[name], 4 * KILOBYTE) < 2, name


@pytest.mark.long
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", TEXTS)
def test_steps_take_linear_time_on_each_text(step: str, name: str) -> None:
    assert slowdown(STEPS[step], TEXTS[name], 64 * KILOBYTE) < 2
