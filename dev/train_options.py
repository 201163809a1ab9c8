"""Write the names of all options of `bmforge train`, which are needed before torch is imported.

    python dev/train_options.py

They are the fields of every task's config and of every family's; `bmforge/cli/train_options.py` is
what is written. `tests/cli` checks that it is up to date.
"""

from __future__ import annotations

import dataclasses
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bmforge.models.hub import FAMILIES
from bmforge.recipes.registry import RECIPES, TASKS

PLACE = Path(__file__).resolve().parents[1] / "bmforge" / "cli" / "train_options.py"
HEAD = '''"""Generated table of the config fields of each task; see `dev/train_options.py`."""

from __future__ import annotations

__all__ = ["FIELDS"]

_NAMES = """
'''
TAIL = '''
"""
FIELDS = frozenset(_NAMES.split())
'''


def find_fields(kind: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted option names of a config's fields."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        name = prefix + field.name.replace("_", "-")
        if not field.init:
            continue
        if dataclasses.is_dataclass(hints[field.name]):
            yield from find_fields(hints[field.name], f"{name}.")
        else:
            yield name


def render() -> str:
    """Return the module."""
    found: set[str] = set()
    for task in TASKS.values():
        for form in task.forms:
            found |= {*find_fields(form.config)}
    for recipe in RECIPES.values():
        found |= {*find_fields(recipe.config)}
    for family in FAMILIES.values():
        found |= {*find_fields(family.config_class, "model.")}
    text = " ".join(sorted(found))
    lines = textwrap.wrap(text, 96, break_on_hyphens=False, break_long_words=False)
    return HEAD + "\n".join(lines) + TAIL


if __name__ == "__main__":
    PLACE.write_text(render(), encoding="utf-8")
