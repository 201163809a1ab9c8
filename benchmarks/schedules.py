"""Idle share and memory of every pipeline schedule, from its order replayed with unit times.

A whole backward takes twice a forward; where it comes in halves, each takes as long as a forward.
Nothing is timed: the figures are exact for the order, and the same on every machine.

    python benchmarks/schedules.py [--ranks 4] [--micro-batches 8]
"""

from __future__ import annotations

import argparse

from harness import table

from bmforge.parallel.pipeline.replay import replay
from bmforge.parallel.pipeline.schedules import SCHEDULES, problems, write_schedule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    arguments = parser.parse_args()
    lines = []
    for name in SCHEDULES:
        for count in (arguments.micro_batches, 4 * arguments.micro_batches):
            if problems(name, arguments.ranks, count):
                continue
            schedule = write_schedule(name, arguments.ranks, count)
            per_rank = schedule.num_stages // arguments.ranks
            found = replay(schedule, forward=1 / per_rank, backward=2 / per_rank)
            idle = f"{max(found.bubble_ratios):.3f}"
            alive = max(found.peak_micro_batches) / per_rank
            lines.append((name, str(count), str(per_rank), idle, f"{alive:g}"))
    head = ["schedule", "micro-batches", "stages per rank", "bubble fraction", "in flight"]
    print(f"{arguments.ranks} ranks\n")
    print(table(head, lines))


if __name__ == "__main__":
    main()
