"""What `bmforge prepare` holds in memory with all stages, of 1 and of 4 GB of text; its speed-up.

``python benchmarks/prepare_memory.py DATA [--megabytes 1000 4000] [--speed-megabytes 200]`` writes
synthetic files of these sizes, prepares each with all stages and one worker, and prints the largest
memory of all processes together, shared pages divided among them; then seconds of one worker and of
two, in pairs. DATA is as in `prepare_speed.py`. It takes hours; a size is printed when it is done.
With ``--resume`` the same command goes on after it was stopped.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from prepare_speed import measure_memory, measure_workers, read_texts


def main() -> None:
    """Measure the sizes, then the workers."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(f"stopped by signal {number}"))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1000, 4000])
    parser.add_argument("--speed-megabytes", type=int, default=200, help="0 compares no workers")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help="default settings, not all stages")
    parser.add_argument("--scratch", type=Path, help="where inputs are written, and removed")
    parser.add_argument("--resume", action="store_true", help="go on after a stop, in the scratch")
    options = parser.parse_args()
    texts = read_texts(options.data)
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} CPUs", flush=True)
    for megabytes in options.megabytes:
        one = argparse.Namespace(**{**vars(options), "megabytes": megabytes, "workers": 1})
        measure_memory(one, texts)
        sys.stdout.flush()
    if options.speed_megabytes:
        options.megabytes = options.speed_megabytes
        measure_workers(options, texts)


if __name__ == "__main__":
    main()
