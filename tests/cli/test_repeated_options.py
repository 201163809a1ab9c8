"""List options that are given several times on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmforge.cli.main import main
from bmforge.cli.parse import parse_options, take_option
from bmforge.cli.serve_options import ServeCommand


@dataclass
class Options:
    """Options of each kind.

    Args:
        names: a list.
        sizes: a list, or none.
        label: one value.
        fast: a switch.
    """

    names: tuple[str, ...] = ()
    sizes: list[int] | None = None
    label: str = ""
    fast: bool = False


_WORDS = st.text("abc=", min_size=1, max_size=3).filter(lambda word: word[0] != "=")
_USES = st.one_of(
    st.tuples(st.just("--names"), st.lists(_WORDS, min_size=1, max_size=3)),
    st.tuples(st.just("--sizes"), st.lists(st.integers(0, 9).map(str), min_size=1, max_size=3)),
    st.tuples(st.just("--label"), _WORDS.map(lambda word: [word])),
    st.tuples(st.just("--fast"), st.just([])),
)


@given(st.lists(_USES, max_size=6), st.booleans())
def test_no_value_of_a_list_is_lost(uses, joins_by_sign) -> None:
    """Lists have all values in order; other options have the last value."""
    arguments: list[str] = []
    for name, values in uses:
        if joins_by_sign and len(values) == 1:
            arguments.append(f"{name}={values[0]}")
        else:
            arguments += [name, *values]
    parsed = parse_options(Options, arguments, "test")
    names = [value for name, values in uses if name == "--names" for value in values]
    sizes = [int(value) for name, values in uses if name == "--sizes" for value in values]
    labels = [values[0] for name, values in uses if name == "--label"]
    assert list(parsed.names) == names
    assert (parsed.sizes or []) == sizes
    assert parsed.label == (labels[-1] if labels else "")
    assert parsed.fast == any(name == "--fast" for name, _ in uses)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--label", "a", "--label=b"], "--label is given more than once. The last value, b,"),
        (["--fast", "--no-fast"], "--fast is given more than once. The last value, False,"),
        (["--label", "a", "--label", "a", "--names", "b", "--names", "c"], None),
    ],
)
def test_another_value_of_an_option_is_no_silent_change(
    arguments: list[str], words: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"):
        parse_options(Options, arguments, "test")
    assert (words in caplog.text) if words else not caplog.records


def test_the_last_of_two_models_is_used(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`train` reads --model before all other options."""
    monkeypatch.chdir(tmp_path)
    for name in ("no-such-a", "no-such-b"):  # directories without a model
        Path(name).mkdir()
    for more in (["--model", "no-such-b"], ["--model=no-such-b"]):
        caplog.clear()
        with caplog.at_level("WARNING"):
            assert main(["train", "rl", "--model", "no-such-a", *more]) == 2
        assert "--model is given more than once. The last value, no-such-b," in caplog.text
        assert "no-such-a" not in (said := capsys.readouterr().err).splitlines()[-1]
        assert "no-such-b" in said
    caplog.clear()
    assert take_option(arguments := ["x", "--out=1", "y", "--out", "1"], "--out") == "1"
    assert arguments == ["x", "y"]
    assert not caplog.records


def test_adapters_of_a_server() -> None:
    """Each `--adapter NAME=DIR` counts, as in other servers."""
    arguments = ["model", "--adapter", "a=x", "--port", "81", "--adapter", "b=y", "c=z"]
    parsed = parse_options(ServeCommand, arguments, "serve")
    assert parsed.adapter == ("a=x", "b=y", "c=z")
    assert parsed.config.port == 81
