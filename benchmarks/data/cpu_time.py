"""CPU time of `bmforge prepare` compared with datatrove and trafilatura, on the same texts.

    python -m benchmarks.data.cpu_time DATA [rules] [minhash] [pages] [--every 2]
        [--repetitions 3] [--pages FOLDER] [--most-pages 60]

- rules: five rule sets, compared with datatrove's filters.
- minhash: near duplicates, compared with the four steps of datatrove.
- pages: main texts of generated pages, and of the HTML files in FOLDER, compared with trafilatura.

DATA is described in `texts.py`. Needs datatrove with spaCy, and trafilatura. The two sides
alternate. Each repetition is a new process with empty caches, after one document of warm-up. The
CPU time of all threads is measured.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from benchmarks.data.quality_rules import (
    judge_with_bmforge,
    judge_with_datatrove,
    reference_filters,
)
from benchmarks.data.texts import read_docstrings, read_news, read_texts
from benchmarks.data.web_pages import make_pages
from benchmarks.harness import make_parser, paired_ratio, rerun_command, table, table_row

PARTS = ("rules", "minhash", "pages")
PEERS = {"rules": "datatrove", "minhash": "datatrove", "pages": "trafilatura"}


def read_documents(data: Path, every: int) -> list[str]:
    """Return every nth news item, docstring, and scene of a play with about 1,700 characters."""
    speeches = (data / "tinyshakespeare.txt").read_text().split("\n\n")
    news = read_news(data, titles=True)
    scenes = ["\n\n".join(speeches[i : i + 11]) for i in range(0, len(speeches), 11)]
    return [*news, *read_docstrings(), *scenes][::every]


def read_long_documents(data: Path, every: int) -> list[str]:
    """Return every nth text of eight consecutive news items."""
    news = read_news(data, titles=True)
    return ["\n\n".join(news[i : i + 8]) for i in range(0, len(news), 8)][::every]


def judge_documents(side: str, texts: Sequence[str]) -> Callable[[Sequence[str]], None]:
    """Return a function that applies five rule sets separately."""
    if side != "bmforge":
        filters = reference_filters()

        def run(texts: Sequence[str]) -> None:
            for text in texts:
                for rules in filters.values():
                    judge_with_datatrove(rules, text)

        return run
    from bmforge.data.clean.rules import RULE_SETS
    from bmforge.data.clean.statistics import TextStatistics
    from bmforge.data.clean.words import split_words

    sets = [RULE_SETS[name] for name in RULE_SETS if name != "chinese"]

    def run_bmforge(texts: Sequence[str]) -> None:
        for text in texts:
            statistics = TextStatistics(text, split_words)
            for rules in sets:
                judge_with_bmforge(rules, statistics)

    return run_bmforge


def deduplicate(side: str, texts: Sequence[str]) -> Callable[[Sequence[str]], None]:
    """Return a function that finds the near duplicates of texts."""
    if side != "bmforge":
        from benchmarks.data.deduplication import datatrove_clusters

        return datatrove_clusters
    from bmforge.data.dedup.near import find_near_duplicates
    from bmforge.data.sources.document import Document

    def run(texts: Sequence[str]) -> None:
        documents = [Document(text, "texts", str(number)) for number, text in enumerate(texts)]
        find_near_duplicates(lambda: documents)

    return run


def extract_pages(side: str, texts: Sequence[str]) -> Callable[[Sequence[str]], None]:
    """Return a function that extracts the main texts of pages."""
    if side != "bmforge":
        import trafilatura

        def run(texts: Sequence[str]) -> None:
            for text in texts:
                trafilatura.extract(text.encode(), include_comments=False)

        return run
    from bmforge.data.sources.html import parse_page
    from bmforge.data.sources.record import ReadOptions, Where

    def run_bmforge(texts: Sequence[str]) -> None:
        for number, text in enumerate(texts):
            parse_page(text.encode(), Where("pages", str(number)), ReadOptions())

    return run_bmforge


RUNS = {"rules": judge_documents, "minhash": deduplicate, "pages": extract_pages}


def add_copies(texts: Sequence[str]) -> list[str]:
    """Return the texts, and copies of a tenth of them without one word."""
    generator, copies = random.Random(0), []
    for text in texts[::10]:
        words = text.split()
        words.pop(generator.randrange(len(words)))
        copies.append(" ".join(words))
    return [*texts, *copies]


def read_inputs(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the texts of each case, whose name begins with the part."""
    documents = read_documents(options.data, options.every)
    long = read_long_documents(options.data, options.every)
    pages = [page for _, page, _, _ in make_pages(read_texts(options.data), random.Random(0))]
    cases = {"rules, short": documents, "rules, long": long}
    cases |= {"minhash, short": add_copies(documents), "minhash, long": add_copies(long)}
    cases["pages, generated"] = pages
    if options.pages:
        paths = sorted(options.pages.rglob("*.html"))[: options.most_pages]
        cases["pages, of the folder"] = [path.read_text("utf-8", "replace") for path in paths]
    return {name: texts for name, texts in cases.items() if name.split(",")[0] in options.parts}


def time_side(part: str, side: str, path: str) -> None:
    """Print the CPU seconds of one side, in a new process."""
    texts = json.loads(Path(path).read_text())
    run = RUNS[part](side, texts)
    run(texts[:1])
    begin = time.process_time()
    run(texts)
    print(time.process_time() - begin)


def main() -> None:
    """Print a row for each case."""
    parser = make_parser(__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help="default: all")
    parser.add_argument("--every", type=int, default=2, help="use every nth text")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--pages", type=Path, help="folder of HTML files to extract too")
    parser.add_argument("--most-pages", type=int, default=60)
    options = parser.parse_args()
    columns = ["texts", "number", "MB", "bmforge, CPU s", "peer, CPU s", "speed, bmforge / peer"]
    print(table(columns, []))
    for name, texts in read_inputs(options).items():
        part = name.split(",")[0]
        seconds = time_sides(part, texts, options.repetitions)
        size_mb = sum(len(text.encode()) for text in texts) / 1e6
        medians = [f"{median(seconds[side]):.3f}" for side in ("bmforge", PEERS[part])]
        ratio = paired_ratio(seconds, "bmforge", PEERS[part])
        print(table_row([name, len(texts), f"{size_mb:.2f}", *medians, f"{ratio:.1f}"]), flush=True)


def time_sides(part: str, texts: Sequence[str], repetitions: int) -> dict[str, list[float]]:
    """Return the CPU seconds of both sides, in alternating processes."""
    seconds: dict[str, list[float]] = {"bmforge": [], PEERS[part]: []}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(texts, file)
        file.flush()
        for number in range(repetitions):
            for side in list(seconds) if number % 2 else list(seconds)[::-1]:
                command = rerun_command("--side", part, side, file.name)
                process = subprocess.run(command, capture_output=True, text=True)
                if process.returncode:
                    sys.exit(process.stderr)
                seconds[side].append(float(process.stdout.split()[-1]))
    return seconds


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        time_side(*sys.argv[2:])
    else:
        main()
