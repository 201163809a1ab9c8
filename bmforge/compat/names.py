"""Tables of old packages' public names and their replacements, for the docs and error messages.

Each package in this folder has its table in its `names.txt`; `dev/old_names.py` writes it into the
package's documentation page, and `tests/compat/test_old_names.py` compares table and page with the
code. The error messages in `upstream.py` quote the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from bmforge.errors import ConfigError

__all__ = [
    "PAGES", "STATES", "Row", "Table", "load_table", "read_names", "removed_message",
    "replacement_text",
]  # fmt: skip

STATES = ("same", "changed", "gone")
# Maps each old package to its page in docs/.
PAGES = {
    "bmtrain": "migrating/index.md",
    "model_center": "migrating/model_center.md",
    "cpm_pretrain": "migrating/cpm_pretrain.md",
    "bminf": "migrating/bminf.md",
    "bmcook": "migrating/bmcook.md",
    "openprompt": "migrating/openprompt.md",
    "opendelta": "migrating/opendelta.md",
}


class Row(NamedTuple):
    """Names of an old package that have the same support status.

    Args:
        names: dotted names relative to the old package (`Block`, `store.save`, `Block.reference`).
        state: "same"; "changed", and the note says how; "gone", and the note says what to use.
        note: change that a program must consider; for a name that is gone, the text after the word
            "Use", or "nothing: REASON" if the program does not need the name any more.
    """

    names: tuple[str, ...]
    state: str
    note: str


Table = Mapping[str, Sequence[Row]]


@cache
def load_table(package: str) -> Table:
    """Return the table of an old package's public names, such as that of "bmtrain"."""
    return read_names((Path(__file__).parent / package / "names.txt").read_text("utf-8"))


def read_names(text: str) -> Table:
    """Parse a table: lines ``name name | state | note`` below lines ``# title``.

    A line that ends with a backslash continues on the next one.

    Raises:
        ConfigError: a line has a different format, or a name occurs twice.
    """
    table: dict[str, list[Row]] = {}
    seen: set[str] = set()
    rows: list[Row] | None = None
    for line in filter(None, map(str.strip, text.replace("\\\n", "").splitlines())):
        if line.startswith("# "):
            rows = table.setdefault(line[2:], [])
            continue
        names, state, note = (part.strip() for part in [*line.split(" | "), "", ""][:3])
        own = tuple(names.split())
        if rows is None or state not in STATES or (state != "same" and not note):
            raise ConfigError(
                f"the table row {line!r} must have the form 'names | {' or '.join(STATES)} | note'."
            )
        for name in own:
            if name in seen:
                raise ConfigError(f"the name {name} is in the table twice. Remove one of the rows.")
            seen.add(name)
        rows.append(Row(own, state, note))
    return table


def replacement_text(note: str) -> str:
    """Return the advice for a removed name: "use REPLACEMENT", or "not needed: REASON"."""
    unneeded = note.removeprefix("nothing")
    return f"use {note}" if unneeded == note else f"not needed{unneeded}"


def removed_message(name: str, note: str) -> str:
    """Return the error message for a removed name, given the note in its row."""
    advice = replacement_text(note)
    return f"{name} was removed. {advice[0].upper()}{advice[1:]}."
