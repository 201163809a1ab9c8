"""How long a dry run takes: presets by sensible layouts, each built on a fake group.

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
from bmforge.parallel.dry_run import dry_run

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
    lines, times, refused = [], [], []
    for name, family, config in presets(arguments.largest):
        row = [name]
        for label, layout in LAYOUTS.items():
            start = time.perf_counter()
            try:
                dry_run(lambda f=family, c=config: f.from_config(c, device="meta"), layout, 64)
            except ConfigError as error:
                refused.append(f"{name}, {label}: {error}")
                row.append("does not fit")
                continue
            times.append(time.perf_counter() - start)
            row.append(f"{times[-1]:.2f}")
        lines.append(row)
    print(table(["preset, 64 processes", *(f"{label}, s" for label in LAYOUTS)], lines))
    slow = sum(seconds >= 2 for seconds in times)
    print(f"\nmedian {statistics.median(times):.2f} s, longest {max(times):.2f} s, ", end="")
    print(f"{slow} of {len(times)} took 2 s or more")
    print("\n".join(refused))


if __name__ == "__main__":
    main()
