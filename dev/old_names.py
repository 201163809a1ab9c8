"""Write the name tables of the migrating pages: replacements of each name of an old package.

    python dev/old_names.py
    python dev/old_names.py bmtrain CHECKOUT/bmtrain    # public names there that the table lacks

The tables are in `bmforge/compat/*/names.txt`; the text around them on the pages stays.
`tests/compat/test_old_names.py` checks the tables and the pages.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from bmforge.compat.names import PAGES, Row, load_table, replacement_text

DOCS = Path(__file__).resolve().parents[1] / "docs"
END = "<!-- end of names -->\n"
_EVERYWHERE = ("forward", "backward", "extra_repr")


def row_text(row: Row) -> str:
    """Return the line of a row."""
    names = ", ".join(f"`{name}`" for name in row.names)
    note = replacement_text(row.note) if row.state == "gone" else row.note
    return f"| {names} | {row.state} | {note} |\n"


def render(package: str) -> str:
    """Return the tables of a package between the two markers."""
    parts = [f"<!-- names of {package}: written by dev/old_names.py -->\n"]
    for title, rows in load_table(package).items():
        parts.append(f"\n#### {title}\n\n| name | status | note |\n|---|---|---|\n")
        parts += map(row_text, rows)
    return "".join([*parts, "\n", END])


def page(package: str, text: str) -> str:
    """Return the text of a page with the tables in it.

    Raises:
        ValueError: the page lacks the marks.
    """
    begin = render(package).partition("\n")[0] + "\n"
    before, found, rest = text.partition(begin)
    if not found or END not in rest:
        raise ValueError(f"docs/{PAGES[package]} lacks the lines {begin.strip()} and {END.strip()}")
    return before + render(package) + rest.partition(END)[2]


def public_names(folder: Path) -> Iterator[str]:
    """Yield the public names that a package's source defines: `name`, or `Class.method`.

    Of methods, not those that every module or autograd function has.
    """
    for file in sorted(folder.rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name[0] == "_":
                continue
            yield node.name
            inside = node.body if isinstance(node, ast.ClassDef) else []
            own = (m.name for m in inside if isinstance(m, ast.FunctionDef))
            yield from (f"{node.name}.{m}" for m in own if m[0] != "_" and m not in _EVERYWHERE)


def lacking(package: str, folder: Path) -> list[str]:
    """Return the public names of an old package's source that are missing in its table.

    A method may be in the table below a parent class.
    """
    known = [name for rows in load_table(package).values() for row in rows for name in row.names]
    ends = {name.rpartition(".")[2] for name in known}
    found = dict.fromkeys(public_names(folder))
    return [name for name in found if name.rpartition(".")[2] not in ends]


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print("\n".join(lacking(sys.argv[1], Path(sys.argv[2]))))
    else:
        for name, file in PAGES.items():
            text = (DOCS / file).read_text(encoding="utf-8")
            (DOCS / file).write_text(page(name, text), encoding="utf-8")
