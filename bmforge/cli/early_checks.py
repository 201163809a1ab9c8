"""Checks the options of `bmforge train` before torch is imported, which takes several seconds.

The config classes make the same checks, and those that need the model, the data or other options.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from bmforge.cli import parse
from bmforge.cli.train_options import KINDS, MODELS
from bmforge.config import check_config_file
from bmforge.errors import ConfigError
from bmforge.files import check_input
from bmforge.model_names import check_model_path, plain_name, unknown_model
from bmforge.value_ranges import find_problem

__all__ = ["check_arguments", "check_model"]

# Options that take several paths; those of a repeated option are all used.
_INPUTS = ("data.paths", "data.validation")
# Options that are not config fields, and need a value.
_VALUED = ("changes", "config", "ds-config", "layout", "model", "world")
_TYPES: Mapping[str, Any] = {"int": int, "float": float, "None": None}


def check_arguments(task: str, arguments: Sequence[str]) -> None:
    """Check the values of options, the name of the model, and the paths of files.

    Args:
        task: name of the task.
        arguments: arguments after the task, with the full names of options.

    Raises:
        ConfigError: a value has the wrong type or is out of range, a name is unknown, or the config
            file or the model does not exist.
        DataError: a data file does not exist.
    """
    values = _group_values(arguments)
    for name in _VALUED:
        if values.get(name) == []:
            raise ConfigError(f"--{name} needs a value. Write the value after the option.")
    numbers = _parse_values(task, values)
    # Names, such as the kind of an adapter, are not in KINDS.
    names = {
        name: current[-1] for name, current in values.items() if current and current[-1] != "None"
    }
    for name, value in {**names, **numbers}.items():
        if problem := find_problem(name.replace("-", "_"), value):
            raise ConfigError(problem)
    for file in values.get("config", ()):
        check_config_file(file)
    for name in values.get("model", ()):
        check_model(name)
    for name in values.get("init-from", ()):
        check_model_path(name)
    if "print-config" in values or "help-all" in values:  # these read no data
        return
    for option in _INPUTS:
        for path in values.get(option, ()):
            check_input(path, option)


def check_model(name: str) -> None:
    """Raise `ConfigError` for a name that is no path, preset, family or hub id of a model."""
    check_model_path(name)
    names = {*MODELS, *map(plain_name, MODELS)}
    if "/" in name or Path(name).exists() or not names.isdisjoint((name, plain_name(name))):
        return
    raise unknown_model(name, MODELS)


def _group_values(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each option; the last values of an option that is repeated."""
    values: dict[str, list[str]] = {}
    current: list[str] = []
    for argument in arguments:
        if not argument.startswith("--"):
            current.append(argument)
            continue
        option, mark, value = argument.removeprefix("--").partition("=")
        name = option.replace("_", "-")
        current = [*values.get(name, ())] if name in _INPUTS else []
        current += [value] if mark else []
        values[name] = current
    return values


def _parse_values(task: str, values: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the numbers and names among the values, parsed as the task's own options are."""
    names = [name for name in values if name in KINDS]
    fields = [
        (name.replace(".", "_").replace("-", "_"), _type_of(KINDS[name], name)) for name in names
    ]
    options: Any = dataclasses.make_dataclass("Options", fields, kw_only=True)
    arguments = [word for name in names for word in (f"--{name}", *values[name])]
    parsed = parse.parse_options(options, arguments, f"train {task}")
    return dict(zip(names, vars(parsed).values(), strict=True))


def _type_of(kind: str, name: str) -> Any:
    """Return the type of an option whose kind in `KINDS` is, for example, "int|None"."""
    parts, literal = kind.split("|"), typing.cast(Any, Literal)
    words = [int(part) if part.isdecimal() else part for part in parts if part not in _TYPES]
    types = [_TYPES[part] for part in parts if part in _TYPES]
    types += [literal[tuple(words)]] if words else []
    hint: Any = functools.reduce(operator.or_, types)
    return Annotated[hint, tyro.conf.arg(name=name)]
