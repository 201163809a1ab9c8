"""Speed of OpenBMB's tokenizers compared with the original algorithms, on one thread.

    python -m benchmarks.data.tokenizers DATA [--megabytes 10] [--kinds cpm1 cpm_ant] [--slices 8]

DATA is described in `texts.py`, and has the original vocabularies in `vocab`. Its lines are
shuffled, and repeated if they are shorter than `--megabytes`. Both sides encode every slice
alternately, and the ids are compared. The peers are plain implementations with jieba
(tests/tokenizers/plain_tokenizers.py).
"""

from __future__ import annotations

import csv
import itertools
import json
import logging
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jieba

from benchmarks.data.texts import read_poems
from benchmarks.harness import header, make_parser, paired_ratio, table, table_row
from bmforge.tokenizers import AutoTokenizer
from tests.tokenizers import plain_tokenizers

TARGET = 3.0
KINDS = {
    "cpm1": ("cpm1", plain_tokenizers.cpm1),
    "cpm2_cn": ("cpm2_cn", plain_tokenizers.cpm2),
    "cpm2_cn_en": ("cpm2_cn_en", plain_tokenizers.cpm2),
    "eva": ("eva", plain_tokenizers.eva),
    "cpm_ant": ("cpm_ant", plain_tokenizers.cpm_ant),
    "cpm_bee": ("cpm_bee", plain_tokenizers.cpm_bee),
}


def read_lines(data: Path) -> Iterator[str]:
    """Yield the poems, reviews, news items and speeches of DATA."""
    yield from read_poems(data)
    for path in sorted((data / "eprstmt").glob("*.json")):
        with path.open(encoding="utf-8") as file:
            yield from (json.loads(line)["sentence"] for line in file)
    with (data / "ag_news" / "test.csv").open(encoding="utf-8", newline="") as file:
        yield from (" ".join(row[1:]) for row in csv.reader(file))
    yield from (data / "tinyshakespeare.txt").read_text("utf-8").split("\n\n")


def take_slices(data: Path, total_bytes: int, slices: int) -> list[list[str]]:
    """Return `total_bytes` of text, distributed line by line over the slices."""
    chosen: list[str] = []
    lines = list(read_lines(data))
    random.Random(0).shuffle(lines)
    for line in itertools.cycle(lines):
        if total_bytes <= 0:
            break
        chosen.append(line)
        total_bytes -= len(line.encode()) + 1
    return [chosen[start::slices] for start in range(slices)]


def timed(encode: Callable[[str], list[int]], lines: list[str]) -> tuple[float, list[list[int]]]:
    """Encode lines one by one; return the seconds and the ids."""
    start = time.perf_counter()
    ids = [encode(line) for line in lines]
    return time.perf_counter() - start, ids


def open_bmforge(kind: str, folder: Path) -> Callable[[str], list[int]]:
    """Return the `encode` of a bmforge tokenizer; extension ids of CPM-Bee become -1."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if kind != "cpm_bee":
        return tokenizer.encode

    def encode(text: str) -> list[int]:
        ids, extension = tokenizer.encode_extended(text)
        return [-1 if id in extension else id for id in ids] if extension else ids

    return encode


def compare(kind: str, data: Path, slices: list[list[str]]) -> list[str]:
    """Return a row of the table: both rates, the ratio, and the number of different lines."""
    name, plain = KINDS[kind]
    folder = data / "vocab" / name
    encoders = {"bmforge": open_bmforge(kind, folder), "original": plain(folder)}
    for encode in encoders.values():
        timed(encode, slices[0][:20])
    seconds: dict[str, list[float]] = {side: [] for side in encoders}
    different = lines = 0
    for number, part in enumerate(slices):
        texts = [line.replace("<", " ") for line in part] if kind == "cpm_bee" else part
        ids = {}
        for side in list(encoders) if number % 2 else list(encoders)[::-1]:
            time_s, ids[side] = timed(encoders[side], texts)
            seconds[side].append(time_s)
        different += sum(a != b for a, b in zip(*ids.values(), strict=True))
        lines += len(texts)
    megabytes = sum(len(line.encode()) + 1 for part in slices for line in part) / 1e6
    ratio = paired_ratio(seconds, "bmforge", "original")
    return [
        kind,
        *(f"{megabytes / sum(seconds[side]):.3f}" for side in encoders),
        f"{ratio:.1f}",
        "yes" if ratio.low >= TARGET else "no",
        f"{different} of {lines}",
    ]


def main() -> None:
    """Print a row for every tokenizer."""
    parser = make_parser(__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--megabytes", type=float, default=10)
    parser.add_argument("--slices", type=int, default=8)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    jieba.setLogLevel(logging.WARNING)
    jieba.initialize()
    slices = take_slices(options.data, int(options.megabytes * 1e6), options.slices)
    packages = ("jieba", "rjieba", "ahocorasick-rs", "sentencepiece")
    print(header(1, packages))
    print()
    columns = ["tokenizer", "bmforge, MB/s", "original, MB/s", "speed, bmforge / original"]
    columns += [f"at least {TARGET:.0f}", "different lines"]
    print(table(columns, []))
    for kind in options.kinds:
        print(table_row(compare(kind, options.data, slices)), flush=True)


if __name__ == "__main__":
    main()
