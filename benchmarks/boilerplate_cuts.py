"""Share of the paragraphs of books and manuals that the boilerplate rules cut, and these lines.

``python benchmarks/boilerplate_cuts.py DATA [--book FOLDER]`` prints one row for each source, and
every line that was cut, so that a reader can judge it. The sources have no menus and no notices but
those that are printed, so the share is an upper bound of the false cuts. DATA is as in
`prepare_speed.py`. FOLDER has HTML pages of a book, which the reader of main texts reads first. GNU
manuals are read from ``/usr/share/info`` if they are installed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from data_peers import read_docstrings, read_news

from bmforge.data.clean.lines import drop_boilerplate
from bmforge.data.sources.document import Document
from bmforge.data.sources.html import parse_page
from bmforge.data.sources.record import ReadOptions, Where

_NODE = re.compile("\x1f\n[^\n]*\n")


def read_manuals() -> Iterator[str]:
    """Yield the sections of installed GNU manuals, one line a paragraph."""
    for path in sorted(Path("/usr/share/info").glob("*.info*.gz")):
        text = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
        for node in _NODE.split(text)[1:]:
            paragraphs = re.split(r"\n\s*\n", node)
            yield "\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def read_book(folder: Path) -> Iterator[str]:
    """Yield the main texts of a book's pages."""
    for path in sorted(folder.rglob("*.html")):
        page = parse_page(path.read_bytes(), Where("book", str(path)), ReadOptions())
        if isinstance(page, Document):
            yield page.text


def count_cuts(name: str, texts: Iterator[str] | list[str]) -> None:
    """Print the number of paragraphs of a source, of cut ones, and the cut lines."""
    total, cut = 0, []
    for text in texts:
        lines = [line for line in text.split("\n") if line.strip()]
        left = [line for line in drop_boilerplate(text).split("\n") if line.strip()]
        total += len(lines)
        position = 0
        for line in lines:
            if position < len(left) and left[position] == line:
                position += 1
            else:
                cut.append(line)
    print(f"{name}: {total} paragraphs, {len(cut)} cut ({100 * len(cut) / max(total, 1):.3f} %)")
    for line in cut:
        print("   ", line.strip()[:110])


def main() -> None:
    """Count the cuts in each source."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--book", type=Path)
    options = parser.parse_args()
    count_cuts("Shakespeare's plays", [(options.data / "tinyshakespeare.txt").read_text()])
    poems = (options.data / "tang_poetry.jsonl").read_text("utf-8").splitlines()
    count_cuts("Tang poems", [json.loads(line)["text"] for line in poems])
    count_cuts("news items", read_news(options.data))
    count_cuts("Python's language reference", list(topics.values()))
    count_cuts("docstrings of Python's library", read_docstrings())
    count_cuts("GNU manuals", read_manuals())
    if options.book:
        count_cuts("book", read_book(options.book))


if __name__ == "__main__":
    main()
