"""Bodies: what JSON means comes through, what only looks like it is refused, and quickly."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmforge.serve.errors import RequestError
from bmforge.serve.settings import BodyLimits
from bmforge.serve.strict_json import json_depth, parse_json

CONFIG = BodyLimits()
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**18), 10**18), TEXTS,
    st.floats(allow_nan=False, allow_infinity=False),
)  # fmt: skip
VALUES = st.recursive(
    LEAVES, lambda inner: st.one_of(st.lists(inner), st.dictionaries(TEXTS, inner)), max_leaves=20
)


@settings(max_examples=40)
@given(VALUES, st.booleans())
def test_values_come_through(value: object, escaped: bool) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=escaped).encode(), CONFIG) == value


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b"[-Infinity]", "-Infinity is not a JSON number"),
        (b"[1e999]", "too large"),
        (b"[" + b"9" * 5000 + b"]", r"allowed: 19\)"),
        (b"[12345678901234567890]", r"allowed: 19\)"),
        (b'{"a": 1, "b": 2, "a": 3}', "'a' occurs twice"),
        (b'{"x": {"a": 1, "a": 1}}', "'a' occurs twice"),
        (rb'["\ud800"]', "surrogate"),
        (rb'{"\udC00 ": 1}', "surrogate"),
        (b'["\xff"]', "not valid UTF-8"),
        (b'["\xed\xa0\x80"]', "not valid UTF-8"),
        ('["a"]'.encode("utf-16"), "not valid UTF-8"),
        (b"\xef\xbb\xbf[]", "not valid JSON"),
        (b"[" * 65 + b"]" * 65, "allowed: 64 levels"),
        (b"[" * 1_000_000, "allowed: 64 levels"),
        (b'{"a":' * 500_000, "allowed: 64 levels"),
        (b"[" + b"1," * 200_001 + b"1]", r"too many values \(allowed: 200000\)"),
        (b"{" + b'"a":1,' * 10_001 + b"}", r"too many field names \(allowed: 10000\)"),
        (b"[" + b"[]," * 100_001 + b"[]]", r"too many values \(allowed: 200000\)"),
        (b'{"a": 1} x', "not valid JSON"),
        (b'["\n"]', "not valid JSON"),
        (b'"' + rb"\"" * 1_000_000, "not valid JSON"),  # a string that does not end
    ],
    ids=lambda value: repr(value[:24]) if isinstance(value, bytes) else None,
)
def test_what_is_refused(body: bytes, problem: str) -> None:
    with pytest.raises(RequestError, match=problem) as caught:
        parse_json(body, CONFIG)
    assert caught.value.status_code == 400


def test_both_halves_of_a_pair_are_a_character() -> None:
    assert parse_json(rb'["\ud83d\ude00"]', CONFIG) == ["\U0001f600"]


def test_brackets_in_texts_do_not_count() -> None:
    text = "[{" * 200 + '"\\' + ",:" * 300_000
    assert parse_json(json.dumps([text]).encode(), CONFIG) == [text]


@settings(max_examples=30)
@given(VALUES)
def test_depth(value: object) -> None:
    def depth(one: object) -> int:
        if isinstance(one, dict):
            one = list(one.values())
        return 1 + max(map(depth, one), default=0) if isinstance(one, list) else 0

    assert json_depth(value) == depth(value)
