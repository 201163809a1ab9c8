"""The template language against OpenPrompt's own answers, and against any text."""

from __future__ import annotations

import string
import sys
from contextlib import contextmanager
from functools import cache

import pytest
from golden_prompts import CASES, TEXTS
from hypothesis import given, settings
from hypothesis import strategies as st

from bmforge.errors import ConfigError
from bmforge.tune.prompt import (
    TemplateError,
    parse_template,
    read_template,
    register_post_processing,
)
from bmforge.tune.prompt.published_templates import read_published
from bmforge.tune.prompt.template import fill_piece

KINDS = ("placeholder", "meta", "mask", "special", "text", "soft")


@pytest.mark.parametrize("case", CASES["parse"], ids=lambda case: case["text"][:24])
def test_pieces_are_those_of_the_original(case):
    pieces = parse_template(case["text"])
    assert len(pieces) == len(case["pieces"])
    for ours, theirs in zip(pieces, case["pieces"], strict=True):
        kind = next((kind for kind in KINDS if kind in theirs), "soft")
        assert (ours.kind, ours.value) == (kind, theirs.get(kind))
        assert ours.spaced == (theirs["add_prefix_space"] == " ")
        assert ours.soft_id == theirs.get("soft_id", 0)
        assert ours.duplicate == theirs.get("duplicate", 1)
        assert ours.shortenable == theirs.get("shortenable", kind == "placeholder")


@pytest.mark.parametrize("text", CASES["refused"])
def test_what_the_original_stumbles_over_is_refused_with_its_place(text):
    with pytest.raises(TemplateError, match=r"line 1, column \d+") as caught:
        parse_template(text)
    assert 0 <= caught.value.at <= len(text)


@pytest.mark.parametrize(
    ("piece", "says", "column"),
    [
        ('{"plceholder":"text_a"}', "Did you mean 'placeholder'", 3),
        ('{"special":"<eoz>"}', "Did you mean '<eos>'", 3),
        ('{"text":"a","duplicate":2}', "duplicate is only allowed in soft", 3),
        ('{"soft_id":-1}', "integer of at least 1", 3),
        ('{"soft_id":"one"}', "integer of at least 1", 3),
        ('{"soft":None,"duplicate":0}', "duplicate=0", 3),
        ('{"mask":"x"}', "a mask has no value", 3),
        ('{"meta":"a","placeholder":"b"}', "one of", 3),
        ('{"text":open("f")}', "a value is not a Python literal", 3),
        ('{"placeholder":"a","post_processing":"nothing"}', "supported: .*strip", 3),
        ('{"meta":"a","post_processing":lambda x: eval(x)}', "is not supported", 3),
        ("{" * 40 + "}" * 40, "nested too deeply", 19),
    ],
)
def test_faults_say_what_and_where(piece, says, column):
    with pytest.raises(TemplateError, match=says) as caught:
        parse_template(f'first {{"mask"}}\nb {piece}')
    assert (caught.value.line, caught.value.column) == (2, column)
    assert str(caught.value).splitlines()[-1].index("^") == column + 1


def test_post_processing_is_read_or_registered_and_never_evaluated():
    chain = '{"meta":"m","post_processing":lambda s: s.rstrip(string.punctuation).lower()} {"mask"}'
    process = parse_template(chain)[0].process
    assert process is not None
    assert process("A b.!?") == "a b"
    register_post_processing("test_backwards", lambda text: text[::-1])
    text = '{"placeholder":"t","post_processing":"test_backwards"} {"mask"}'
    assert parse_template(text)[0].process("abc") == "cba"
    with pytest.raises(ConfigError, match="already registered"):
        register_post_processing("strip", str.upper)


LAMBDAS = [
    ("lambda x: x + '.'", "so"),
    ("lambda s: s[:1].lower() + s[1:]", "Oil rose"),
    ("lambda s: s[:-1]", "end."),
    ("lambda x: x.strip().rstrip(string.punctuation)", " a!? "),
    ("lambda x: '|'.join(['(' + i['label'] + ') ' + i['text'] for i in x])",
     [{"label": "A", "text": "x"}, {"label": "B", "text": "y"}]),
    ("lambda lis: ','.join([f'{i}:{choice}' for i, choice in enumerate(lis)])", ["p", "q"]),
    ("lambda x: '\\n\\n'.join(x)", ["p", "q"]),
]  # fmt: skip
REFUSED = [
    "lambda x: eval(x)", "lambda x: x.__class__", "lambda x: x.format(x)", "lambda x: x * 9",
    "lambda x: [i for i in x if i]", "lambda x: open('f').read()", "lambda x: y", "lambda x, y: x",
    "lambda x: f'{x!r:>99}'", "lambda x: (lambda z: z)(x)", "lambda x: x[y]",
]  # fmt: skip


