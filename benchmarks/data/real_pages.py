"""Main texts of real web pages, with the text that people or the pages' authors give for them.

    python -m benchmarks.data.real_pages articles FOLDER
    python -m benchmarks.data.real_pages segments FOLDER
    python -m benchmarks.data.real_pages sources HTML_FOLDER MARKDOWN_FOLDER

- articles: FOLDER is a copy of github.com/scrapinghub/article-extraction-benchmark, with the
  article bodies of 181 news pages.
- segments: FOLDER is `tests` in a copy of github.com/adbar/trafilatura; for each page, a few
  phrases that belong to the main text, and a few that do not.
- sources: HTML pages, and the Markdown files with the same names that they were generated from.

bmforge is compared with trafilatura and resiliparse, each with its default settings. "Sentences"
is the share of the sentences (or phrases) of the main text that are found. Precision, recall and F1
are those of phrases, or else of sequences of four words, as means over the pages.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import trafilatura
from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.encoding import detect_encoding
from resiliparse.parse.html import HTMLTree

from benchmarks.harness import make_parser, table, table_row
from bmforge.data.sources.document import Document
from bmforge.data.sources.html import parse_page
from bmforge.data.sources.record import ReadOptions, Where

SHORTEST = 25  # characters of a sentence, without spaces
WORDS = 4  # words of a sequence
_SPACE = re.compile(r"\s+")
_END = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])|\n+")
_CODE = re.compile(r"^(```|~~~).*?^\1[^\n]*$|<!--.*?-->|\A---\n.*?^---$", re.S | re.M)
_LINK = re.compile(r"!?\[([^\[\]]*)\](?:\([^()\s]*\)|\[[^\[\]]*\])")
_NO_PROSE = re.compile(r"^(?:#|\||\[[^\]]*\]:|<|>\s*Stability|added:|changes:| {4})")


@dataclass(frozen=True)
class Page:
    """A page, the sentences of its main text, the whole main text, and phrases outside it."""

    html: bytes
    sentences: list[str]
    text: str
    outside: list[str]


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text that are not short, without spaces."""
    sentences = (_SPACE.sub("", one) for one in _END.split(text))
    return [one for one in sentences if len(one) >= SHORTEST]


def read_articles(folder: Path) -> Iterator[Page]:
    """Yield the news pages of the article extraction benchmark."""
    for name, answer in json.loads((folder / "ground-truth.json").read_text("utf-8")).items():
        html = gzip.decompress((folder / "html" / f"{name}.html.gz").read_bytes())
        text = answer["articleBody"]
        yield Page(html, split_sentences(text), text, [])


def read_segments(folder: Path) -> Iterator[Page]:
    """Yield the pages of trafilatura's evaluation."""
    for answer in json.loads((folder / "evaldata.json").read_text("utf-8")).values():
        paths = [folder / part / answer["file"] for part in ("cache", "eval")]
        html = next((path.read_bytes() for path in paths if path.exists()), b"")
        sides = ([_SPACE.sub("", one) for one in answer[side]] for side in ("with", "without"))
        inside, outside = ([one for one in side if one] for side in sides)
        if html and inside:
            yield Page(html, inside, "", outside)


def read_sources(html_folder: Path, folder: Path) -> Iterator[Page]:
    """Yield HTML pages with the prose of their Markdown sources."""
    pages = {path.stem: path for path in html_folder.rglob("*.html")}
    for path in sorted(folder.rglob("*.md")):
        if path.stem in pages:
            text = path.read_text("utf-8")
            sentences = split_sentences(read_prose(text))
            if sentences:
                yield Page(pages[path.stem].read_bytes(), sentences, strip_marks(text), [])


def strip_marks(text: str) -> str:
    """Return the text of links, and drop emphasis."""
    for _ in range(2):  # images in links
        text = _LINK.sub(r"\1", text)
    return re.sub(r"[*_`\\]", "", text)


def read_prose(markdown: str) -> str:
    """Return the paragraphs and list items of a Markdown text, each in one line."""
    lines: list[str] = []
    is_new = True
    for line in _CODE.sub("\n", markdown).split("\n"):
        item = re.match(r"\s*(?:[*+-]|\d+\.)\s+", line)
        if not line.strip() or _NO_PROSE.match(line):
            is_new = True
            continue
        content = line[item.end() :] if item else line.strip()
        if is_new or item:
            lines.append(content)
        else:
            lines[-1] += f" {content}"
        is_new = False
    return strip_marks("\n".join(lines))


def read_by_bmforge(html: bytes, reader: str = "resiliparse") -> str:
    parsed = parse_page(html, Where("x"), ReadOptions(html_reader=reader))
    return parsed.text if isinstance(parsed, Document) else ""


def read_by_trafilatura(html: bytes) -> str:
    return trafilatura.extract(html, include_comments=False) or ""


def read_by_resiliparse(html: bytes) -> str:
    tree = HTMLTree.parse_from_bytes(html, detect_encoding(html))
    return extract_plain_text(tree, preserve_formatting=True, main_content=True)


READERS: dict[str, Callable[[bytes], str]] = {
    "bmforge": read_by_bmforge,
    "bmforge, html_reader=trafilatura": partial(read_by_bmforge, reader="trafilatura"),
    "trafilatura": read_by_trafilatura,
    "resiliparse": read_by_resiliparse,
}


def count_sequences(text: str) -> Counter[tuple[str, ...]]:
    """Return the sequences of four words in a text."""
    words = re.findall(r"\w+", text)
    return Counter(zip(*(words[at:] for at in range(min(WORDS, len(words)) or 1)), strict=False))


def grade(page: Page, text: str) -> tuple[float, float, float]:
    """Return the share of sentences found, precision and recall."""
    marked = re.sub(r"[*_`\\]", "", text) if page.text and not page.outside else text
    plain = _SPACE.sub("", marked)
    hits = sum(one in plain for one in page.sentences)
    found = hits / max(len(page.sentences), 1)
    if not page.text:
        wrong = sum(one in plain for one in page.outside)
        return found, hits / max(hits + wrong, 1), found
    true, read = count_sequences(page.text), count_sequences(marked)
    common = (true & read).total()
    return found, common / max(read.total(), 1), common / max(true.total(), 1)


def main() -> None:
    """Print a row for each reader."""
    parser = make_parser(__doc__)
    parser.add_argument("kind", choices=("articles", "segments", "sources"))
    parser.add_argument("folders", type=Path, nargs="+")
    options = parser.parse_args()
    read = {"articles": read_articles, "segments": read_segments, "sources": read_sources}
    pages = list(read[options.kind](*options.folders))
    print(f"{len(pages)} pages, {sum(len(page.sentences) for page in pages)} sentences")
    print(table(["reader", "sentences", "precision", "recall", "F1"], []))
    for name, reader in READERS.items():
        grades = [grade(page, reader(page.html)) for page in pages]
        sentences, precision, recall = (fmean(column) for column in zip(*grades, strict=True))
        f1 = 2 * precision * recall / max(precision + recall, 1e-9)
        cells = (f"{value:.4f}" for value in (sentences, precision, recall, f1))
        print(table_row([name, *cells]), flush=True)


if __name__ == "__main__":
    main()
