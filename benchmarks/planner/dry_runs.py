"""Time of a dry run: the largest presets with several layouts, on a fake process group.

    python -m benchmarks.planner.dry_runs [--largest 30]

Prints the wall time and the CPU time in seconds for 64 processes. The CPU time is the cost of the
dry run itself if other processes use the machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

from benchmarks.harness import header, make_parser, table
from bmforge.errors import ConfigError
from bmforge.models.config import ModelConfig
from bmforge.models.hub import FAMILIES
from bmforge.parallel import Layout
from bmforge.parallel.planner.dry_run import dry_run

LAYOUTS = {
    "zero3": Layout(),
    "tp2 + sequence": Layout(tp=2, sequence_parallel=True),
    "tp8": Layout(tp=8),
    "pp2": Layout(pp=2),
    "tp2 x pp2": Layout(tp=2, pp=2),
    "cp2": Layout(cp=2),
}


def presets(largest: int) -> Iterator[tuple[str, type, ModelConfig]]:
    """Yield the largest preset of every family, up to `largest` of them, largest first."""
    entries = []
    for family in FAMILIES.values():
        configs = {n: family.config_class.preset(n) for n in family.config_class.presets}
        name = max(configs, key=lambda n: configs[n].num_layers * configs[n].hidden_size ** 2)
        entries.append((name, family, configs[name]))
    entries.sort(key=lambda entry: -entry[2].num_layers * entry[2].hidden_size ** 2)
    yield from entries[:largest]


def main() -> None:
    """Print a row for every preset."""
    parser = make_parser(__doc__)
    parser.add_argument("--largest", type=int, default=30)
    arguments = parser.parse_args()
    print(header(1, ["torch"]) + "\n")
    lines, refused = [], []
    wall: list[float] = []
    cpu: list[float] = []
    for name, family, config in presets(arguments.largest):
        row = [name]
        for label, layout in LAYOUTS.items():
            start = time.perf_counter(), time.process_time()
            try:
                dry_run(lambda f=family, c=config: f.from_config(c, device="meta"), layout, 64)
            except ConfigError as error:
                refused.append(f"{name}, {label}: {error}")
                row.append("does not fit")
                continue
            wall.append(time.perf_counter() - start[0])
            cpu.append(time.process_time() - start[1])
            row.append(f"{wall[-1]:.2f} / {cpu[-1]:.2f}")
        lines.append(row)
    print(table(["preset, 64 processes", *(f"{label}: wall / CPU, s" for label in LAYOUTS)], lines))
    for what, times in (("wall time", wall), ("CPU time", cpu)):
        slow = sum(seconds >= 2 for seconds in times)
        print(f"\n{what}: median {statistics.median(times):.2f} s, longest ", end="")
        print(f"{max(times):.2f} s, {slow} of {len(times)} took 2 s or more")
    print("\n".join(refused))


if __name__ == "__main__":
    main()
