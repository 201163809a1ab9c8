"""`bmforge data`: what it prints, against the files and the rules themselves."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bmforge.cli import main
from bmforge.data import PrepareConfig, prepare
from bmforge.data.clean import explain
from bmforge.data.report.page import funnel_stages
from bmforge.data.sources.document import Document

NEWS = (
    "The council met on Monday to talk about the new bridge over the {0}. Several people who "
    "live near the {1} said that they have waited for it since the flood of last year. The mayor "
    "promised an answer within a month. Nobody knew what the {2} would cost, and a report is to "
    "follow. Two members asked for a vote. The meeting ended late in the evening."
)
TEXTS = [NEWS.format("river", "mill", "work"), NEWS.format("lake", "church", "<b>steel</b>")]
TEXTS += ["Subscribe now. " * 40, "Home", TEXTS[0], " "]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with texts and the corpus made of them."""
    folder = tmp_path_factory.mktemp("looked-at")
    lines = (json.dumps({"text": text}) + "\n" for text in TEXTS)
    (folder / "texts.jsonl").write_text("".join(lines))
    config = PrepareConfig(vocab_size=300, validation_fraction=0.0, rules="english")
    prepare(folder / "texts.jsonl", folder / "out", config)
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """Return what `bmforge data` prints."""
    assert main(["data", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_explain_shows_every_rule(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = run(capsys, "explain", place / "texts.jsonl", "--rules", "english", "--place", "3")
    head, *lines = said.splitlines()
    assert head.startswith(f"{place / 'texts.jsonl'}:3  Subscribe now.")
    found = explain(Document(TEXTS[2].strip(), "x"), "english")
    assert [line.split()[0] for line in lines] == [one.rule for one in found]
    for line, one in zip(lines, found, strict=True):
        assert float(line.split()[1]) == pytest.approx(float(one.value), rel=1e-3)
        assert line.endswith("<- dropped") != one.passed
    assert run(capsys, "explain", place / "texts.jsonl", "--documents", "2").count(".jsonl:") == 2
    assert main(["data", "explain", str(place / "texts.jsonl"), "--place", "77"]) == 2
    assert "no document at '77'" in capsys.readouterr().err


def test_show_prints_the_funnel_and_documents(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = place / "out"
    counts = {
        line.split()[0]: int(line.split()[1]) for line in run(capsys, "show", out).splitlines()
    }
    assert counts.pop("read") == sum(counts.values()) == len(TEXTS)
    assert counts["kept"] == 2
    everything = run(capsys, "show", out, "--dropped", "all").splitlines()
    assert everything == (out / "dropped.jsonl").read_text("utf-8").splitlines()
    (line,) = run(capsys, "show", out, "--dropped", "gopher_quality").splitlines()
    assert json.loads(line)["rule"] == "gopher_quality.short_doc"
    kept = [json.loads(one)["text"] for one in run(capsys, "show", out, "--kept").splitlines()]
    assert kept == TEXTS[:2]
    assert main(["data", "show", str(out), "--dropped", "gopher_qualty.short_doc"]) == 2
    assert "Did you mean 'gopher_quality.short_doc'" in capsys.readouterr().err


class Page(HTMLParser):
    """Notes the tags that are open, the corners of the funnel and the texts."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.corners: list[list[float]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "rect", "br", "input"):
            self.open.append(tag)
        if tag == "polygon":
            self.corners.append(
                [float(one) for one in re.split("[ ,]", dict(attrs)["points"] or "")]
            )

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("meta", "rect", "br", "input"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_report_draws_the_funnel(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(run(capsys, "report", place / "out").strip())
    page = Page()
    page.feed(path.read_text("utf-8"))
    assert page.open == []
    assert "<b>steel</b>" in page.text
    assert "文档去向" in page.text
    below = [corners[4] - corners[6] for corners in page.corners]
    report = prepare(
        place / "texts.jsonl",
        place / "out",
        PrepareConfig(vocab_size=300, validation_fraction=0.0, rules="english"),
    )
    assert report.funnel is not None
    left = [stage[1] for stage in funnel_stages(report.funnel)]
    assert left[0] == len(TEXTS)
    assert left[-1] == left[-2] == 2
    assert below == pytest.approx([below[0] * one / left[0] for one in left], rel=1e-3)


def test_verify_says_what_is_wrong(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "are correct" in run(capsys, "verify", place / "out")
    assert main(["data", "verify", str(tmp_path)]) == 2
    assert "has no prepared.toml" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_the_commands_are_listed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    said = run(capsys, *arguments)
    assert all(name in said for name in ("explain", "show", "report", "verify"))
    assert main(["data", "shwo"]) == 2
    assert "Did you mean 'show'" in capsys.readouterr().err
