"""Write the tables of docs/guides/cleaning.md: all rules with their limits, sources and examples.

    python dev/rule_tables.py

They come from `bmforge/data/clean/rules` and `bmforge/data/clean/private.py`; the text around them
stays. A test checks that the page is up to date.
"""

from __future__ import annotations

from pathlib import Path

from bmforge.data.clean.private import KINDS
from bmforge.data.clean.rule import Bounds
from bmforge.data.clean.rules import RULE_SETS, RULES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "guides" / "cleaning.md"
BEGIN = "<!-- rules: written by dev/rule_tables.py -->\n"
END = "<!-- end of rules -->\n"


def show_bounds(bounds: Bounds) -> str:
    """Return limits in readable form."""
    low, high = (f"{one:g}" if one is not None else "" for one in (bounds.low, bounds.high))
    if low and high:
        return f"{low} to {high}"
    return f"at least {low}" if low else f"at most {high}" if high else "none"


def clean_cell(text: str) -> str:
    """Return text escaped for a table."""
    return text.replace("|", "\\|").replace("\n", " / ")


def render() -> str:
    """Return all tables."""
    parts = ["\n| `rules` | language | sets, in this order |\n|---|---|---|\n"]
    for name, table in RULES.items():
        for language, sets in table.items() or {"*": ()}.items():
            shown = {"*": "any other" if len(table) > 1 else "any"}.get(language, language)
            parts.append(f"| `{name}` | {shown} | {', '.join(sets) or 'none'} |\n")
    for rules in RULE_SETS.values():
        parts.append(f"\n### {rules.name}, version {rules.version}\n\nSource: {rules.source}.\n\n")
        parts.append("| rule | what is measured | bounds | source | an example that breaks it |\n")
        parts.append("|---|---|---|---|---|\n")
        for rule in rules.rules:
            bounds = show_bounds(rule.bounds)
            for form, other in rule.forms.items():
                bounds += f"; {form}: {show_bounds(other)}"
            cells = (f"`{rule.name}`", rule.meaning, bounds, rule.source, rule.example)
            parts.append(f"| {' | '.join(map(clean_cell, cells))} |\n")
    parts.append("\n### Kinds of private data\n\n| kind | what is found |\n|---|---|\n")
    parts += [f"| `{name}` | {kind.meaning} |\n" for name, kind in KINDS.items()]
    return BEGIN + "".join(parts) + "\n" + END


def page() -> str:
    """Return the page with the tables in it."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + render() + after


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
