"""Write the names of options and models that are needed before torch is imported.

    python dev/train_options.py

The options of `bmforge train` are the fields of every task's config and of every family's config.
The script writes `bmforge/cli/train_options.py`; `tests/cli` checks that it is up to date.
"""

from __future__ import annotations

import dataclasses
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bmforge.models.hub import FAMILIES
from bmforge.recipes.registry import RECIPES, TASKS

PLACE = Path(__file__).resolve().parents[1] / "bmforge" / "cli" / "train_options.py"
HEAD = '''"""Generated tables of config fields and of models; see `dev/train_options.py`."""

from __future__ import annotations

__all__ = ["FIELDS", "KINDS", "MODELS"]

# Kind of the values -> fields. "" stands for other kinds, and for fields whose kind differs.
_KINDS = {
'''
TAIL = '''}
FIELDS = frozenset(name for names in _KINDS.values() for name in names.split())
# Field -> kind of its values: int, float, None or names, separated by |.
KINDS = {name: kind for kind, names in _KINDS.items() if kind for name in names.split()}
# Names of presets and families, and short names of models on the hub.
_MODELS = """
'''


def describe_kind(hint: Any) -> str:
    """Return a type as int, float, None and the names of a Literal, separated by |; else ""."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        parts = [describe_kind(part) for part in typing.get_args(hint)]
        return "|".join(parts) if all(parts) else ""
    if typing.get_origin(hint) is typing.Literal:
        return "|".join(map(str, typing.get_args(hint)))
    return {int: "int", float: "float", type(None): "None"}.get(hint, "")


def find_fields(kind: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted option name of each field of a config, and the kind of its values."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        name = prefix + field.name.replace("_", "-")
        if not field.init:
            continue
        if dataclasses.is_dataclass(hints[field.name]):
            yield from find_fields(hints[field.name], f"{name}.")
        else:
            yield name, describe_kind(hints[field.name])


def list_models() -> set[str]:
    """Return the names of presets and families, and the short names of models on the hub."""
    names: set[str] = set()
    for name, family in FAMILIES.items():
        sizes = family.config_class
        names |= {name.lower(), sizes.family, *sizes.presets, *sizes.hub_ids}
    return {name for name in names if "/" not in name}


def wrap(names: Iterable[str]) -> str:
    """Return sorted names as the lines of a string."""
    text = " ".join(sorted(names))
    lines = textwrap.wrap(text, 96, break_on_hyphens=False, break_long_words=False)
    return "\n".join(lines)


def write_entry(kind: str, names: Iterable[str]) -> str:
    """Return the entry of a kind in the table: one line if its names fit there."""
    text = wrap(names)
    line = f'    "{kind}": "{text}",\n'
    return line if len(line) <= 100 else f'    "{kind}": """\n{text}\n""",\n'


def render() -> str:
    """Return the module."""
    configs = [form.config for task in TASKS.values() for form in task.forms]
    configs += [recipe.config for recipe in RECIPES.values()]
    fields = [pair for config in configs for pair in find_fields(config)]
    for family in FAMILIES.values():
        fields += find_fields(family.config_class, "model.")
    kinds: dict[str, set[str]] = {}
    for name, kind in fields:
        kinds.setdefault(name, set()).add(kind)
    groups: dict[str, list[str]] = {}
    for name, own in kinds.items():
        groups.setdefault(own.pop() if len(own) == 1 else "", []).append(name)
    table = "".join(write_entry(kind, groups[kind]) for kind in sorted(groups))
    return f'{HEAD}{table}{TAIL}{wrap(list_models())}\n"""\nMODELS = tuple(_MODELS.split())\n'


if __name__ == "__main__":
    PLACE.write_text(render(), encoding="utf-8")
