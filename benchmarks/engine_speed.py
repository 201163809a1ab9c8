"""A streamed model's decoding beside the disk: bytes moved per second over direct reads' speed.

    python benchmarks/engine_speed.py [--folder DIR] [--tokens 6]

The model's blocks are read past the page cache for every token. The plain figure is that of the
same file read by as many threads with nothing else to do; the two take turns, medians are compared.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from harness import header, table  # noqa: E402

from bmforge.errors import ConfigError  # noqa: E402
from bmforge.infer import Engine, EngineConfig  # noqa: E402
from bmforge.memory.direct_read import READ_THREADS, DirectReads  # noqa: E402
from bmforge.models import Llama, LlamaConfig  # noqa: E402

CHUNK = 1 << 20
CONFIG = LlamaConfig(
    vocab_size=4000,
    hidden_size=2048,
    intermediate_size=5632,
    num_layers=6,
    num_heads=32,
    num_kv_heads=4,
    max_seq_len=256,
)


def read_plainly(path: Path, most: int | None = None) -> float:
    """Bytes per second of reading a file, or its first bytes, past the cache; nothing is copied."""
    size = path.stat().st_size // CHUNK * CHUNK
    size = size if most is None else min(size, most)
    descriptor, own = DirectReads().open(path), threading.local()

    def read(start: int) -> None:
        if not hasattr(own, "buffer"):
            own.buffer = mmap.mmap(-1, CHUNK)
        assert os.preadv(descriptor, [own.buffer], start) == CHUNK

    begin = time.perf_counter()
    with ThreadPoolExecutor(READ_THREADS) as pool:
        list(pool.map(read, range(0, size, CHUNK)))
    seconds = time.perf_counter() - begin
    os.close(descriptor)
    return size / seconds


def smallest(folder: str, options: dict[str, Any]) -> int:
    """The least budget, as the engine says it."""
    try:
        Engine(folder, device_budget_bytes=1, **options)
    except ConfigError as error:
        return int(str(error).split("too small: ")[1].split()[0])
    raise AssertionError("a byte was enough")


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--tokens", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        Llama.from_config(CONFIG, dtype=torch.float32).save_pretrained(folder)
        path = Path(folder) / "model.safetensors"
        options = {"config": EngineConfig(max_tokens=64)}
        print(header("python benchmarks/engine_speed.py", torch.get_num_threads(), ("torch",)))
        rows = []
        for share in (0.0, 0.5):
            least = smallest(folder, options)
            budget = least + int(share * (path.stat().st_size - least))
            with Engine(folder, device_budget_bytes=budget, **options) as engine:
                moved, ids = engine.plan.moved_bytes, torch.ones(1, 8, dtype=torch.int64)
                engine.generate(ids, max_new_tokens=2, eos_token_id=())
                plain, streamed = [], []
                for _ in range(chosen.rounds):
                    plain.append(read_plainly(path))
                    begin = time.perf_counter()
                    engine.generate(ids, max_new_tokens=chosen.tokens, eos_token_id=())
                    streamed.append(chosen.tokens * moved / (time.perf_counter() - begin))
                disk, own = statistics.median(plain), statistics.median(streamed)
                stays = f"{len(engine.plan.resident)} of {CONFIG.num_layers}"
                rows.append(
                    [
                        stays,
                        f"{moved / 1e6:.0f}",
                        f"{own / moved:.2f}",
                        f"{own / 1e6:.0f}",
                        f"{disk / 1e6:.0f}",
                        f"{own / disk:.2f}",
                    ]
                )
    titles = [
        "blocks that stay",
        "MB moved per token",
        "tokens/s",
        "MB/s",
        "plain direct reads, MB/s",
    ]
    print(table([*titles, "share"], rows))


if __name__ == "__main__":
    main()
