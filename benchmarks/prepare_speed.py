"""How fast `bmforge prepare` is, how much memory it takes, and how well main texts are found.

``python benchmarks/prepare_speed.py memory DATA --megabytes 256 --workers 1`` prepares a synthetic
file with all stages and watches the memory of all its processes; ``workers DATA`` compares two
workers with one, in pairs; ``pages DATA`` extracts 200 pages of 20 templates. DATA is a folder with
``ag_news/test.csv``, ``tang_poetry.jsonl`` and ``tinyshakespeare.txt``.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bmforge.data.dedup.tokens import split_tokens
from bmforge.data.sources.document import Document
from bmforge.data.sources.files import read_records
from bmforge.data.sources.record import ReadOptions

ALL_STAGES = ["--tidy", "repair", "invisible", "--languages", "any", "--rules", "mixed"]
ALL_STAGES += ["--mask-private", "--near-duplicates", "0.8"]
LOOK_EVERY_S = 0.25
Texts = tuple[list[str], list[str]]


def read_texts(data: Path) -> Texts:
    """Return English texts (news, plays) and Chinese ones (poems)."""
    with (data / "ag_news" / "test.csv").open(newline="") as file:
        news = [row[2] for row in csv.reader(file)]
    plays = (data / "tinyshakespeare.txt").read_text().split("\n\n")
    lines = (data / "tang_poetry.jsonl").read_text("utf-8").splitlines()
    return [*news, *plays], [json.loads(line)["text"] for line in lines]


def write_corpus(path: Path, texts: Texts, megabytes: int, seed: int) -> None:
    """Write JSON lines: a few texts put together, a tenth of their words others'; 5 % copies."""
    draw = random.Random(seed)
    english, chinese = texts
    words = sorted({word for text in english for word in text.split()})
    size, line = 0, b""
    with path.open("wb") as file:
        while size < megabytes * 1_000_000:
            if not line or draw.random() >= 0.05:
                if draw.random() < 0.2:
                    text = "\n".join(draw.choices(chinese, k=draw.randint(2, 8)))
                else:
                    parts = " ".join(draw.choices(english, k=draw.randint(3, 12))).split()
                    for _ in range(len(parts) // 10):
                        parts[draw.randrange(len(parts))] = draw.choice(words)
                    text = " ".join(parts)
                line = json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n"
            file.write(line)
            size += len(line)


class Cost(NamedTuple):
    """Seconds, CPU seconds, and the largest memory of all processes together, in bytes."""

    seconds: float = 0.0
    cpu: float = 0.0
    peak: int = 0


def run_prepare(options: list[str], watch: bool, known: Path | None = None) -> Cost:
    """Return what a preparation costs.

    Args:
        known: a file that holds what a run cost that was stopped and is gone on with.
    """
    earlier = Cost(*json.loads(known.read_text())) if known and known.exists() else Cost()
    begin, peak = time.monotonic(), earlier.peak
    cpu: dict[str, float] = {}

    def cost() -> Cost:
        seconds = earlier.seconds + time.monotonic() - begin
        return Cost(seconds, earlier.cpu + sum(cpu.values()), peak)

    command = [sys.executable, "-m", "bmforge", "prepare", *options]
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE) as process:
        try:
            while watch and process.poll() is None:
                peak = max(peak, look_at(process.pid, cpu))
                time.sleep(LOOK_EVERY_S)
            errors = process.communicate()[1]
        except BaseException:  # stopped: so are the workers
            os.killpg(process.pid, signal.SIGKILL)
            if known:
                known.write_text(json.dumps(cost()))
            raise
    if process.returncode:
        sys.exit(errors.decode())
    return cost()


