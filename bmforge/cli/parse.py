"""Parses arguments into a dataclass of options, with negated switches and helpful errors."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from bmforge.cli.foreign_options import suggest_option
from bmforge.cli.parse_errors import explain_box
from bmforge.errors import ConfigError
from bmforge.logging import get_logger

__all__ = [
    "find_options",
    "is_inlined",
    "is_list",
    "is_switch",
    "join_repeated",
    "parse_options",
    "spell_switches",
    "split_default",
    "take_option",
    "take_switch",
]

_WORDS = ("True", "False")
_STATED_DEFAULT = re.compile(r"\s*\(if (?:None|empty): ((?:[^()]|\([^()]*\))+)\)")


def parse_options(
    kind: Any, arguments: Sequence[str], command: str, default: Any = None, about: str | None = None
) -> Any:
    """Parse arguments into a dataclass; for --help, print the options and exit.

    Args:
        kind: dataclass of the options.
        arguments: arguments after the command name.
        command: name of the command, for error messages.
        default: values of options that are not given (default: those of the dataclass).
        about: text above the options in the help (default: the dataclass's docstring).

    Raises:
        ConfigError: an option is unknown or missing, or a value is wrong.
    """
    spelled = _spell_options(kind, arguments)
    _check_names(kind, spelled, command)
    shows_help = not {"-h", "--help"}.isdisjoint(spelled)
    registry = _stated_defaults() if shows_help else contextlib.nullcontext()
    box = io.StringIO()
    try:
        with _silence_other_processes(), registry, contextlib.redirect_stderr(box):
            return tyro.cli(
                kind,
                args=spelled,
                prog=f"bmforge {command}",
                description=about,
                default=default if default is not None else tyro.MISSING_NONPROP,
                config=(tyro.conf.FlagConversionOff, tyro.conf.HelptextFromCommentsOff),
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ConfigError(explain_box(box.getvalue())) from None


def split_default(text: str) -> tuple[str, str]:
    """Split "TEXT (if None: X)" into TEXT and X, the default in effect; X is "" if not stated."""
    match = _STATED_DEFAULT.search(text)
    if match is None or _STATED_DEFAULT.search(text, match.end()):  # two defaults for two cases
        return text, ""
    return text[: match.start()] + text[match.end() :], " ".join(match[1].split())


def _stated_defaults() -> ConstructorRegistry:
    """Return a tyro registry with which --help shows X as the default for "(if None: X)"."""
    registry = ConstructorRegistry()
    is_inside = False

    @registry.struct_rule
    def state_defaults(info: StructTypeInfo) -> StructConstructorSpec | None:
        nonlocal is_inside
        if is_inside or not dataclasses.is_dataclass(info.type):
            return None
        is_inside = True  # tyro's own rule for dataclasses applies
        try:
            spec = ConstructorRegistry.get_struct_spec(info)
        finally:
            is_inside = False
        if not isinstance(spec, StructConstructorSpec):
            return None
        return dataclasses.replace(spec, fields=tuple(map(_state_default, spec.fields)))

    return registry


def _state_default(field: StructFieldSpec) -> StructFieldSpec:
    text = field.helptext() if callable(field.helptext) else field.helptext
    about, default = split_default(text or "")
    if not default or not (field.default is None or field.default in ((), "")):
        return field
    kind, *notes = typing.get_args(Annotated[field.type, ""])[:-1]
    hint = tyro.conf.arg(help_behavior_hint=f"(default: {default})")
    marked: Any = Annotated[(kind, hint, *notes)]
    return dataclasses.replace(field, type=marked, helptext=about)


def _check_names(kind: Any, arguments: Sequence[str], command: str) -> None:
    """Raise `ConfigError` for an unknown option; the message suggests the most similar option."""
    options = {f"--{path}" for path, _ in find_options(kind, positional=False)}
    positional = [p for p, _ in find_options(kind) if f"--{p}" not in options]
    # An annotation can rename a field with a dot: `data_task` is --data.task.
    plain = {option.replace(".", "-") for option in options} | {"--help"}
    for argument in arguments:
        name = argument.partition("=")[0].replace("_", "-")
        if argument == "--":  # only positional arguments follow
            return
        if name.startswith("--") and name.replace(".", "-") not in plain:
            advice = suggest_option(command, name, options, positional)
            raise ConfigError(
                f"unknown option of bmforge {command}: {name}.{advice} --help lists the options."
            )


@contextlib.contextmanager
def _silence_other_processes() -> Iterator[None]:
    """Context manager in which only the first process of a machine prints the help."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        yield
        return
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def spell_switches(kind: Any, arguments: Sequence[str]) -> list[str]:
    """Add values to switches: ``--a.b`` becomes ``--a.b True``, ``--no-a.b`` ``--a.b False``.

    Args:
        kind: dataclass whose boolean fields are the switches.
        arguments: command line arguments; explicit values are not changed. ``--a.no-b`` means
            ``--no-a.b``.
    """
    switches = dict(_find_switches(kind))
    out: list[str] = []
    for index, argument in enumerate(arguments):
        following = arguments[index + 1] if index + 1 < len(arguments) else ""
        written = switches.get(argument.replace("_", "-"))
        if written is None or following in _WORDS:
            out.append(argument)
        else:
            out += written
    return out


def _spell_options(kind: Any, arguments: Sequence[str]) -> list[str]:
    """Complete option names, add a value to each switch, and merge repeated list options."""
    spelled = spell_switches(kind, _spell_groups(kind, arguments))
    return join_repeated(kind, spelled)


def _spell_groups(kind: Any, arguments: Sequence[str]) -> list[str]:
    """Insert the names of groups into options that lack them: ``--prepare.filter.rules``."""
    paths: dict[str, str] = {}
    for path, short, _ in _walk_options(kind, "", "", True):
        if path != short:
            prefix, dot, name = short.rpartition(".")
            paths |= {f"--{short}": f"--{path}", f"--no-{short}": f"--no-{path}"}
            paths[f"--{prefix}{dot}no-{name}"] = f"--no-{path}"
    parts = [argument.partition("=") for argument in arguments]
    return [
        paths.get(name.replace("_", "-"), name) + equals + value for name, equals, value in parts
    ]


def join_repeated(kind: Any, arguments: Sequence[str]) -> list[str]:
    """Append the values of a repeated list option to those of its first use.

    ``--adapter A --adapter B`` becomes ``--adapter A B``; the parser alone would ignore A. If an
    option that takes one value is repeated, the last value is used, as in other programs, and a
    warning names the first and the last value.

    Args:
        kind: dataclass of the options; the fields that are tuples or lists are list options.
        arguments: command line arguments.
    """
    lists = {f"--{path}" for path, hint in find_options(kind, positional=False) if is_list(hint)}
    groups: list[list[str]] = [[]]  # each group is an option with its values
    first: dict[str, list[str]] = {}
    last: dict[str, list[str]] = {}
    for argument in arguments:
        name, _, value = argument.partition("=")
        name = name.replace("_", "-")
        if not argument.startswith("--"):
            groups[-1].append(argument)
        elif name in lists and name in first:
            groups.append(first[name])  # the following values are appended to this group
            groups[-1] += [value] if value else []
        else:
            groups.append([name, value] if name in lists and value else [argument])
            last[name] = groups[-1]
            first.setdefault(name, groups[-1])
    for name in last.keys() - lists:
        _warn_of_repeated(name, [_value_of(each[name]) for each in (first, last)])
    unique = {id(group): group for group in groups}
    return [argument for group in unique.values() for argument in group]


def _warn_of_repeated(name: str, values: Sequence[str]) -> None:
    """Log a warning if an option that takes one value was given several different values."""
    if len(set(values)) > 1:
        get_logger().warning(
            "%s is given more than once. The last value, %s, is used, and the first value, %s, "
            "is ignored. Pass the option once.",
            *(name, values[-1], values[0]),
        )


def _value_of(group: Sequence[str]) -> str:
    """Return the value of an option given as ``["--name", "value"]`` or ``["--name=value"]``."""
    return group[0].partition("=")[2] or " ".join(group[1:2])


def is_list(hint: Any) -> bool:
    """Return True if options of this type accept any number of values."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return any(
        typing.get_origin(kind) is list or typing.get_args(kind)[1:] == (Ellipsis,)
        for kind in kinds
    )


def _find_switches(kind: Any) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield (spelling, (option, value)) for every spelling of every boolean field."""
    for path, hint in find_options(kind):
        if is_switch(hint):
            option, (prefix, dot, name) = f"--{path}", path.rpartition(".")
            yield option, (option, "True")
            for spelling in {f"--{prefix}{dot}no-{name}", f"--no-{path}"}:
                yield spelling, (option, "False")


def find_options(
    kind: Any, prefix: str = "", *, positional: bool = True
) -> Iterator[tuple[str, Any]]:
    """Yield the option name, without dashes, and the type of every field of a dataclass.

    Args:
        kind: the dataclass; fields of nested dataclasses have dotted names.
        prefix: prefix of all names.
        positional: also yield the positional arguments.
    """
    for path, _, hint in _walk_options(kind, prefix, prefix, positional):
        yield path, hint


def _walk_options(
    kind: Any, prefix: str, short: str, positional: bool
) -> Iterator[tuple[str, str, Any]]:
    """Yield (option name, option name without group names, type) for every field."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        if not field.init:
            continue
        name, hint = field.name.replace("_", "-"), hints[field.name]
        notes: Sequence[Any] = ()
        if typing.get_origin(hint) is typing.Annotated:
            hint, *notes = typing.get_args(hint)
        if dataclasses.is_dataclass(hint):
            inner = "" if is_inlined(notes) else f"{name}."
            inner_short = short if "is_group" in field.metadata else short + inner
            yield from _walk_options(hint, prefix + inner, inner_short, positional)
        elif positional or not any(note is tyro.conf.Positional for note in notes):
            yield prefix + name, short + name, hint


def is_inlined(notes: Sequence[Any]) -> bool:
    """Return True if the options of a nested dataclass do not begin with the field's name."""
    return any(
        note is tyro.conf.OmitArgPrefixes or getattr(note, "name", None) == "" for note in notes
    )


def is_switch(hint: Any) -> bool:
    """Return True if options of this type need no value: bool, or optional bool."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return {*typing.get_args(hint)} <= {bool, type(None)}
    return hint is bool


def take_switch(arguments: list[str], name: str) -> bool:
    """Remove all spellings of a switch from the arguments and return its last value."""
    is_on = False
    off = f"--no-{name.removeprefix('--')}"
    while True:
        positions = [i for i, a in enumerate(arguments) if a.partition("=")[0] in (name, off)]
        if not positions:
            return is_on
        at = positions[0]
        word, _, value = arguments.pop(at).partition("=")
        if not value and arguments[at : at + 1] and arguments[at] in _WORDS:
            value = arguments.pop(at)
        if value not in ("", *_WORDS):
            raise ConfigError(
                f"{word}={value} is not allowed, because {word} is a switch. Pass {word} without a "
                "value, or with True or False."
            )
        is_on = (word == name) == (value != "False")


def take_option(arguments: list[str], name: str) -> str | None:
    """Remove ``name VALUE`` or ``name=VALUE`` from the arguments and return the last value.

    Raises:
        ConfigError: the value is missing.
    """
    values: list[str] = []
    index = 0
    while index < len(arguments):
        option, equals, value = arguments[index].partition("=")
        if option != name:
            index += 1
            continue
        following = "".join(arguments[index + 1 : index + 2])
        if not equals and (not following or following.startswith("--")):
            raise ConfigError(f"{name} needs a value. Write the value after the option.")
        values.append(value if equals else arguments[index + 1])
        del arguments[index : index + (1 if equals else 2)]
    _warn_of_repeated(name, values)
    return values[-1] if values else None
