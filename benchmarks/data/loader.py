"""Tokens per second of the data loader, and the time and memory of opening a large corpus.

    python -m benchmarks.data.loader [--repetitions 7] [--steps 200]

The loader reads rows of 1,024 tokens from one store and from 100 shards, with and without
`reset_at_documents`, and with and without prefetching. Then a new process opens a corpus of 1e9
tokens in 1e6 documents, which takes no space on disk.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import resource
import statistics
import subprocess
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness import make_parser, rerun_command
from bmforge.data.load.loader import DataLoader
from bmforge.data.load.packing import PackedDataset
from bmforge.data.store.sharded import open_store, write_shard_list
from bmforge.data.store.token_store import HEADER, MAGIC, TokenStore
from bmforge.data.store.writer import TokenStoreWriter

SEQ_LEN = 1024
ROWS = 32
TARGET_TOKENS_PER_S = 5e6
SHARDS = 100
BIG_TOKENS = 1_000_000_000
BIG_DOCUMENTS = 1_000_000


def write_corpus(prefix: Path, documents: int = 20_000, mean_tokens: int = 1000) -> None:
    """Write a corpus of random tokens whose documents end with token 0."""
    generator = np.random.default_rng(0)
    with TokenStoreWriter(prefix, vocab_size=50_000) as writer:
        for length in generator.geometric(1 / mean_tokens, documents).tolist():
            writer.add_item(np.append(generator.integers(1, 50_000, length), 0))
            writer.end_document()


def write_shards(prefix: Path) -> None:
    """Write a corpus of the same size as 100 stores with a shard list."""
    shards = [prefix.with_name(f"{prefix.name}.{number:03d}") for number in range(SHARDS)]
    for shard in shards:
        write_corpus(shard, documents=20_000 // SHARDS)
    write_shard_list(prefix, shards)


def measure_rate(prefix: Path, steps: int, reset: bool, prefetch_steps: int) -> float:
    """Return tokens per second of one process over `steps` optimizer steps of 32 rows."""
    dataset = PackedDataset(open_store(prefix), SEQ_LEN, eos_id=0)
    with DataLoader(
        dataset,
        global_batch_size=ROWS,
        micro_batch_size=8,
        reset_at_documents=reset,
        prefetch_steps=prefetch_steps,
    ) as loader:
        next(loader)
        start = time.perf_counter()
        for _ in range(steps):
            next(loader)
        return steps * ROWS * SEQ_LEN / (time.perf_counter() - start)


def write_sparse_corpus(prefix: Path) -> None:
    """Write a store of 1e9 uint16 tokens in 1e6 documents with a sparse file."""
    sizes = np.full(BIG_DOCUMENTS, BIG_TOKENS // BIG_DOCUMENTS, dtype="<i4")
    pointers = np.arange(BIG_DOCUMENTS, dtype="<i8") * int(sizes[0]) * 2
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, BIG_DOCUMENTS, BIG_DOCUMENTS + 1))
        for part in (sizes, pointers, np.arange(BIG_DOCUMENTS + 1, dtype="<i8")):
            file.write(part.tobytes())
    with Path(f"{prefix}.bin").open("wb") as file:
        file.truncate(2 * BIG_TOKENS)


def resident_bytes() -> int:
    """Return the resident memory of this process (Linux), or else its peak."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def open_corpus(prefix: str) -> None:
    """Open a store; print the time, the memory and the time of the first step."""
    before = resident_bytes()
    start = time.perf_counter()
    store = TokenStore(prefix)
    opened = time.perf_counter() - start
    after = resident_bytes()
    tracemalloc.start()
    TokenStore(prefix)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    start = time.perf_counter()
    with DataLoader(
        PackedDataset(store, SEQ_LEN, eos_id=0), global_batch_size=ROWS, micro_batch_size=8
    ) as loader:
        next(loader)
    first = time.perf_counter() - start
    print(
        f"open {store.num_tokens:.0e} tokens in {store.num_documents:.0e} documents: "
        f"{opened * 1e3:.2f} ms (target < 1000), {(after - before) / 1e6:.2f} MB more resident, "
        f"{peak / 1e6:.3f} MB allocated at the peak (target < 100); first step after "
        f"{first * 1e3:.1f} ms"
    )


def main() -> None:
    """Print all figures with the machine and the versions."""
    parser = make_parser(__doc__)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--open", metavar="PREFIX", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.open:
        return open_corpus(options.open)
    print(
        f"{platform.platform()}, {platform.machine()}, {os.cpu_count()} cores, python "
        f"{platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}"
    )
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder, "one store"))
        write_shards(Path(folder, "100 shards"))
        cases = itertools.product(("one store", "100 shards"), (False, True), (2, 0))
        for name, reset, prefetch_steps in cases:
            rates = [
                measure_rate(Path(folder, name), options.steps, reset, prefetch_steps)
                for _ in range(options.repetitions)
            ]
            middle = statistics.median(rates)
            print(
                f"{name:10} reset_at_documents={reset!s:5} prefetch_steps={prefetch_steps}: "
                f"{middle / 1e6:6.1f} M tokens/s (median of {len(rates)}, "
                f"{min(rates) / 1e6:.1f} to {max(rates) / 1e6:.1f}), "
                f"{middle / TARGET_TOKENS_PER_S:.1f} x the target of 5 M"
            )
        write_sparse_corpus(Path(folder, "big"))
        # A new process, so that its peak belongs to the opening.
        subprocess.run(rerun_command("--open", str(Path(folder, "big"))), check=True)


if __name__ == "__main__":
    main()
