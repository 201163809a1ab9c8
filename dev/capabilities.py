"""Write docs/capabilities.md: family x capability, a table per room; a cell names its test.

    python dev/capabilities.py

The cells come from the suites: a test method marked with `bmforge.testing.capability` proves its
capabilities for the family of its class. `tests/architecture` checks that the page is up to date
and has no empty cell; that the tests pass is what `make test` says.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from bmforge.models.hub import FAMILIES
from bmforge.testing.capability import CAPABILITIES, ROOMS, find_capabilities

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "capabilities.md"
TESTS = ROOT / "tests" / "parity"
INTRO = """# Capabilities

Every capability on every family, in one table per room that owns them: a cell names the test that
proves it, in the file of the family's row. `make test-all` runs them all, `make test` those that do
not follow from another one. This page is written by `dev/capabilities.py`.
"""


def collect() -> dict[str, tuple[str, dict[str, str]]]:
    """Return family -> (test file, capability -> test or why there is none)."""
    found: dict[str, tuple[str, dict[str, str]]] = {}
    for file in sorted(TESTS.glob("test_*.py")):
        for suite in _suites(file):
            lacks = _reasons(suite)
            proofs = find_capabilities(suite).items()
            tests = {name: f"`{test}`" for name, test in proofs if name not in lacks}
            name = suite.model_class.__name__
            first, cells = found.get(name, (file.name, {}))
            known = {n: text for n, text in cells.items() if not text.startswith("(")}
            found[name] = (first, lacks | cells | tests | known)
    return found


def _reasons(suite: type) -> dict[str, str]:
    """Return why a family lacks capabilities, from the suite and those it is made of.

    A suite that brings the test of what its parents say they lack does not lack it.
    """
    reasons: dict[str, str] = {}
    proofs = find_capabilities(suite).items()
    for parent in reversed(suite.__mro__):
        brought = {name for name, test in proofs if test in vars(parent)}
        reasons = {name: why for name, why in reasons.items() if name not in brought}
        reasons |= vars(parent).get("not_applicable", {})
    reasons |= {
        f"changed: {n}": why for n, why in reasons.items() if f"changed: {n}" in CAPABILITIES
    }
    return {name: f"({why})" for name, why in reasons.items()}


def _suites(file: Path) -> list[type]:
    """Import a test file and return its classes that test a family."""
    spec = importlib.util.spec_from_file_location(f"capabilities_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    own = [c for c in vars(module).values() if getattr(c, "__module__", "") == spec.name]
    return [c for c in own if isinstance(c, type) and hasattr(c, "model_class")]


def render() -> str:
    """Return the page."""
    found = collect()
    tables = [f"\n## {room}\n\n{_table(found, names)}" for room, names in ROOMS.items()]
    return INTRO + "".join(tables)


def _table(found: dict[str, tuple[str, dict[str, str]]], names: tuple[str, ...]) -> str:
    """Return the table of some capabilities."""
    head = ["family", "tests", *names]
    rows = [head, ["---"] * len(head)]
    for family in sorted(FAMILIES):
        file, cells = found.get(family, ("", {}))
        rows.append([family, file, *(cells.get(name, "") for name in names)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
