"""Adds the command line spelling of fields to error messages."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from bmforge.cli.commands import COMMANDS
from bmforge.cli.parse import find_options
from bmforge.cli.train_help import SHORT_NAMES
from bmforge.cli.train_options import FIELDS

__all__ = ["name_options", "options_of"]

_NAME = r"(?<![\w.\-/'\"])[a-z][a-z0-9_]*"
# A field name with or without a prefix. A word without a dot or underscore is a field only if a
# value follows, as in "out='a'" or "seed: 3 in that run".
_VALUE = r"=|: (?:['\"\[(\d-]|True|False|None)"
_FIELD = re.compile(rf"{_NAME}(?:\.[a-z][a-z0-9_]*)*(?![\w/])")
_WORD = re.compile(rf"{_NAME}(?={_VALUE})")
# Alternative names of options of `train`; --model also sets the initial model.
_ALIASES = {**SHORT_NAMES, "--model": "--init-from"}
# Maximum number of options listed for one field name.
_MOST = 3


def options_of(command: str) -> Collection[str]:
    """Return the names of a command's options, without dashes; nothing for unknown commands."""
    if command == "train":
        return FIELDS
    options = COMMANDS[command].options if command in COMMANDS else None
    return () if options is None else [name for name, _ in find_options(options)]


def name_options(message: str, options: Collection[str], arguments: Sequence[str] = ()) -> str:
    """Append to an error message the options that set the fields in the message.

    Args:
        message: error message with Python field names (`micro_batch_size`). Options that it
            already contains are not repeated.
        options: options of the command, without dashes (`data.micro-batch-size`).
        arguments: command line, whose spelling of an option is used (`--lr`).
    """
    typed = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    for short, full in SHORT_NAMES.items():
        # The parser knows only the full name, so its messages contain it.
        if short in typed and full not in typed and full.removeprefix("--") in options:
            message = re.sub(rf"(?<![\w-]){re.escape(full)}(?![\w.-])", short, message)
    named: dict[str, None] = {}
    alike: list[str] = []  # options that the message spells as the command line does
    words = set(_WORD.findall(message))
    for field in _FIELD.findall(message):
        name = field.replace("_", "-")
        hits = [name] if name in options else sorted(o for o in options if o.endswith(f".{name}"))
        if name == field and not (hits and ("." in name or (hits == [name] and name in words))):
            continue
        if hits == [name] == [field] and not _is_typed(name, typed):
            alike += [name] if name in words else []
            continue
        if len(hits) <= _MOST:
            spelled = [_spell(hit, typed) for hit in hits]
            named.update((option, None) for option in spelled if option not in message)
    if not named:
        return message
    named.update((f"--{name}", None) for name in alike if f"--{name}" not in message)
    return (
        f"{message}\nIn this command, the {'options are' if len(named) > 1 else 'option is'} "
        f"{', '.join(named)}."
    )


def _is_typed(name: str, typed: Collection[str]) -> bool:
    return _spell(name, typed) in typed


def _spell(name: str, typed: Collection[str]) -> str:
    """Return the option as the user has typed it, or its short name if it was not typed."""
    full = f"--{name}"
    if full in typed:
        return full
    aliases = [short for short, field in _ALIASES.items() if field == full]
    usual = next((short for short, field in SHORT_NAMES.items() if field == full), full)
    return next((alias for alias in aliases if alias in typed), usual)
