"""Dataclass to TOML and back, and what is refused on the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmforge.config import config_from_dict, config_to_dict, dump_toml, load_toml, save_toml
from bmforge.errors import ConfigError


@dataclass(kw_only=True)
class Inner:
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)
    kind: Literal["a", "b"] = "a"


@dataclass(kw_only=True)
class Outer:
    steps: int
    name: str = "x"
    folder: Path = Path("runs")
    limit: int | None = None
    shuffle: bool = False
    tags: list[str] = field(default_factory=list)
    paths: tuple[str, ...] = ()
    inner: Inner = field(default_factory=Inner)
    extra: dict[str, Any] = field(default_factory=dict)


CONFIGS = st.builds(
    Outer,
    steps=st.integers(-(2**63), 2**63 - 1),
    name=st.text(st.characters(exclude_categories=["Cs"])),
    limit=st.none() | st.integers(-5, 5),
    shuffle=st.booleans(),
    tags=st.lists(st.text("ab\"'\\\n", max_size=5)),
    paths=st.lists(st.text("xyz/", max_size=5)).map(tuple),
    inner=st.builds(
        Inner,
        lr=st.floats(allow_nan=False, allow_infinity=False),
        betas=st.tuples(st.floats(0, 1), st.floats(0, 1)),
        kind=st.sampled_from(["a", "b"]),
    ),
    extra=st.dictionaries(st.text("kl", min_size=1), st.integers(0, 9) | st.lists(st.booleans())),
)


@given(CONFIGS)
def test_round_trip(config: Outer) -> None:
    assert config_from_dict(Outer, config_to_dict(config)) == config


def test_round_trip_through_a_file(tmp_path: Path) -> None:
    config = Outer(steps=3, inner=Inner(lr=1e-5), extra={"k": {"deep": [1, 2]}})
    save_toml(config, tmp_path / "c.toml")
    assert load_toml(Outer, tmp_path / "c.toml") == config
    assert "limit" not in dump_toml(config)


def test_integers_stand_for_floats_and_defaults_fill_in() -> None:
    got = config_from_dict(Outer, {"steps": 2, "inner": {"lr": 1, "betas": [0, 1]}})
    assert got == Outer(steps=2, inner=Inner(lr=1.0, betas=(0.0, 1.0)))
    assert isinstance(got.inner.lr, float)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"steps": 1, "nmae": "y"}, ["unknown field nmae", "Did you mean 'name'"]),
        ({"steps": 1, "inner": {"rl": 1.0}}, ["unknown field inner.rl", "'lr'", "Inner has lr"]),
        ({}, ["fields are missing: steps"]),
        ({"steps": "many"}, ["steps='many'", "must be int, not str"]),
        ({"steps": 1.5}, ["steps=1.5", "must be int"]),
        ({"steps": True}, ["steps=True", "must be int"]),
        ({"steps": 1, "shuffle": 1}, ["shuffle=1", "must be bool"]),
        ({"steps": 1, "limit": "no"}, ["limit='no'", "must be int"]),
        ({"steps": 1, "tags": "ab"}, ["tags='ab'", "a list"]),
        ({"steps": 1, "tags": [1]}, ["tags[0]=1", "must be str"]),
        ({"steps": 1, "inner": 3}, ["inner=3", "a table"]),
        ({"steps": 1, "inner": {"betas": [0.1]}}, ["inner.betas=[0.1]", "needed: 2"]),
        ({"steps": 1, "inner": {"kind": "c"}}, ["inner.kind='c'", "['a', 'b']"]),
        ({"steps": 1, "inner": {"lr": "fast"}}, ["inner.lr='fast'", "must be float"]),
    ],
)
def test_refusals_name_the_whole_path(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_dict(Outer, values)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("content", [b"steps = = 1", b"steps = 1\nname = '\xff'"])
def test_files_that_are_no_toml(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "c.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"c\.toml.*not valid TOML"):
        load_toml(Outer, tmp_path / "c.toml")
    with pytest.raises(ConfigError, match="does not exist"):
        load_toml(Outer, tmp_path / "missing.toml")
