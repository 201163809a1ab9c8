"""Share of the paragraphs of books and manuals that the boilerplate rules remove.

    python -m benchmarks.data.boilerplate DATA [--book FOLDER]

Prints a row for each source, and all removed lines for review. The sources have no menus or notices
other than printed ones, so the share is an upper bound of the false removals. DATA is described in
`texts.py`. FOLDER has the HTML pages of a book. GNU manuals are read from ``/usr/share/info`` if
they are installed.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from benchmarks.data.texts import read_docstrings, read_news, read_poems
from benchmarks.harness import make_parser
from bmforge.data.clean.lines import drop_boilerplate
from bmforge.data.sources.document import Document
from bmforge.data.sources.html import parse_page
from bmforge.data.sources.record import ReadOptions, Where

_NODE = re.compile("\x1f\n[^\n]*\n")


def read_manuals() -> Iterator[str]:
    """Yield the sections of installed GNU manuals, with one line per paragraph."""
    for path in sorted(Path("/usr/share/info").glob("*.info*.gz")):
        text = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
        for node in _NODE.split(text)[1:]:
            paragraphs = re.split(r"\n\s*\n", node)
            yield "\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def read_book(folder: Path) -> Iterator[str]:
    """Yield the main texts of the pages of a book."""
    for path in sorted(folder.rglob("*.html")):
        page = parse_page(path.read_bytes(), Where("book", str(path)), ReadOptions())
        if isinstance(page, Document):
            yield page.text


def count_removed(name: str, texts: Iterator[str] | list[str]) -> None:
    """Print the number of paragraphs of a source, the number of removed ones, and these lines."""
    total, removed = 0, []
    for text in texts:
        lines = [line for line in text.split("\n") if line.strip()]
        left = [line for line in drop_boilerplate(text).split("\n") if line.strip()]
        total += len(lines)
        position = 0
        for line in lines:
            if position < len(left) and left[position] == line:
                position += 1
            else:
                removed.append(line)
    share = 100 * len(removed) / max(total, 1)
    print(f"{name}: {total} paragraphs, {len(removed)} removed ({share:.3f} %)")
    for line in removed:
        print("   ", line.strip()[:110])


def main() -> None:
    """Count the removed paragraphs of each source."""
    parser = make_parser(__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--book", type=Path)
    options = parser.parse_args()
    count_removed("Shakespeare's plays", [(options.data / "tinyshakespeare.txt").read_text()])
    count_removed("Tang poems", read_poems(options.data))
    count_removed("news items", read_news(options.data, titles=True))
    count_removed("Python's language reference", list(topics.values()))
    count_removed("docstrings of Python's library", read_docstrings())
    count_removed("GNU manuals", read_manuals())
    if options.book:
        count_removed("book", read_book(options.book))


if __name__ == "__main__":
    main()
