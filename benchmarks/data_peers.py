"""CPU seconds of bmforge and of datatrove and trafilatura, on the same texts, in one run.

``python benchmarks/data_peers.py DATA`` compares three parts: ``rules`` (five rule sets and
datatrove's filters), ``minhash`` (near duplicates and datatrove's four steps) and ``pages`` (main
texts and trafilatura). Needs datatrove with spaCy, and trafilatura. DATA is as in
`prepare_speed.py`. The two sides alternate; each repetition is a new process, in which caches are
empty except for one document. The CPU seconds of all threads count. The median is printed.
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

from prepare_speed import make_pages, read_texts
from rules_parity import judge_ours, judge_theirs, reference_filters

PARTS = ("rules", "minhash", "pages")
SIDES = ("peer", "bmforge")
SHORTEST_DOCSTRING = 200


def read_docstrings() -> Iterator[str]:
    """Yield the docstrings of Python's standard library from 200 characters on."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted([*library.glob("*.py"), *library.glob("[a-z]*/*.py")]):
        if "test" in str(path) or "site-packages" in str(path):
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) >= SHORTEST_DOCSTRING:
                    yield text


def read_news(data: Path) -> list[str]:
    """Return English news items with their titles."""
    with (data / "ag_news" / "test.csv").open(newline="") as file:
        return [f"{title}\n{text}" for _, title, text in csv.reader(file)]


def read_documents(data: Path, every: int) -> list[str]:
    """Return every nth of: news items, docstrings, scenes of plays of about 1,700 characters."""
    speeches = (data / "tinyshakespeare.txt").read_text().split("\n\n")
    news = read_news(data)
    scenes = ["\n\n".join(speeches[i : i + 11]) for i in range(0, len(speeches), 11)]
    return [*news, *read_docstrings(), *scenes][::every]


def read_long_documents(data: Path, every: int) -> list[str]:
    """Return every nth text of eight consecutive news items, as many paragraphs."""
    news = read_news(data)
    return ["\n\n".join(news[i : i + 8]) for i in range(0, len(news), 8)][::every]


def judge_documents(side: str, texts: Sequence[str]) -> Callable[[Sequence[str]], None]:
    """Return a function that judges texts by five rule sets, each on its own."""
    if side == "peer":
        filters = reference_filters()

        def run(texts: Sequence[str]) -> None:
            for text in texts:
                for rules in filters.values():
                    judge_theirs(rules, text)

        return run
    from bmforge.data.clean.rules import RULE_SETS
    from bmforge.data.clean.statistics import TextStatistics
    from bmforge.data.clean.words import split_words

    sets = [RULE_SETS[name] for name in RULE_SETS if name != "chinese"]

    def run_ours(texts: Sequence[str]) -> None:
        for text in texts:
            statistics = TextStatistics(text, split_words)
            for rules in sets:
                judge_ours(rules, statistics)

    return run_ours


def deduplicate(side: str, texts: Sequence[str]) -> Callable[[Sequence[str]], None]:
    """Return a function that finds the near duplicates of texts; a tenth of them are copies."""
    if side == "peer":
        from dedup_quality import datatrove_clusters

        return datatrove_clusters
    from bmforge.data.dedup.near import find_near_duplicates
    from bmforge.data.sources.document import Document

    def run(texts: Sequence[str]) -> None:
        documents = [Document(text, "texts", str(number)) for number, text in enumerate(texts)]
        find_near_duplicates(lambda: documents)

    return run


def extract_pages(side: str, texts: Sequence[str]) -> Callable[[Sequence[str]], None]:
    """Return a function that extracts the main texts of pages."""
    if side == "peer":
        import trafilatura

        def run(texts: Sequence[str]) -> None:
            for text in texts:
                trafilatura.extract(text.encode(), include_comments=False)

        return run
    from bmforge.data.sources.html import parse_page
    from bmforge.data.sources.record import ReadOptions, Where

    def run_ours(texts: Sequence[str]) -> None:
        for number, text in enumerate(texts):
            parse_page(text.encode(), Where("pages", str(number)), ReadOptions())

    return run_ours


RUNS = {"rules": judge_documents, "minhash": deduplicate, "pages": extract_pages}


def add_copies(texts: Sequence[str]) -> list[str]:
    """Return the texts, and copies of a tenth of them in which one word is left out."""
    draw, copies = random.Random(0), []
    for text in texts[::10]:
        words = text.split()
        words.pop(draw.randrange(len(words)))
        copies.append(" ".join(words))
    return [*texts, *copies]


def read_inputs(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the texts of each case; its name begins with that of the part."""
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
    """Print the CPU seconds of one side; runs in a process of its own."""
    texts = json.loads(Path(path).read_text())
    run = RUNS[part](side, texts)
    run(texts[:1])
    begin = time.process_time()
    run(texts)
    print(time.process_time() - begin)


def main() -> None:
    """Time each case, the sides in turn, and print a row for it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help="default: all")
    parser.add_argument("--every", type=int, default=2, help="use every nth text")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--pages", type=Path, help="folder of HTML files to extract too")
    parser.add_argument("--most-pages", type=int, default=60)
    options = parser.parse_args()
    print(
        "texts, number, MB, CPU seconds of the peer, of bmforge, ratio of the medians, all ratios"
    )
    for name, texts in read_inputs(options).items():
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(texts, file)
            file.flush()
            seconds: dict[str, list[float]] = {side: [] for side in SIDES}
            for number in range(options.repetitions):
                for side in SIDES if number % 2 == 0 else reversed(SIDES):
                    command = [sys.executable, __file__, "--side", name.split(",")[0], side]
                    ran = subprocess.run([*command, file.name], capture_output=True, text=True)
                    if ran.returncode:
                        sys.exit(ran.stderr)
                    seconds[side].append(float(ran.stdout.split()[-1]))
        peer, ours = (median(seconds[side]) for side in SIDES)
        ratios = [f"{a / b:.1f}" for a, b in zip(*seconds.values(), strict=True)]
        size_mb = sum(len(text.encode()) for text in texts) / 1e6
        row = f"{name}: {len(texts)}, {size_mb:.2f}, {peer:.2f}, {ours:.3f}, {peer / ours:.1f},"
        print(row, *ratios)
        sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        time_side(*sys.argv[2:])
    else:
        main()
