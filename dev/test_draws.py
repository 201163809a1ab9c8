"""Measure the tests' processor time, and choose how many variants of a test `make test` runs.

A test function with many parameters is a matrix: `make test-all` runs all of it, `make test` a
sample. The sample sizes are in tests/draws.toml. To measure every variant and write them anew:

    export PYTHONPATH=dev TEST_COSTS=costs.jsonl
    python -m pytest -p test_draws -m "not long" --every-variant
    python dev/test_draws.py costs.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tomllib
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from draws import FILE, matrix_name  # noqa: E402 (in a folder that is not on the path)

# CPU seconds of one test function in `make test`, over all its variants; at least one runs.
SECONDS = 0.5


def cpu_seconds() -> float:
    """Return the processor time of this process and of its ended children."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    """Append the test's id and its CPU seconds to the file that TEST_COSTS names."""
    start = cpu_seconds()
    result = yield
    with Path(os.environ["TEST_COSTS"]).open("a") as file:
        file.write(json.dumps([item.nodeid, round(cpu_seconds() - start, 3)]) + "\n")
    return result


def choose(costs: dict[str, float], seconds: float) -> dict[str, int]:
    """Return the sample size of each test function whose variants take longer than `seconds`.

    Args:
        costs: CPU seconds by test id.
        seconds: CPU seconds of one test function.
    """
    variants = defaultdict(list)
    for test, cost in costs.items():
        variants[matrix_name(test)].append(cost)
    return {
        name: max(1, int(seconds / (sum(group) / len(group))))
        for name, group in sorted(variants.items())
        if len(group) > 1 and sum(group) > seconds
    }


def main() -> None:
    """Rewrite the measured part of the file; the part that was set by hand stays."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("costs", type=Path, help="what the measurement wrote")
    costs = dict(json.loads(line) for line in parser.parse_args().costs.read_text().splitlines())
    by_hand, _, _ = FILE.read_text().partition("[measured]")
    chosen = tomllib.loads(by_hand)["chosen"]
    sizes = {name: size for name, size in choose(costs, SECONDS).items() if name not in chosen}
    lines = [f"{json.dumps(name)} = {size}" for name, size in sizes.items()]
    FILE.write_text(by_hand + "\n".join(["[measured]", *lines]) + "\n")


if __name__ == "__main__":
    main()
