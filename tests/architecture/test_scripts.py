"""Benchmarks, development scripts and examples: imported names exist, speed ratios are correct."""

import ast
import importlib
import random
import statistics
from math import comb
from pathlib import Path

import pytest

from benchmarks.harness import paired_ratio

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    file for folder in ("benchmarks", "dev", "examples") for file in (ROOT / folder).rglob("*.py")
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_names_are_there(script):
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or "triton" in (node.module or ""):
            continue  # Triton is optional, and prints messages when the process ends
        # A conftest imports from its own folder, which is on sys.path only in a run of pytest.
        assert "conftest" not in (node.module or ""), f"{script} imports from {node.module}"
        if (node.module or "").split(".")[0] in ("bmforge", "benchmarks", "tests"):
            module = importlib.import_module(node.module)
            for name in (alias.name for alias in node.names):
                if not hasattr(module, name):
                    importlib.import_module(f"{node.module}.{name}")


def test_paired_ratio():
    """The direction follows the names, and the interval is that of the exact bootstrap."""
    rounds = random.Random(0)
    slow = [rounds.lognormvariate(0, 1) for _ in range(51)]
    noise = [rounds.lognormvariate(0, 0.1) for _ in slow]
    seconds = {"a": slow, "b": [2 * x * y for x, y in zip(slow, noise, strict=True)]}
    ratio = paired_ratio(seconds, "a", "b")
    assert ratio.sides == "a / b"
    assert ratio.median == pytest.approx(2 * statistics.median(noise))
    # The chance that the median of a resample is at most the kth smallest of n values.
    n, ordered = len(noise), sorted(noise)
    chances = [
        sum(comb(n, m) * (k / n) ** m * (1 - k / n) ** (n - m) for m in range((n + 1) // 2, n + 1))
        for k in range(1, n + 1)
    ]
    for bound, quantile in ((ratio.low, 0.025), (ratio.high, 0.975)):
        at = next(k for k, chance in enumerate(chances) if chance >= quantile)
        assert 2 * ordered[at - 1] <= bound <= 2 * ordered[at + 1]  # 10,000 resamples of many
    half = paired_ratio({"a": [1.0] * 3, "b": [2.0] * 3}, "b", "a")
    assert f"{half}" == f"speed, b / a: {half:.2f}" == "speed, b / a: 0.50 (0.50 to 0.50)"