def look_at(group: int, cpu: dict[str, float]) -> int:
    """Return what all processes of a group hold, shared pages divided among them.

    Args:
        cpu: takes up the CPU seconds of each.
    """
    total = 0
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
            if int(fields[2]) != group:
                continue
            cpu[status.parent.name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            lines = (status.parent / "smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
        except (OSError, IndexError, ValueError):  # it has ended meanwhile
            continue
    return total


@contextmanager
def open_scratch(arguments: argparse.Namespace) -> Iterator[str]:
    """Give a folder that is removed in the end; with ``--resume``, unless the run is stopped."""
    if not arguments.resume:
        with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
            yield folder
        return
    kind = "default" if arguments.plain else "all"
    name = f"prepare-{arguments.megabytes}-{kind}-{arguments.workers}"
    kept = Path(arguments.scratch or tempfile.gettempdir()) / name
    kept.mkdir(parents=True, exist_ok=True)
    yield str(kept)
    shutil.rmtree(kept)


def measure_memory(arguments: argparse.Namespace, texts: Texts) -> None:
    """Print one line for one preparation with all stages."""
    with open_scratch(arguments) as folder:
        path, out = Path(folder) / "large.jsonl", Path(folder) / "out"
        if not path.exists():
            write_corpus(path.with_suffix(".tmp"), texts, arguments.megabytes, 0)
            path.with_suffix(".tmp").rename(path)
        options = [str(path), "--out", str(out), "--workers", str(arguments.workers)]
        options += [] if arguments.plain else ALL_STAGES
        seconds, cpu, peak = run_prepare(options, True, Path(folder) / "cost.json")
        record = tomllib.loads((out / "prepared.toml").read_text("utf-8"))
    tokens = record["train"]["tokens"] + record["validation"]["tokens"]
    read, size = record["funnel"]["read"]["documents"], arguments.megabytes * 1_000_000
    print(
        f"{size / 1e6:.0f} MB, {arguments.workers} workers, "
        f"{'default' if arguments.plain else 'all'} stages: {read} "
        f"documents, {record['counts']['documents']} kept, {seconds:.0f} s, {cpu:.0f} CPU s, "
        f"{size / seconds / 1e6:.2f} MB/s, {tokens / seconds / 1e3:.0f} thousand tokens/s, "
        f"peak {peak / 1e6:.0f} MB of all processes"
    )


def measure_workers(arguments: argparse.Namespace, texts: Texts) -> None:
    """Print seconds of one and two workers, in pairs, and the median of their ratios."""
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        path = Path(folder) / "large.jsonl"
        write_corpus(path, texts, arguments.megabytes, 0)
        shard_bytes = arguments.megabytes * 1_000_000 // 12
        ratios = []
        for pair in range(arguments.pairs):
            taken = {}
            for workers in (1, 2) if pair % 2 == 0 else (2, 1):
                out = Path(folder) / f"{pair}-{workers}"
                options = [str(path), "--out", str(out), "--shard-bytes", str(shard_bytes)]
                options += ["--workers", str(workers)]
                options += [] if arguments.plain else ALL_STAGES
                taken[workers] = run_prepare(options, watch=False).seconds
            ratios.append(taken[1] / taken[2])
            print(f"1 worker {taken[1]:.1f} s, 2 workers {taken[2]:.1f} s, {ratios[-1]:.2f}")
        print(f"median speed-up {median(ratios):.2f}")


MENUS = {
    "en": ["Home", "World", "Business", "Sport", "Sign in", "Weather", "Contact us", "About"],
    "zh": ["首页", "国际", "财经", "体育", "登录", "天气", "联系我们", "关于本站"],
}
ADS = {
    "en": "Limited offer! Save 40 % on garden furniture today, click here to order.",
    "zh": "限时特惠！花园家具今日六折，点击这里立即订购。",
}
COMMENTS = {
    "en": ["First!", "I totally disagree with this article.", "Thanks for sharing, greetings."],
    "zh": ["沙发！", "完全不同意楼主的观点。", "感谢分享，问好大家。"],
}
FOOTERS = {
    "en": "© 2024 The Daily Example. All rights reserved. Terms of use. Privacy policy.",
    "zh": "版权所有 © 2024 示例日报 京ICP备12345678号 使用条款 隐私政策",
}
# Where the text stands: before it, and behind it.
PLACES = [
    ("<article>", "</article>"),
    ("<main><article class=post>", "</article></main>"),
    ('<div id="content"><div class="text">', "</div></div>"),
    ('<table><tr><td width="70%">', "</td></tr></table>"),
    ('<div class="entry-content">', "</div>"),
]


def write_page(template: int, language: str, title: str, parts: list[str]) -> tuple[str, list[str]]:
    """Return a page of one of 20 templates, and the texts of it that are not the main one."""
    before, behind = PLACES[template % 5]
    style = template // 5
    links = "".join(f'<li><a href="/{n}">{name}</a></li>' for n, name in enumerate(MENUS[language]))
    menu = (
        f"<nav><ul>{links}</ul></nav>" if style % 2 else f'<div class="menu"><ul>{links}</ul></div>'
    )
    ad = f'<div class="ad banner"><a href="//ads.example/1">{ADS[language]}</a></div>'
    comments = "".join(
        f'<div class="comment"><b>user{n}</b><p>{said}</p></div>'
        for n, said in enumerate(COMMENTS[language])
    )
    kind = "section" if style < 2 else "div"
    comments = f'<{kind} id="comments" class="comments">{comments}</{kind}>'
    footer = f"<footer><p>{FOOTERS[language]}</p></footer>"
    if style >= 2:
        footer = f'<div class="footer">{FOOTERS[language]}</div>'
    side = f'<aside class="sidebar">{ad}</aside>' if style in (1, 3) else ad
    body = "".join(f"<p>{part}</p>" for part in parts)
    page = (
        f'<!DOCTYPE html><html lang="{language}"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>p{{margin:1em}}</style><script>var a = '{ADS[language]}';</script></head><body>"
        f"{menu}{side if style < 2 else ''}{before}<h1>{title}</h1>{body}{behind}"
        f"{'' if style < 2 else side}{comments}{footer}</body></html>"
    )
    return page, [*MENUS[language], ADS[language], *COMMENTS[language], FOOTERS[language]]


def make_pages(texts: Texts, draw: random.Random) -> Iterator[tuple[int, str, str, list[str]]]:
    """Yield template, page, main text and the other texts, 200 times."""
    news, poems = [text for text in texts[0] if len(text) > 150], texts[1]
    for number in range(200):
        language = ("en", "zh")[number // 20 % 2]
        parts = draw.sample(news if language == "en" else poems, 6)
        parts = [part.replace("<", " ").replace("\n", "") for part in parts]
        title = parts.pop()[:30]
        page, others = write_page(number % 20, language, title, parts)
        yield number % 20, page, "\n".join([title, *parts]), others


def count_tokens(text: str) -> Counter[str]:
    """Return words and Chinese characters with their counts."""
    return Counter(split_tokens(text))


def measure_pages(texts: Texts) -> None:
    """Print F1 of words and characters, and the share of what is no main text, per reader."""
    for reader in ("resiliparse", "trafilatura"):
        scores, strange, lowest = [], [], (1.0, 0)
        for template, page, wanted, others in make_pages(texts, random.Random(0)):
            text = read_page(page, reader)
            found, right = count_tokens(text), count_tokens(wanted)
            common = sum((found & right).values())
            scores.append(2 * common / (sum(found.values()) + sum(right.values())))
            lowest = min(lowest, (scores[-1], template))
            there = sum(sum(count_tokens(one).values()) for one in others if one in text)
            strange.append(there / max(sum(found.values()), 1))
        print(
            f"{reader}: F1 {sum(scores) / len(scores):.4f}, lowest {lowest[0]:.3f} (template "
            f"{lowest[1]}), boilerplate {100 * sum(strange) / len(strange):.2f} %"
        )


def read_page(page: str, reader: str) -> str:
    """Return what a page is read as, nothing where it is dropped."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        path.write_text(page, "utf-8")
        (record,) = read_records(path, ReadOptions("text", reader))
        found = record.parse()
        return found.text if isinstance(found, Document) else ""


def main() -> None:
    """Measure what is asked for."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(f"stopped by signal {number}"))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["memory", "workers", "pages"])
    parser.add_argument("data", type=Path)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help="default settings, not all stages")
    parser.add_argument("--scratch", type=Path, help="where inputs are written, and removed")
    parser.add_argument("--resume", action="store_true", help="go on after a stop, in the scratch")
    arguments = parser.parse_args()
    measure: dict[str, Callable[[], None]] = {
        "memory": lambda: measure_memory(arguments, texts),
        "workers": lambda: measure_workers(arguments, texts),
        "pages": lambda: measure_pages(texts),
    }
    texts = read_texts(arguments.data)
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} CPUs")
    measure[arguments.what]()


if __name__ == "__main__":
    main()
