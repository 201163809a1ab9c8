"""Write the tables of docs/reference/licenses.md: all known licenses, with their clauses.

    python dev/license_pages.py

They come from `bmforge/license_table.py`; the text around them stays. A test checks that the page
is up to date.
"""

from __future__ import annotations

from pathlib import Path

from bmforge.license_table import LICENSES, PAIRS, POLICIES, TERMS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "licenses.md"
BEGIN = "<!-- licenses: written by dev/license_pages.py -->\n"
END = "<!-- end of licenses -->\n"


def render() -> str:
    """Return all tables."""
    parts = ["\n### Terms\n\n| term | requirement |\n|---|---|\n"]
    parts += [f"| {term} | {meaning} |\n" for term, meaning in TERMS.items()]
    parts.append("\n### Policies\n\n| policy | disallowed terms |\n|---|---|\n")
    for name, terms in POLICIES.items():
        shown = ", ".join(term for term in TERMS if term in terms) or "none"
        parts.append(f"| `{name}` | {shown} |\n")
    parts.append(
        "\n### Licenses\n\n| license | terms, with their clauses | compatible licenses |\n"
    )
    parts.append("|---|---|---|\n")
    for one in LICENSES.values():
        terms = "; ".join(f"{term}: {clause}" for term, clause in one.terms.items()) or "none"
        parts.append(f"| [{one.id}]({one.url}) | {terms} | {', '.join(one.compatible)} |\n")
    for (first, second), (what, clauses) in PAIRS.items():
        both = " and ".join(f"{a}, {b}" for a, b in zip((first, second), clauses, strict=True))
        parts.append(f"\nLicenses that conflict because of {what}: {both}.\n")
    return BEGIN + "".join(parts) + "\n" + END


def page() -> str:
    """Return the page with the tables in it."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + render() + after


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