@pytest.mark.parametrize(("source", "value"), LAMBDAS, ids=[row[0] for row in LAMBDAS])
def test_lambdas_of_old_templates_equal_python(source, value):
    for written in (source, repr(source)):
        (piece, _) = parse_template(f'{{"meta":"m","post_processing":{written}}} {{"mask"}}')
        assert piece.process(value) == eval(source, {"string": string})(value)


@pytest.mark.parametrize("source", REFUSED)
def test_other_lambdas_are_refused(source):
    with pytest.raises(ConfigError, match="is not supported"):
        parse_template(f'{{"meta":"m","post_processing":{source}}} {{"mask"}}')


def test_a_list_needs_a_function_that_makes_it_a_text():
    (piece, _) = parse_template('{"meta":"m"} {"mask"}')
    assert fill_piece(piece, {}, {"m": 7}) == "7"
    with pytest.raises(ConfigError, match="'m' cannot be inserted into the template: it is a list"):
        fill_piece(piece, {}, {"m": ["a"]})


def test_a_line_of_a_file_is_a_template(tmp_path):
    path = tmp_path / "templates.txt"
    path.write_text("\n".join((TEXTS[0], "", TEXTS[9])), "utf-8")
    assert read_template(path, 1) == TEXTS[9]
    with pytest.raises(ConfigError, match=r"2 templates \(allowed: 0 to 1"):
        read_template(path, 2)


ALL_TEMPLATES = sorted(
    {*TEXTS, *(text for task in read_published().values() for text in task.templates)}
)
WATCHED = ("import", "exec", "open", "os.", "subprocess.", "socket.", "ctypes.")
_WATCHING: list[list[str]] = []


def _note(event: str, _: object) -> None:
    if _WATCHING and event.startswith(WATCHED):
        _WATCHING[-1].append(event)


@cache
def _add_hook() -> None:
    parse_template('{"mask"} {"placeholder":"a","post_processing":lambda x: x.lower()}')
    sys.addaudithook(_note)


@contextmanager
def watch():
    """What Python reports of imports, executed code and opened files; a hook cannot be removed."""
    _add_hook()
    _WATCHING.append([])
    try:
        yield _WATCHING[-1]
    finally:
        _WATCHING.pop()


PARTS = st.sampled_from(
    ['{"mask"}', '{"', "}", "{", "'", '"', "placeholder", ":", ",", "lambda x: x", "\\", "\n",
     '{"soft":', "None", "(" * 9, "-" * 9, "__import__('os')", "\0", "\ud800", "真"]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(PARTS | st.text(max_size=6), max_size=12).map("".join))
def test_any_text_is_a_template_or_says_where_it_is_not(text):
    pieces, place = (), 0
    try:
        pieces = parse_template(text)
    except TemplateError as error:
        place = error.at
    assert 0 <= place <= len(text)
    assert not pieces or any(piece.kind == "mask" for piece in pieces)


def _mutate(text: str, edits: list[tuple[int, str]]) -> str:
    """A template with pieces put in, or characters taken out where there is nothing to put in."""
    for place, put in edits:
        at = place % (len(text) + 1)
        text = text[:at] + put + text[at + (not put) :]
    return text


MUTATED = st.builds(
    _mutate,
    st.sampled_from(ALL_TEMPLATES),
    st.lists(st.tuples(st.integers(0, 999), PARTS | st.text(max_size=3)), min_size=1, max_size=5),
)
NESTED = st.builds(
    lambda mark, count, text: '{"mask"}' + "{" * (count % 7) + mark * count + text,
    st.sampled_from(["{", "[", "(", '{"a":', "-", "not ", "{'", "lambda x: "]),
    st.integers(1, 3000),
    st.text(max_size=9),
)


@pytest.mark.long
@settings(max_examples=10_000, deadline=None)
@given(st.text(max_size=60) | st.lists(PARTS, max_size=20).map("".join) | MUTATED | NESTED)
def test_ten_thousand_texts_are_read_and_never_run(text):
    """Nothing is imported, executed or opened while they are read."""
    place = 0
    with watch() as seen:
        try:
            parse_template(text)
        except TemplateError as error:
            place = error.at
    assert 0 <= place <= len(text)
    assert not seen
