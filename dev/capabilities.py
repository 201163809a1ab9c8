"""Write docs/reference/capabilities.md: capabilities of all families, in one table per package.

    python dev/capabilities.py

The cells are filled from the test suites: a test method marked with `bmforge.testing.capability`
tests its capabilities for the family of its class. `tests/architecture` checks that the page is up
to date and has no empty cell.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from bmforge.models.hub import FAMILIES
from bmforge.testing.capability import CAPABILITIES, ROOMS, find_capabilities

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "capabilities.md"
TESTS = ROOT / "tests" / "parity"
DASH = "–"
INTRO = """# Capabilities

Look up what each model family supports. There is one table per package. A tick links to the file of
the test, and its tooltip is the name of the test. The reason for a dash is below the table.
`make test-all` runs all of these tests. `dev/capabilities.py` generates this page.
"""


def collect() -> dict[str, tuple[str, dict[str, str]]]:
    """Return test file and cells by family; a cell is a test, or the reason for having none."""
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
    """Return the reasons why a family lacks capabilities, from the suite and its parents.

    A suite that adds the test of a capability that its parents lack has the capability.
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
    """Import a test file and return its test classes for families."""
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
    """Return a table of capabilities."""
    head = ["family", *names]
    rows = [head, ["---"] * len(head)]
    reasons: dict[tuple[str, str], list[str]] = {}
    for family in sorted(FAMILIES):
        file, cells = found.get(family, ("", {}))
        row = [_cell(file, cells.get(name, "")) for name in names]
        rows.append([family, *row])
        for name, cell in zip(names, row, strict=True):
            if cell == DASH:
                reasons.setdefault((name, cells[name].strip("()")), []).append(family)
    notes = [
        f"- `{name}` ({', '.join(families)}): {why}\n" for (name, why), families in reasons.items()
    ]
    return "".join([*(f"| {' | '.join(row)} |\n" for row in rows), "\n" * bool(notes), *notes])


def _cell(file: str, cell: str) -> str:
    """Return a tick that links to a test, a dash for a reason, or nothing."""
    if cell.startswith("("):
        return DASH
    return f'[✓](../../tests/parity/{file} "{cell.strip("`")}")' if cell else ""


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
