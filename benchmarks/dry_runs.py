"""How long a dry run takes: presets by sensible layouts, each built on a fake group.

Times are "elapsed / of the processor", in seconds; on a machine that does other things besides, the
second says what a dry run itself costs.

python benchmarks/dry_runs.py [--largest 30]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

from harness import header, table

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
    found = []
    for family in FAMILIES.values():
        configs = {n: family.config_class.preset(n) for n in family.config_class.presets}
        name = max(configs, key=lambda n: configs[n].num_layers * configs[n].hidden_size ** 2)
        found.append((name, family, configs[name]))
    found.sort(key=lambda entry: -entry[2].num_layers * entry[2].hidden_size ** 2)
    yield from found[:largest]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--largest", type=int, default=30)
    arguments = parser.parse_args()
    print(header("python benchmarks/dry_runs.py", 1, ["torch"]) + "\n")
    lines, refused = [], []
    elapsed: list[float] = []
    worked: list[float] = []
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
            elapsed.append(time.perf_counter() - start[0])
            worked.append(time.process_time() - start[1])
            row.append(f"{elapsed[-1]:.2f} / {worked[-1]:.2f}")
        lines.append(row)
    print(table(["preset, 64 processes", *(f"{label}, s" for label in LAYOUTS)], lines))
    for what, times in (("elapsed", elapsed), ("processor", worked)):
        slow = sum(seconds >= 2 for seconds in times)
        print(f"\n{what}: median {statistics.median(times):.2f} s, longest ", end="")
        print(f"{max(times):.2f} s, {slow} of {len(times)} took 2 s or more")
    print("\n".join(refused))


if __name__ == "__main__":
    main()
