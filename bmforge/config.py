"""Strict conversion of config dataclasses to TOML and back.

An unknown field, a wrong type or a missing value raises `ConfigError` with the full path of the
field and the most similar known name. The command line (`cli/`) sets the same fields. A group is a
field whose value is another dataclass, such as `PrepareConfig.filter`; the group's fields can also
be set without its name.
"""

from __future__ import annotations

import dataclasses
import functools
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from bmforge.errors import ConfigError, suggest
from bmforge.files import replace_file

__all__ = [
    "GROUP",
    "accept_ungrouped",
    "check_config_file",
    "config_from_dict",
    "config_to_dict",
    "dump_toml",
    "load_toml",
    "plain_value",
    "save_toml",
    "ungrouped_values",
]

C = TypeVar("C")
_NONE = "none"
# Metadata of a field that contains a group of options, such as the limits of a server.
GROUP: Mapping[str, bool] = types.MappingProxyType({"is_group": True})


def _find_groups(cls: Any) -> dict[str, str]:
    """Return a dict from the name of each field in a group to the name of the group."""
    return {
        field.name: group.name
        for group in dataclasses.fields(cls)
        if "is_group" in group.metadata
        for field in dataclasses.fields(typing.cast(Any, group.default_factory))
    }


def accept_ungrouped(cls: type[C]) -> type[C]:
    """Class decorator: the constructor of a config also accepts the fields of its groups.

    `PrepareConfig(rules="english")` means `PrepareConfig(filter=FilterConfig(rules="english"))`.
    """
    create, groups = cls.__init__, _find_groups(cls)

    @functools.wraps(create)
    def init(self: C, *args: Any, **values: Any) -> None:
        changes: dict[str, dict[str, Any]] = {}
        for name in [name for name in values if name in groups]:
            changes.setdefault(groups[name], {})[name] = values.pop(name)
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            if field.name in changes:
                group = values.get(field.name) or typing.cast(Any, field.default_factory)()
                values[field.name] = dataclasses.replace(group, **changes[field.name])
        create(self, *args, **values)

    cls.__init__ = init  # type: ignore[assignment,method-assign]
    return cls


def ungrouped_values(config: Any) -> dict[str, Any]:
    """Return a flat dict from field name to value; the fields of groups are listed individually."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        values |= ungrouped_values(value) if "is_group" in field.metadata else {field.name: value}
    return values


def _group_tables(cls: Any, values: dict[str, Any], path: str) -> dict[str, Any]:
    """Move the fields of groups in a TOML table into subtables named like the groups.

    Files of earlier versions have these fields in the main table.
    """
    groups = _find_groups(cls)
    out = {name: value for name, value in values.items() if name not in groups}
    for name in [name for name in values if name in groups]:
        group = groups[name]
        table = out.get(group, {})
        if not isinstance(table, dict) or name in table:
            raise ConfigError(
                f"{path}{name} and {path}{group} cannot both be set: {path}{group}.{name} is the "
                "current name of the field. Leave one of them out."
            )
        out[group] = {**table, name: values[name]}
    return out


def config_to_dict(config: Any) -> dict[str, Any]:
    """Convert a dataclass to nested dictionaries.

    TOML has no null value: a field that is None is omitted if that is its default; otherwise it is
    written as "none".
    """
    out: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        if not field.init:
            continue  # computed from other fields
        value = getattr(config, field.name)
        if value is not None:
            out[field.name] = plain_value(value)
        elif field.default is not None:
            out[field.name] = _NONE
    return out


def plain_value(value: Any) -> Any:
    """Convert a value for TOML or JSON: dataclasses become dictionaries, tuples become lists."""
    if dataclasses.is_dataclass(value):
        return config_to_dict(value)
    if isinstance(value, (list, tuple)):
        return [plain_value(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, Path):
        return str(value)
    return value


def config_from_dict(cls: type[C], values: dict[str, Any], path: str = "") -> C:
    """Create a config dataclass from nested dictionaries.

    Args:
        cls: the dataclass.
        values: dictionary from field name to value; missing fields get their default.
        path: dotted name of the dictionary in the whole config, for error messages.

    Raises:
        ConfigError: a field is unknown, has the wrong type, or is missing.
    """
    hints, values = typing.get_type_hints(cls), _group_tables(cls, values, path)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for name in values:
        if name not in fields:
            raise ConfigError(
                f"unknown field {path}{name!s} ({cls.__name__} has {', '.join(fields)})."
                f"{suggest(name, [*fields, *_find_groups(cls)])}"
            )
    required = [
        name
        for name, f in fields.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    missing = [path + name for name in required if name not in values]
    if missing:
        raise ConfigError(
            f"fields are missing: {', '.join(missing)} ({cls.__name__} needs a value for each)."
        )
    built = {name: _convert(hints[name], v, path + name) for name, v in values.items()}
    return cls(**built)


def _convert(hint: Any, value: Any, path: str) -> Any:
    """Check `value` against a type hint; convert values that TOML stores as another type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(args, value, path)
    if origin is typing.Literal:
        if value not in args:
            hint_text = suggest(str(value), [str(a) for a in args])
            raise ConfigError(f"{path}={value!r} must be one of {list(args)}.{hint_text}")
        return value
    if dataclasses.is_dataclass(hint):
        if isinstance(value, hint):  # type: ignore[arg-type]
            return value
        if not isinstance(value, dict):
            raise _wrong_type(path, value, "a table of fields")
        return config_from_dict(hint, value, path + ".")  # type: ignore[arg-type]
    if origin in (list, tuple):
        return _convert_sequence(origin, args, value, path)
    if origin is dict:
        if not isinstance(value, dict):
            raise _wrong_type(path, value, "a table")
        return {k: _convert(args[1], v, f"{path}.{k}") for k, v in value.items()}
    return _convert_scalar(hint, value, path)


