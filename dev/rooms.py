"""Write CONTRIBUTING.md's tables: the files of the ground floor, and what each room may import.

    python dev/rooms.py

Both come from `tests/architecture/test_imports.py`, which holds the source to them; what a file or
a room is for is the first line of its docstring. The text around the tables stays.
`tests/architecture` checks that the page is up to date.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
TABLE = ROOT / "tests" / "architecture" / "test_imports.py"
BEGIN = "<!-- rooms: written by dev/rooms.py -->\n"
END = "<!-- end of rooms -->\n"


def read_table() -> ModuleType:
    """Return the test module that has the table."""
    spec = importlib.util.spec_from_file_location("rooms_of_the_house", TABLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def purpose(path: Path) -> str:
    """Return the first line of a file's docstring."""
    said = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    assert said, path
    return said.partition("\n")[0]


def render() -> str:
    """Return both tables."""
    table = read_table()
    package: Path = table.PACKAGE
    lines = ["| ground floor | |", "|---|---|"]
    lines += [f"| `{name}` | {purpose(package / f'{name}.py')} |" for name in sorted(table.GROUND)]
    lines += ["", "| room | | may import, besides the ground floor |", "|---|---|---|"]
    for room, allowed in table.ALLOWED.items():
        init = package / room / "__init__.py"
        what = purpose(init) if init.exists() else "(to come)"
        order = [name for name in table.ALLOWED if name in allowed]
        names = ", ".join(f"`{name}`" for name in order) or "nothing"
        lines.append(f"| `{room}` | {what} | {'everything' if '*' in allowed else names} |")
    return BEGIN + "\n" + "\n".join(lines) + "\n\n" + END


def page() -> str:
    """Return CONTRIBUTING.md with the tables in it."""
    text = PAGE.read_text("utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin
    assert end
    return before + render() + after


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
