"""Table of the arguments of CPM-Pretrain's two programs, and the result of converting a script.

The table is `arguments.toml`, which `docs/migrating/cpm_pretrain.md` shows. Arguments that
Megatron's parser has for other programs (REALM's retrieval, an autoresume service) are listed
without a replacement.
Source: ``megatron/arguments.py``, ``run_gpt2.sh`` and ``run_t5.sh`` of TsinghuaAI/CPM-1-Pretrain.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from bmforge.errors import ConfigError, suggest

__all__ = [
    "ARGUMENTS", "DEFAULTS", "PARSER_DEFAULTS", "SWITCHES", "Argument", "Migrated", "split_words",
]  # fmt: skip


@dataclass(frozen=True)
class Argument:
    """Replacement of one argument of CPM-Pretrain.

    Args:
        fields: replacements: paths of config fields, such as "train.steps", or options
            (``--name``) of `bmforge train`, or of torchrun if `note` says so. Empty if there are
            none.
        note: how the value changes, or why there is no field.
        only: "gpt2" or "t5" if only that recipe has the fields.
        type: "int", "float" or "str".
        value: value to which the field is set if the old argument is a flag.
        converts: "alone" if the value is copied to the first field, "jointly" if it is converted
            together with other arguments, "" if it needs no conversion.
    """

    fields: tuple[str, ...] = ()
    note: str = ""
    only: str = ""
    type: str = "str"
    value: Any = None
    converts: str = ""

    def read(self, name: str, value: Any) -> Any:
        """Convert a value to the argument's type.

        Raises:
            ConfigError: the value has the wrong type.
        """
        kind = {"int": int, "float": float, "str": str}[self.type]
        try:
            return int(float(value)) if kind is int and "e" in str(value) else kind(value)
        except ValueError as error:
            raise ConfigError(
                f"{name} {value} must be of type {self.type}. Correct the value."
            ) from error


_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
# Arguments without values.
SWITCHES = frozenset(_FILE["switches"].split())
# Default values of CPM-Pretrain that differ from those of bmforge.
DEFAULTS: Mapping[str, Any] = _FILE["defaults"]
PARSER_DEFAULTS: Mapping[str, Any] = {**DEFAULTS, **_FILE["parser_defaults"]}
ARGUMENTS: Mapping[str, Mapping[str, Argument]] = {
    title: {
        name: Argument(**{**entry, "fields": tuple(entry.get("fields", ()))})
        for name, entry in group.items()
    }
    for title, group in _FILE["arguments"].items()
}


@dataclass
class Migrated:
    """Converted config, with notes about the conversion.

    Args:
        task: name of the recipe.
        values: config fields, nested as in TOML.
        unplaced: (argument, reason) for arguments without an equivalent.
        dropped: (argument, reason) for arguments that need no equivalent.
        command: command that starts the run, with `{config}` for the file.
        files: dict from name to content of the further files that the config refers to.
    """

    task: str
    values: dict[str, Any] = field(default_factory=dict)
    unplaced: list[tuple[str, str]] = field(default_factory=list)
    dropped: list[tuple[str, str]] = field(default_factory=list)
    command: str = ""
    files: dict[str, str] = field(default_factory=dict)

    def toml(self) -> str:
        """Return the config as TOML, with comments about arguments that have no equivalent."""
        notes = [f"# not migrated: {name}: {why}\n" for name, why in self.unplaced]
        return "".join(notes) + tomli_w.dumps(self.values)

    def put(self, path: str, value: Any) -> None:
        """Set a field of the config, such as "train.steps"."""
        table = self.values
        *parents, name = path.split(".")
        for parent in parents:
            table = table.setdefault(parent, {})
        table[name] = value


def split_words(
    words: Sequence[str], names: Collection[str], switches: Collection[str], out: Migrated
) -> dict[str, Any]:
    """Parse words into a dict from argument name to value; the last of repeated values is used.

    Args:
        words: words of a command line after the program.
        names: names of the known arguments.
        switches: arguments without values.
        out: result that receives unknown arguments.
    """
    at = 0
    arguments: dict[str, Any] = {}
    while at < len(words):
        name, has_value, value = words[at].partition("=")
        at += 1
        if name not in names:
            if name.startswith("-"):
                out.unplaced.append((name, f"unknown.{suggest(name, names)}"))
        elif name in switches:
            arguments[name] = True
        else:
            if not has_value:
                value = words[at] if at < len(words) else ""
                at += 1
            arguments[name] = value
    return arguments