def _convert_union(args: tuple[Any, ...], value: Any, path: str) -> Any:
    if value in (None, _NONE) and type(None) in args:
        return None
    error: ConfigError | None = None
    for option in (a for a in args if a is not type(None)):
        try:
            return _convert(option, value, path)
        except ConfigError as problem:
            error = error or problem
    assert error is not None
    raise error


def _convert_sequence(origin: Any, args: tuple[Any, ...], value: Any, path: str) -> Any:
    if not isinstance(value, (list, tuple)):
        raise _wrong_type(path, value, "a list")
    if origin is tuple and args[-1:] != (Ellipsis,) and len(args) != len(value):
        raise ConfigError(f"{path}={value!r} has {len(value)} values (needed: {len(args)}).")
    hints = args if origin is tuple and args[-1:] != (Ellipsis,) else (args[0],) * len(value)
    return origin(
        _convert(h, v, f"{path}[{i}]") for i, (h, v) in enumerate(zip(hints, value, strict=True))
    )


def _convert_scalar(hint: Any, value: Any, path: str) -> Any:
    if hint is Any:
        return value
    if hint is Path and isinstance(value, (str, Path)):
        return Path(value)
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, bool):
        raise _wrong_type(path, value, "int")
    if isinstance(hint, type) and isinstance(value, hint):
        return value
    raise _wrong_type(path, value, getattr(hint, "__name__", str(hint)))


def _wrong_type(path: str, value: Any, needed: str) -> ConfigError:
    return ConfigError(f"{path}={value!r} must be {needed}, not {type(value).__name__}.")


def dump_toml(config: Any) -> str:
    """Return a config as TOML text."""
    return tomli_w.dumps(config_to_dict(config))


def save_toml(config: Any, path: str | Path) -> None:
    """Write a config to a TOML file."""
    replace_file(path, dump_toml(config))


def check_config_file(path: str | Path) -> None:
    """Raise `ConfigError` if a config file does not exist."""
    if not Path(path).is_file():
        raise ConfigError(f"config file {str(path)!r} does not exist. Check its path.")


def load_toml(cls: type[C], path: str | Path) -> C:
    """Read a config from a TOML file.

    Raises:
        ConfigError: the file is missing, is not TOML, or does not match the dataclass.
    """
    file = Path(path)
    check_config_file(file)
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"config file {str(file)!r} is not valid TOML ({error}). Correct the file."
        ) from error
    return config_from_dict(cls, values)
