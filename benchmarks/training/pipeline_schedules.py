"""Bubble fraction and memory of every pipeline schedule, computed from its order.

    python -m benchmarks.training.pipeline_schedules [--ranks 4] [--micro-batches 8]

The order of each schedule is replayed with unit times: a backward pass takes twice as long as a
forward pass, and each half of a split backward pass takes as long as a forward pass. Nothing is
timed, so the figures are exact and equal on every machine.
"""

from __future__ import annotations

from benchmarks.harness import make_parser, table
from bmforge.parallel.pipeline.replay import replay
from bmforge.parallel.pipeline.schedules import SCHEDULES, schedule_problems, write_schedule


def main() -> None:
    """Print a row for every schedule and two numbers of micro-batches."""
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    arguments = parser.parse_args()
    lines = []
    for name in SCHEDULES:
        for count in (arguments.micro_batches, 4 * arguments.micro_batches):
            if schedule_problems(name, arguments.ranks, count):
                continue
            schedule = write_schedule(name, arguments.ranks, count)
            per_rank = schedule.num_stages // arguments.ranks
            result = replay(schedule, forward=1 / per_rank, backward=2 / per_rank)
            idle = f"{max(result.bubble_ratios):.3f}"
            in_flight = max(result.peak_micro_batches) / per_rank
            lines.append((name, str(count), str(per_rank), idle, f"{in_flight:g}"))
    head = ["schedule", "micro-batches", "stages per rank", "bubble fraction", "in flight"]
    print(f"{arguments.ranks} ranks\n")
    print(table(head, lines))


if __name__ == "__main__":
    main()
