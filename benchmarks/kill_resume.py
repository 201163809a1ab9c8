"""Kill a training run with SIGKILL at random instants, resume it, and compare with an unkilled run.

    python benchmarks/kill_resume.py              # 50 kills in chains of 10
    python benchmarks/kill_resume.py --kills 10

Prints one row per chain: where the kills hit, whether every restart went on to the end, and whether
the losses of every step and the final checkpoint (parameters, optimizer, random generators) are
bit-identical to those of the unkilled run. The exit status is 0 if all are.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "e2e"))

from real_runs import (
    command,
    final_hashes,
    finish,
    kill_in_chain,
    losses,
    start,
    write_config,
)

CHAIN, STEPS = 10, 60


def run_chain(
    config: Path, run_dir: Path, unkilled: Path, kills: int, seed: int
) -> list[int | bool]:
    """One row: kills at start-up, kills in training, resumed to the end, losses, final state."""
    arguments = command(config, run_dir)
    hits = kill_in_chain(arguments, kills, STEPS, seed)
    status, errors = finish(start(arguments))
    if status != 0:
        print(errors, file=sys.stderr)
        return [seed, hits.count("start-up"), hits.count("training"), False, False, False]
    same = losses(run_dir) == losses(unkilled), final_hashes(run_dir) == final_hashes(unkilled)
    return [seed, hits.count("start-up"), hits.count("training"), True, *same]


def main() -> int:
    """Run all chains and print the table."""
    parser = argparse.ArgumentParser(description="kill -9 at random instants, and resume")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = write_config(folder, STEPS)
        unkilled = folder / "unkilled"
        status, errors = finish(start(command(config, unkilled)))
        if status != 0:
            print(errors, file=sys.stderr)
            return 1
        print(
            f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores"
        )
        print("| chain | kills at start-up | kills in training | resumed | losses | final state |")
        print("|---|---|---|---|---|---|")
        done, good, number = 0, 0, 0
        while done < arguments.kills:
            kills = min(CHAIN, arguments.kills - done)
            seed = arguments.seed + number
            row = run_chain(config, folder / f"run{number}", unkilled, kills, seed)
            cells = [("yes" if c else "NO") if isinstance(c, bool) else str(c) for c in row]
            print(f"| {' | '.join(cells)} |", flush=True)
            hit = int(row[1]) + int(row[2])
            done, number = done + hit, number + 1
            good += hit if all(row[3:]) else 0
    print(f"{good} of {done} kills resumed, bit-identical")
    return 0 if good == done else 1


if __name__ == "__main__":
    sys.exit(main())
