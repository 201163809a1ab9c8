"""Result of converting an old start script or config: a config of `bmforge train`, with notes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tomli_w

__all__ = ["Migrated"]


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
