"""List options that are given several times on the command line."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from bmforge.cli.parse import parse_options
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


def test_adapters_of_a_server() -> None:
    """Each `--adapter NAME=DIR` counts, as in other servers."""
    arguments = ["model", "--adapter", "a=x", "--port", "81", "--adapter", "b=y", "c=z"]
    parsed = parse_options(ServeCommand, arguments, "serve")
    assert parsed.adapter == ("a=x", "b=y", "c=z")
    assert parsed.config.port == 81
