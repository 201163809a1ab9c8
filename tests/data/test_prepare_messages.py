"""What `bmforge prepare` tells the user: replaced characters, regions, text lost per page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lxml import html

from bmforge.cli import main
from bmforge.data.prepare.summary import Summary
from bmforge.data.report import write_corpus_report
from bmforge.data.sources import html as html_source
from bmforge.data.sources.document import Document
from bmforge.data.sources.main_text import MainText

SIZES = ("--vocab-size", "300", "--validation-fraction", "0")
LONG = "The council met again on Monday and talked about the old bridge over the river. " * 12


def run(folder: Path, *options: str) -> int:
    return main(["prepare", str(folder / "in"), "--out", str(folder / "out"), *SIZES, *options])


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    for number in range(4):
        raw = f"Straße {number} über Köln. {LONG}".encode()
        bad = raw.replace(b"council", b"c\xffuncil", number)
        (tmp_path / "in" / f"{number}.txt").write_bytes(bad)
    return tmp_path


def test_replaced_characters_are_counted(damaged: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert run(damaged, "--errors", "replace") == 0
    # U+FFFD has three bytes instead of the damaged one.
    size = sum(path.stat().st_size for path in (damaged / "in").iterdir()) + 6 * 2
    share = f"{100 * 6 / size:.3g}"
    said = f"replacing damaged characters: 3 documents, 6 characters ({share} % of the bytes read)"
    assert f"changed by {said}" in caplog.text
    page = html.fromstring(write_corpus_report(damaged / "out").read_text("utf-8"))
    rows = [[cell.text_content() for cell in row] for row in page.iter("tr")]
    assert ["replacing damaged characters", "3", "6"] in rows


def test_strict_refuses_damaged_characters(
    damaged: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(damaged, "--errors", "strict") != 0
    assert "1.txt' is encoded in utf-8, but has 1 invalid" in capsys.readouterr().err
    assert run(damaged, "--errors", "strict", "--skip-bad") == 0
    assert "replacing damaged characters" not in caplog.text
    assert "1 documents, 0 duplicates, 3 bad entries skipped" in caplog.text


@pytest.mark.parametrize("options", [("--mask-private",), ()])
def test_an_unknown_region_is_refused_in_one_sentence(
    options: tuple[str, ...], damaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(damaged, "--phone-regions", "XX", *options) == 2
    shown = capsys.readouterr().err
    first, second = shown.splitlines()  # the second names the options of the command
    assert first.startswith("error: ")
    assert "--phone-regions" in second
    assert ("phone_regions contains 'XX'" if options else "phone_regions has no effect") in shown
    assert not (damaged / "out").exists()


@pytest.mark.parametrize(("regions", "masked"), [((), 0), (("US",), 1), (("us", "DE"), 2)])
def test_a_region_masks_its_phone_numbers(
    regions: tuple[str, ...], masked: int, tmp_path: Path
) -> None:
    pytest.importorskip("phonenumbers")
    text = f"Call (212) 736-5000 in town, or 0341 97108 there. {LONG}"
    (tmp_path / "in").write_text(json.dumps({"text": text}) + "\n")
    (tmp_path / "in").rename(tmp_path / "in.jsonl")
    out = tmp_path / "out"
    command = ["prepare", str(tmp_path / "in.jsonl"), "--out", str(out), *SIZES, "--mask-private"]
    assert main([*command, *(("--phone-regions", *regions) if regions else ())]) == 0
    page = write_corpus_report(out).read_text("utf-8")
    assert page.count("&lt;PHONE&gt;") == masked


def test_the_report_shows_the_text_lost_per_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fractions that the reader measures (here set by the page) are on the report page."""
    reader = html_source.find_main_text

    def measure(tree: Any, page: str, name: Any) -> MainText:
        lost = int(page.partition("lost ")[2].partition(" ")[0]) / 10_000
        return replace(reader(tree, page, name), lost_ratio=lost)

    monkeypatch.setattr(html_source, "find_main_text", measure)
    (tmp_path / "in").mkdir()
    for number, lost in enumerate((30, 0, 1250, 401)):
        address = '<link rel="canonical" href="https://h.org/<b>">' if number == 2 else ""
        body = "".join(f"<p>{n} lost {lost} {LONG}</p>" for n in range(3))
        page = f"<html><head>{address}</head><body><article>{body}</article></body></html>"
        (tmp_path / "in" / f"{number}.html").write_text(page)
    assert run(tmp_path) == 0
    report = html.fromstring(write_corpus_report(tmp_path / "out").read_text("utf-8"))
    (section,) = [part for part in report.iter("section") if "Text lost" in part.text_content()]
    rows = [[cell.text_content() for cell in row] for row in section.iter("tr")][1:]
    assert [row[1] for row in rows] == ["12.50", "4.01", "0.30"]
    assert rows[0][0] == "https://h.org/<b>"
    assert ["3.html" in rows[1][0], "0.html" in rows[2][0]] == [True, True]


def test_the_pages_that_lost_most_are_kept_in_any_order() -> None:
    pages = [
        Document("x", "a", url=f"http://h/{number}", scores={"lost_ratio": number % 37 / 40})
        for number in range(60)
    ]
    whole, parts = Summary(), [Summary(), Summary()]
    for number, page in enumerate(pages):
        whole.add_kept(page, 1, 1)
        parts[number % 2].add_kept(page, 1, 1)
    parts[1].merge(parts[0])
    assert parts[1].lost_text == whole.lost_text
    ranked = sorted(pages, key=lambda page: (-page.scores["lost_ratio"], page.url))
    assert set(whole.lost_text) == {page.url for page in ranked[:20]}
