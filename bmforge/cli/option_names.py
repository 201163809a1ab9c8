"""Adds the command line spelling of fields to error messages."""

from __future__ import annotations

import re
from collections.abc import Collection

from bmforge.cli.commands import COMMANDS
from bmforge.cli.parse import find_options
from bmforge.cli.train_options import FIELDS

__all__ = ["name_options", "options_of"]

# A field name of two words or more, with or without a prefix; one word is its own option.
_FIELD = re.compile(r"(?<![\w.\-/'\"])[a-z][a-z0-9_]*(?:\.[a-z][a-z0-9_]*)*(?![\w/])")
# Maximum number of options listed for one field name.
_MOST = 3


def options_of(command: str) -> Collection[str]:
    """Return the names of a command's options, without dashes; nothing for unknown commands."""
    if command == "train":
        return FIELDS
    options = COMMANDS[command].options if command in COMMANDS else None
    return () if options is None else [name for name, _ in find_options(options)]


def name_options(message: str, options: Collection[str]) -> str:
    """Append to an error message the options that set the fields it mentions.

    Args:
        message: error message with Python field names (`micro_batch_size`). Options that it
            already contains are not repeated.
        options: options of the command, without dashes (`data.micro-batch-size`).
    """
    named: dict[str, None] = {}
    for field in _FIELD.findall(message):
        name = field.replace("_", "-")
        if name == field:
            continue
        hits = [name] if name in options else sorted(o for o in options if o.endswith(f".{name}"))
        if len(hits) <= _MOST:
            named.update((f"--{hit}", None) for hit in hits if f"--{hit}" not in message)
    if not named:
        return message
    return (
        f"{message}\nIn this command, the {'options are' if len(named) > 1 else 'option is'} "
        f"{', '.join(named)}."
    )
