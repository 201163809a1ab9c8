"""Write CONTRIBUTING.md's tables of base modules and of subpackages with what each may import.

    python dev/package_table.py

Import rules come from `tests/architecture/test_imports.py`, descriptions from the first line of
each module's docstring. `tests/architecture` checks that the page is up to date.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
RULES = ROOT / "tests" / "architecture" / "test_imports.py"
BEGIN = "<!-- package table: written by dev/package_table.py -->\n"
END = "<!-- end of package table -->\n"


def load_rules() -> ModuleType:
    """Import the test module that defines the import rules."""
    sys.path.insert(0, str(RULES.parent))
    spec = importlib.util.spec_from_file_location("import_rules", RULES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def first_line(path: Path) -> str:
    """Return the first line of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    assert docstring, path
    return docstring.partition("\n")[0]


def render() -> str:
    """Return both tables as Markdown."""
    rules = load_rules()
    package: Path = rules.PACKAGE
    lines = ["| base module | |", "|---|---|"]
    lines += [
        f"| `{name}` | {first_line(package / f'{name}.py')} |"
        for name in sorted(rules.BASE_MODULES)
    ]
    lines += ["", "| subpackage | | may import, besides base modules |", "|---|---|---|"]
    for name, allowed in rules.ALLOWED.items():
        order = [other for other in rules.ALLOWED if other in allowed]
        names = ", ".join(f"`{other}`" for other in order) or "nothing"
        text = "everything" if "*" in allowed else names
        lines.append(f"| `{name}` | {first_line(package / name / '__init__.py')} | {text} |")
    return BEGIN + "\n" + "\n".join(lines) + "\n\n" + END


def page() -> str:
    """Return CONTRIBUTING.md with the tables replaced by current ones."""
    before, begin, rest = PAGE.read_text("utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin
    assert end
    return before + render() + after


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
