"""Resuming a training run that is killed with SIGKILL at random moments.

    python -m benchmarks.training.kill_resume [--kills 50] [--seed 0]

Prints one row per chain of up to ten kills: when the kills hit, whether every restart continued to
the end, and whether the losses of all steps and the final checkpoint (parameters, optimizer states,
random generators) are bit-identical to those of an uninterrupted run. The exit status is 0 if all
are.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.harness import make_parser
from tests.e2e.real_runs import (
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
    """Return the row of a chain: seed, kills at start-up and in training, and the three checks."""
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
    parser = make_parser(__doc__)
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
