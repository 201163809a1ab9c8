"""Memory and speed of `bmforge prepare`.

    python -m benchmarks.data.prepare memory DATA [--megabytes 250 1000] [--workers 1] [--plain]
        [--scratch DIR] [--resume]
    python -m benchmarks.data.prepare workers DATA [--megabytes 36] [--pairs 3] [--plain]

`memory` prepares a synthetic file of each size and prints the time, and the peak memory of all
processes, where shared pages are divided among them. `workers` compares two workers with one, in
alternating pairs. All stages run, or with `--plain` the default settings. DATA is described in
`texts.py`. A size of gigabytes takes hours; `--resume` continues an interrupted run in the scratch
folder.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.data.texts import Texts, read_texts
from benchmarks.harness import make_parser, paired_ratio

ALL_STAGES = ["--text-repairs", "repair", "invisible", "--languages", "any", "--rules", "mixed"]
ALL_STAGES += ["--mask-private", "--near-duplicates", "0.8"]
POLL_S = 0.25


def write_corpus(path: Path, texts: Texts, megabytes: int, seed: int) -> None:
    """Write documents of a few texts with a tenth of their words replaced; 5 % are copies."""
    generator = random.Random(seed)
    english, chinese = texts
    words = sorted({word for text in english for word in text.split()})
    size, line = 0, b""
    with path.open("wb") as file:
        while size < megabytes * 1_000_000:
            if not line or generator.random() >= 0.05:
                if generator.random() < 0.2:
                    text = "\n".join(generator.choices(chinese, k=generator.randint(2, 8)))
                else:
                    parts = " ".join(generator.choices(english, k=generator.randint(3, 12))).split()
                    for _ in range(len(parts) // 10):
                        parts[generator.randrange(len(parts))] = generator.choice(words)
                    text = " ".join(parts)
                line = json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n"
            file.write(line)
            size += len(line)


class Cost(NamedTuple):
    """Wall time and CPU time in seconds, and the peak memory of all processes in bytes."""

    seconds: float = 0.0
    cpu: float = 0.0
    peak: int = 0


def run_prepare(options: list[str], watch: bool, record: Path | None = None) -> Cost:
    """Run `bmforge prepare` and return its cost.

    Args:
        options: arguments of the command.
        watch: poll the memory and the CPU time.
        record: file with the cost of an interrupted run that this run continues.
    """
    earlier = Cost(*json.loads(record.read_text())) if record and record.exists() else Cost()
    begin, peak = time.monotonic(), earlier.peak
    cpu: dict[str, float] = {}

    def cost() -> Cost:
        seconds = earlier.seconds + time.monotonic() - begin
        return Cost(seconds, earlier.cpu + sum(cpu.values()), peak)

    command = [sys.executable, "-m", "bmforge", "prepare", *options]
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE) as process:
        try:
            while watch and process.poll() is None:
                peak = max(peak, measure_group(process.pid, cpu))
                time.sleep(POLL_S)
            errors = process.communicate()[1]
        except BaseException:  # an interruption also stops the workers
            os.killpg(process.pid, signal.SIGKILL)
            if record:
                record.write_text(json.dumps(cost()))
            raise
    if process.returncode:
        sys.exit(errors.decode())
    return cost()


def measure_group(group: int, cpu: dict[str, float]) -> int:
    """Return the memory of all processes of a group in bytes (sum of the PSS).

    Args:
        group: process group.
        cpu: receives the CPU seconds of each process.
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
        except (OSError, IndexError, ValueError):  # the process has ended
            continue
    return total


@contextmanager
def open_scratch(arguments: argparse.Namespace, megabytes: int) -> Iterator[str]:
    """Yield a folder that is removed at the end; with ``--resume``, only after a complete run."""
    if not arguments.resume:
        with tempfile.TemporaryDirectory(dir=arguments.scratch) as temporary:
            yield temporary
        return
    kind = "default" if arguments.plain else "all"
    name = f"prepare-{megabytes}-{kind}-{arguments.workers}"
    folder = Path(arguments.scratch or tempfile.gettempdir()) / name
    folder.mkdir(parents=True, exist_ok=True)
    yield str(folder)
    shutil.rmtree(folder)


def measure_memory(arguments: argparse.Namespace, megabytes: int, texts: Texts) -> None:
    """Print the time and the peak memory of a preparation."""
    with open_scratch(arguments, megabytes) as folder:
        path, out = Path(folder) / "large.jsonl", Path(folder) / "out"
        if not path.exists():
            write_corpus(path.with_suffix(".tmp"), texts, megabytes, 0)
            path.with_suffix(".tmp").rename(path)
        options = [str(path), "--out", str(out), "--workers", str(arguments.workers)]
        options += [] if arguments.plain else ALL_STAGES
        seconds, cpu, peak = run_prepare(options, True, Path(folder) / "cost.json")
        record = tomllib.loads((out / "prepared.toml").read_text("utf-8"))
    tokens = record["train"]["tokens"] + record["validation"]["tokens"]
    read, size = record["funnel"]["read"]["documents"], megabytes * 1_000_000
    print(
        f"{size / 1e6:.0f} MB, {arguments.workers} workers, "
        f"{'default' if arguments.plain else 'all'} stages: {read} "
        f"documents, {record['counts']['documents']} kept, {seconds:.0f} s, {cpu:.0f} CPU s, "
        f"{size / seconds / 1e6:.2f} MB/s, {tokens / seconds / 1e3:.0f} thousand tokens/s, "
        f"peak {peak / 1e6:.0f} MB of all processes",
        flush=True,
    )


def measure_workers(arguments: argparse.Namespace, megabytes: int, texts: Texts) -> None:
    """Print the seconds of one and of two workers in pairs, and the ratio of the speeds."""
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        path = Path(folder) / "large.jsonl"
        write_corpus(path, texts, megabytes, 0)
        shard_bytes = megabytes * 1_000_000 // 12
        seconds: dict[str, list[float]] = {"2 workers": [], "1 worker": []}
        for pair in range(arguments.pairs):
            for workers in (1, 2) if pair % 2 == 0 else (2, 1):
                out = Path(folder) / f"{pair}-{workers}"
                options = [str(path), "--out", str(out), "--shard-bytes", str(shard_bytes)]
                options += ["--workers", str(workers)]
                options += [] if arguments.plain else ALL_STAGES
                name = "2 workers" if workers == 2 else "1 worker"
                seconds[name].append(run_prepare(options, watch=False).seconds)
            print(", ".join(f"{name}: {times[-1]:.1f} s" for name, times in seconds.items()))
        print(f"{megabytes} MB: {paired_ratio(seconds, '2 workers', '1 worker')}", flush=True)


def main() -> None:
    """Measure each size."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(f"stopped by signal {number}"))
    parser = make_parser(__doc__)
    parser.add_argument("quantity", choices=["memory", "workers"])
    parser.add_argument("data", type=Path)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[64], help="sizes of the files")
    parser.add_argument("--workers", type=int, default=1, help="workers of `memory`")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of `workers`")
    parser.add_argument("--plain", action="store_true", help="default settings, not all stages")
    parser.add_argument("--scratch", type=Path, help="folder of the temporary files")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted `memory`")
    arguments = parser.parse_args()
    texts = read_texts(arguments.data)
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} CPUs", flush=True)
    measure = {"memory": measure_memory, "workers": measure_workers}[arguments.quantity]
    for megabytes in arguments.megabytes:
        measure(arguments, megabytes, texts)


if __name__ == "__main__":
    main()
