"""The pages as data: their blocks in order, with what a reader of the source is told about each.

A comment right before a block says what running it takes:

    <!-- needs: texts, tiny.toml -->    what must be there: of `page_places.PLACES`, or another page
    <!-- with: --train.steps 2 -->      added to each of its `bmforge train` commands
    <!-- status: 1 -->                 the exit status that is meant
    <!-- not run: two machines -->      why it is not run
    <!-- serves: 8000 -->              starts a server on this port, which runs until the page ends
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
    if not page.name.startswith(".")
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
MARK = re.compile(r"<!-- (needs|with|status|not run|serves): ([^>]*?) -->\s*$")
RUNNING = {"bash", "python"}


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, line, language, text, and what its comments say."""

    page: Path
    line: int
    language: str
    body: str
    needs: tuple[str, ...] = ()
    added: str = ""
    status: int = 0
    not_run: str = ""
    port: int = 0

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def page_blocks(page: Path) -> Iterator[Block]:
    """All fenced blocks of a page, in order."""
    text = page.read_text("utf-8")
    for fence in FENCE.finditer(text):
        before, marks = text[: fence.start()], dict[str, str]()
        while mark := MARK.search(before):
            marks[mark[1]] = mark[2]
            before = before[: mark.start()]
        yield Block(
            page,
            text[: fence.start()].count("\n") + 1,
            fence[1],
            fence[2],
            tuple(marks["needs"].split(", ")) if "needs" in marks else (),
            marks.get("with", ""),
            int(marks.get("status", 0)),
            marks.get("not run", ""),
            int(marks.get("serves", 0)),
        )


def blocks(page: Path, language: str) -> list[str]:
    """The texts of a page's blocks in one language."""
    return [block.body for block in page_blocks(page) if block.language == language]


def command_lines(text: str) -> list[list[str]]:
    """Commands of a shell block or script, split into words, without comments and prompts."""
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def inline_commands(page: Path) -> list[list[str]]:
    """Commands that the running text shows in backquotes: with an option, or of make."""
    spans = re.findall(r"`((?:bmforge [^`]*--|make )[^`]+)`", prose(page))
    return [shlex.split(span) for span in spans]


def prose(page: Path) -> str:
    """A page without its blocks."""
    return FENCE.sub("", page.read_text("utf-8"))
