"""Options in groups: by group, without the group, in files and on the command line."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmforge.cli.commands import COMMANDS
from bmforge.cli.parse import find_options, parse_options
from bmforge.config import config_from_dict, dump_toml, ungrouped_values
from bmforge.errors import ConfigError
from bmforge.prepare_settings import PrepareConfig
from bmforge.serve.settings import ServeConfig

CLASSES = {"prepare": PrepareConfig, "serve": ServeConfig}
# Another valid value for each default that is not a number, a switch or a list of texts.
OTHERS = {
    "errors": "strict",
    "html_reader": "trafilatura",
    "rules": "mixed",
    "license_policy": "known",
    "text_repairs": ("width",),
    "tool_call_parser": "hermes",
    "near_duplicates": 0.7,
    "repeated_spans": 60,
    "repeated_paragraphs": 70,
    "max_prompt_tokens": 9,
    "max_new_tokens": 8,
    "max_requests_per_key": 63,
    "max_requests": 129,
    "allowed_origins": ("https://chat.example.org",),
    "keys_file": Path("keys.txt"),
}


def fields_of(cls: Any) -> dict[str, tuple[str, Any]]:
    """Map each field in a nested dataclass with a group to that group, and another value."""
    fields = {}
    for group in dataclasses.fields(cls):
        inner = getattr(cls(), group.name)
        if not dataclasses.is_dataclass(inner) or group.name == "bpe":
            continue
        for field in dataclasses.fields(inner):
            value = getattr(inner, field.name)
            if field.name in OTHERS:
                other = OTHERS[field.name]
            elif isinstance(value, bool):
                other = not value
            elif isinstance(value, int | float):
                other = value + 1
            elif isinstance(value, tuple):
                other = ("a", "b")
            else:
                other = "a"
            assert field.name not in fields
            fields[field.name] = (group.name, other)
    return fields


@st.composite
def choices(draw: st.DrawFn) -> tuple[Any, dict[str, Any], dict[str, dict[str, Any]]]:
    """Draw a config class, values of some fields without groups, and the same in groups."""
    cls = draw(st.sampled_from([*CLASSES.values()]))
    fields = fields_of(cls)
    names = draw(st.lists(st.sampled_from(sorted(fields)), unique=True, max_size=6))
    if {"allow_no_key", "keys_file"} <= {*names}:
        names.remove("keys_file")
    values, tables = {}, {}
    for name in names:
        group, value = fields[name]
        values[name] = value
        tables.setdefault(group, {})[name] = value
    return cls, values, tables


@given(choices())
@settings(max_examples=60, deadline=None)
def test_a_field_can_be_given_with_and_without_its_group(choice: Any) -> None:
    cls, values, tables = choice
    in_groups = {
        group: dataclasses.replace(getattr(cls(), group), **table)
        for group, table in tables.items()
    }
    config = cls(**in_groups)
    assert cls(**values) == dataclasses.replace(cls(), **values) == config
    assert config_from_dict(cls, values) == config_from_dict(cls, tables)
    read = config_from_dict(cls, tomllib.loads(dump_toml(config_from_dict(cls, values))))
    assert read == config_from_dict(cls, tables)
    shown = ungrouped_values(config)
    assert {name: shown[name] for name in values} == values
    assert not {*tables} & {*shown}


@pytest.mark.parametrize("cls", CLASSES.values())
def test_a_field_with_and_without_its_group_in_one_file_is_an_error(cls: Any) -> None:
    for name, (group, value) in fields_of(cls).items():
        with pytest.raises(ConfigError, match=f"{name} and {group} cannot both be set"):
            config_from_dict(cls, {name: value, group: {name: value}})
        with pytest.raises(ConfigError, match=f"did you mean {name!r}|unknown field"):
            config_from_dict(cls, {f"{name}x": value})


def test_other_keyword_arguments_are_errors() -> None:
    with pytest.raises(TypeError, match="near_duplicate"):
        PrepareConfig(near_duplicate=0.8)  # type: ignore[call-arg]


@pytest.mark.parametrize("command", CLASSES)
def test_options_have_no_group_and_the_help_shows_the_groups(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    cls, kind = CLASSES[command], COMMANDS[command].options
    names = {name for name, _ in find_options(kind)}
    fields = fields_of(cls)
    assert {name.replace("_", "-") for name in fields} <= names
    arguments: list[str] = []
    for name, (_, value) in fields.items():
        if name != "keys_file":
            values = value if isinstance(value, tuple) else (value,)
            arguments += [f"--{name.replace('_', '-')}", *map(str, values)]
    start = ["--out", "x"] if command == "prepare" else ["m"]
    config = parse_options(kind, [*start, *arguments], command).config
    shown = ungrouped_values(config)
    for name, (_, value) in fields.items():
        assert name == "keys_file" or shown[name] == value, name
    with pytest.raises(SystemExit):
        parse_options(kind, ["--help"], command)
    text = capsys.readouterr().out
    for group in {group for group, _ in fields.values()}:
        assert re.search(rf"\W{group} options\W", text), group
    for name in fields:
        assert f"--{name.replace('_', '-')} " in text


def test_nested_groups_are_optional_in_option_names() -> None:
    kind = COMMANDS["quickstart"].options
    for arguments in (
        ["--prepare.rules", "english", "--prepare.no-join-stores", "--prepare.skip_bad"],
        ["--prepare.filter.rules=english", "--no-prepare.join-stores", "--prepare.skip-bad"],
        ["--prepare.rules=english", "--prepare.files.no-join-stores", "--prepare.read.skip-bad"],
    ):
        config = parse_options(kind, arguments, "quickstart").prepare
        assert (config.filter.rules, config.files.join_stores) == ("english", False)
        assert config.read.skip_bad
