"""Write the table of docs/migrating/cpm_pretrain.md: CPM-Pretrain's arguments and our fields.

    python dev/cpm_pretrain_table.py

The text around the table stays. `tests/recipes` checks the page.
"""

from __future__ import annotations

from pathlib import Path

from bmforge.compat.cpm_pretrain.arguments import ARGUMENTS, Argument

PAGE = Path(__file__).resolve().parents[1] / "docs" / "migrating" / "cpm_pretrain.md"
BEGIN = "<!-- table: written by dev/cpm_pretrain_table.py -->\n"
END = "<!-- end of table -->\n"


def row(name: str, argument: Argument) -> str:
    """Return an argument's line."""
    fields = ", ".join(f"`{field}`" for field in argument.fields) or "none"
    note = argument.note
    if argument.only:
        note = f"{argument.only}-pretrain only" + (f"; {note}" if note else "")
    return f"| `{name}` | {fields} | {note} |\n"


def render() -> str:
    """Return the table."""
    parts = [BEGIN]
    for title, arguments in ARGUMENTS.items():
        parts.append(f"\n### {title}\n\n| CPM-Pretrain | bmforge | note |\n|---|---|---|\n")
        parts += [row(name, argument) for name, argument in arguments.items()]
    return "".join([*parts, "\n", END])


def page(text: str) -> str:
    """Return the page's text with the table in it."""
    before, _, rest = text.partition(BEGIN)
    return before + render() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
