"""Calls in what a model writes, however it is cut into pieces; and how they are asked for."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmforge.serve.answers import Reading
from bmforge.serve.errors import RequestError
from bmforge.serve.openai_types import ChatRequest
from bmforge.serve.tools import Call, CallReader, ToolUse, find_tools, read_call

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "天"}}\n</tool_call>'
POINT = {
    "$defs": {"n": {"type": "integer"}},
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/n"}},
}


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def request(**fields: Any) -> ChatRequest:
    said = [{"role": "user", "content": "add"}]
    return ChatRequest.model_validate({"model": "m", "messages": said, **fields})


def cut(text: str, places: list[int]) -> list[str]:
    places = sorted({place % (len(text) + 1) for place in places})
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@given(
    st.lists(
        st.sampled_from(
            [CALL, "a < b", "<tool", "天气", "<tool_call>x</tool_call>", "<tool_call>"]
        ),
        max_size=6,
    ),
    st.lists(st.integers(0, 500), max_size=12),
)
def test_pieces_do_not_matter(parts: list[str], places: list[int]) -> None:
    """The same calls and the same text, wherever it is cut; text is never lost."""
    whole = "".join(parts)
    reader = CallReader({"add"})
    at_once = [*reader.feed(whole), reader.end()]
    reader = CallReader({"add"})
    pieces = [found for piece in cut(whole, places) for found in reader.feed(piece)]
    pieces.append(reader.end())
    for found in (at_once, pieces):
        calls = [one for one in found if isinstance(one, Call)]
        assert all(json.loads(one.arguments) == {"a": 1, "b": "天"} for one in calls)
    text = ["".join(one for one in found if isinstance(one, str)) for found in (at_once, pieces)]
    assert text[0] == text[1]
    assert sum(isinstance(one, Call) for one in at_once) == sum(isinstance(o, Call) for o in pieces)


def test_text_is_shown_as_soon_as_it_cannot_be_a_call() -> None:
    reader = CallReader({"add"})
    assert [*reader.feed("so: <too")] == ["so: "]
    assert [*reader.feed("th>")] == ["<tooth>"]
    assert [*reader.feed(CALL[:-1])] == []
    assert [*reader.feed(">!")] == [Call("add", '{"a": 1, "b": "天"}'), "!"]
    assert reader.end() == ""


@pytest.mark.parametrize(
    "text",
    ["", "x", "[]", '{"name": "sub", "arguments": {}}', '{"name": ["add"], "arguments": {}}',
     '{"name": "add", "arguments": 3}', "[" * 100_000],
)  # fmt: skip
def test_what_is_no_call_is_text(text: str) -> None:
    assert read_call(text, frozenset(["add"])) is None


def test_arguments_may_be_left_out_or_be_text() -> None:
    assert read_call('{"name": "add"}', ["add"]) == Call("add", "{}")
    assert read_call('{"name": "add", "arguments": "{}"}', ["add"]) == Call("add", "{}")


def test_a_call_that_must_come() -> None:
    """The rule takes what one of the functions takes, references included, and nothing else."""
    tools = [tool("add", POINT), tool("go")]
    use = find_tools(request(tools=tools, tool_choice="required"), writes_calls=True)
    assert use.begin == "<tool_call>\n"
    assert use.rule is not None
    schema = json.loads(use.rule.source)
    check = jsonschema.Draft202012Validator(schema)
    assert check.is_valid({"name": "add", "arguments": {"a": 1}})
    assert check.is_valid({"name": "go", "arguments": {"x": "y"}})
    assert not check.is_valid({"name": "add", "arguments": {"a": "1"}})
    assert not check.is_valid({"name": "sub", "arguments": {}})
    assert not check.is_valid({"name": "go", "arguments": {}, "more": 1})
    named = {"type": "function", "function": {"name": "go"}}
    use = find_tools(request(tools=tools, tool_choice=named), writes_calls=False)
    assert use.rule is not None
    assert use.begin == ""
    assert use.shown is None
    assert not jsonschema.Draft202012Validator(json.loads(use.rule.source)).is_valid(
        {"name": "add", "arguments": {}}
    )


def test_tools_that_may_be_called_or_not() -> None:
    tools = [tool("add")]
    assert find_tools(request(), True) == ToolUse()
    assert find_tools(request(tools=tools, tool_choice="none"), False) == ToolUse()
    use = find_tools(request(tools=tools), writes_calls=True)
    assert (use.rule, use.names) == (None, {"add"})
    assert use.shown == [{"type": "function", "function": {"name": "add"}}]


@pytest.mark.parametrize(
    ("fields", "writes", "problem"),
    [
        ({"tools": [tool("a")]}, False, "no form for calls"),
        ({"tools": [tool("a"), tool("a")]}, True, "twice"),
        ({"tools": [tool("a")], "response_format": {"type": "json_object"}}, True, "contradict"),
        ({"tools": [tool("a")], "structured_outputs": {"regex": "a"}}, True, "contradict"),
        (
            {"tools": [tool("a")], "tool_choice": {"type": "function", "function": {"name": "b"}}},
            True,
            "no tool",
        ),
    ],
)
def test_tools_that_cannot_be_used(fields: dict[str, Any], writes: bool, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        find_tools(request(**fields), writes)


@given(
    st.sampled_from(["<extra_id_0> hello", "<extra_id_0>", "<extra", "hello", ""]),
    st.lists(st.integers(0, 30), max_size=5),
)
def test_what_an_answer_begins_with_is_not_shown(text: str, places: list[int]) -> None:
    reading = Reading(ToolUse(), "<extra_id_0>")
    shown = [found for piece in cut(text, places) for found in reading.feed(piece)]
    shown += reading.end()
    assert "".join(map(str, shown)) == text.removeprefix("<extra_id_0>")


def test_a_forced_call_is_read_at_the_end() -> None:
    use = find_tools(request(tools=[tool("go")], tool_choice="required"), False)
    for text, calls in (('{"name": "go", "arguments": {}}', True), ('{"name": "g', False)):
        reading = Reading(use)
        assert [*reading.feed(text)] == []
        (found,) = reading.end()
        assert isinstance(found, Call) == calls == reading.has_calls
