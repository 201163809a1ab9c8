"""Time OpenBMB's tokenizers against their originals' algorithms, on the same text and one thread.

Run: python benchmarks/tokenizer_speed.py [--megabytes 10] [--kinds cpm1 cpm_ant] [--slices 8]

The text is ../shared/data line by line (Tang poems, Chinese reviews, English news, Shakespeare),
shuffled, and from the start again where it is shorter than asked for. Every slice of it is encoded
by both in turns, and the ids are compared. The peers are plain implementations with jieba itself,
in tests/tokenizers/plain_tokenizers.py.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import logging
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The folder of this file would hide the library `tokenizers`: its place is taken.
sys.path[0] = str(ROOT)
sys.path[1:1] = [str(ROOT / "tests" / "tokenizers")]
import jieba  # noqa: E402
import plain_tokenizers  # noqa: E402

from benchmarks.harness import header, paired_ratio, table  # noqa: E402
from bmforge.tokenizers import AutoTokenizer  # noqa: E402

DATA = ROOT.parent / "shared" / "data"
TARGET = 3.0
KINDS = {
    "cpm1": ("cpm1", plain_tokenizers.cpm1),
    "cpm2_cn": ("cpm2_cn", plain_tokenizers.cpm2),
    "cpm2_cn_en": ("cpm2_cn_en", plain_tokenizers.cpm2),
    "eva": ("eva", plain_tokenizers.eva),
    "cpm_ant": ("cpm_ant", plain_tokenizers.cpm_ant),
    "cpm_bee": ("cpm_bee", plain_tokenizers.cpm_bee),
}


def read_lines() -> Iterator[str]:
    """Yield the texts of ../shared/data."""
    with (DATA / "tang_poetry.jsonl").open(encoding="utf-8") as file:
        yield from (json.loads(line)["text"] for line in file)
    for path in sorted((DATA / "eprstmt").glob("*.json")):
        with path.open(encoding="utf-8") as file:
            yield from (json.loads(line)["sentence"] for line in file)
    with (DATA / "ag_news" / "test.csv").open(encoding="utf-8", newline="") as file:
        yield from (" ".join(row[1:]) for row in csv.reader(file))
    yield from (DATA / "tinyshakespeare.txt").read_text("utf-8").split("\n\n")


def take_slices(total_bytes: int, slices: int) -> list[list[str]]:
    """Return `total_bytes` of text, dealt out line by line so that all slices are alike."""
    found: list[str] = []
    lines = list(read_lines())
    random.Random(0).shuffle(lines)
    for line in itertools.cycle(lines):
        if total_bytes <= 0:
            break
        found.append(line)
        total_bytes -= len(line.encode()) + 1
    return [found[start::slices] for start in range(slices)]


def timed(encode: Callable[[str], list[int]], lines: list[str]) -> tuple[float, list[list[int]]]:
    """Return the seconds that encoding `lines` one by one takes, and the ids."""
    start = time.perf_counter()
    ids = [encode(line) for line in lines]
    return time.perf_counter() - start, ids


def ours_for(kind: str, folder: Path) -> Callable[[str], list[int]]:
    """Return our `encode`; CPM-Bee's gives the extension ids as -1, as the peer does."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if kind != "cpm_bee":
        return tokenizer.encode

    def encode(text: str) -> list[int]:
        ids, extension = tokenizer.encode_extended(text)
        return [-1 if id in extension else id for id in ids] if extension else ids

    return encode


def compare(kind: str, slices: list[list[str]]) -> list[str]:
    """Return a row of the table: both rates, and the ratio with its interval."""
    name, plain = KINDS[kind]
    folder = DATA / "vocab" / name
    ours, theirs = ours_for(kind, folder), plain(folder)
    timed(ours, slices[0][:20]), timed(theirs, slices[0][:20])
    times: list[tuple[float, float]] = []
    different = lines = 0
    for number, part in enumerate(slices):
        texts = [line.replace("<", " ") for line in part] if kind == "cpm_bee" else part
        if number % 2:
            (peer_s, peer_ids), (our_s, our_ids) = timed(theirs, texts), timed(ours, texts)
        else:
            (our_s, our_ids), (peer_s, peer_ids) = timed(ours, texts), timed(theirs, texts)
        times.append((our_s, peer_s))
        different += sum(a != b for a, b in zip(our_ids, peer_ids, strict=True))
        lines += len(texts)
    megabytes = sum(len(line.encode()) + 1 for part in slices for line in part) / 1e6
    our_total, peer_total = (sum(column) for column in zip(*times, strict=True))
    ratio, low, high = paired_ratio([a for a, _ in times], [b for _, b in times])
    return [
        kind,
        f"{megabytes / our_total:.2f}",
        f"{megabytes / peer_total:.3f}",
        f"{ratio:.1f} ({low:.1f} to {high:.1f})",
        "yes" if low >= TARGET else "NO",
        f"{different} of {lines}",
    ]


def main() -> None:
    """Print one row for every kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=10)
    parser.add_argument("--slices", type=int, default=8)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    jieba.setLogLevel(logging.WARNING)
    jieba.initialize()
    slices = take_slices(int(options.megabytes * 1e6), options.slices)
    packages = ("jieba", "rjieba", "ahocorasick-rs", "sentencepiece")
    print(header("python benchmarks/tokenizer_speed.py " + " ".join(sys.argv[1:]), 1, packages))
    print()
    columns = [
        "tokenizer",
        "ours MB/s",
        "original MB/s",
        "ratio (95 %)",
        ">= 3",
        "lines that differ",
    ]
    print(table(columns, []))
    for kind in options.kinds:
        print("| " + " | ".join(compare(kind, slices)) + " |", flush=True)


if __name__ == "__main__":
    main()
