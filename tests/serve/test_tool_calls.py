"""Calls in what a model writes, however it is cut into pieces; and how they are asked for."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from bmforge.serve.answers import Reading
from bmforge.serve.call_reader import CallReader
from bmforge.serve.errors import RequestError
from bmforge.serve.openai_types import ChatRequest
from bmforge.serve.parts import CallPiece, CallStart, GeneratedToolCall, JoinedAnswer, Thought
from bmforge.serve.thoughts import ThoughtReader
from bmforge.serve.tool_formats import FORMATS, find_format, read_json_call
from bmforge.serve.tools import ToolUse, call_starts, find_tools
from bmforge.tokenizers.chat_messages import THOUGHT_MARKS

HERMES = FORMATS["hermes"]

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "天"}}\n</tool_call>'
POINT = {
    "$defs": {"n": {"type": "integer"}},
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/n"}},
}


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


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
    at_once, pieces = read([whole]), read(cut(whole, places))
    assert at_once == pieces
    assert all(json.loads(call.arguments) == {"a": 1, "b": "天"} for call in at_once.calls)


def read(pieces: list[str], form: Any = HERMES, schemas: Any = None) -> JoinedAnswer:
    reader = CallReader(form, {"add": None} if schemas is None else schemas)
    return JoinedAnswer.join(
        [*(part for piece in pieces for part in reader.feed(piece)), *reader.end()]
    )


def test_text_is_shown_as_soon_as_it_cannot_be_a_call() -> None:
    reader = CallReader(HERMES, {"add": None})
    assert [*reader.feed("so: <too")] == ["so: "]
    assert [*reader.feed("th>")] == ["<tooth>"]
    assert [*reader.feed(CALL[:49])] == [CallStart("add"), CallPiece('{"a": 1,')]
    assert [*reader.feed(CALL[49:-1])] == [CallPiece(' "b": "天"}')]
    assert [*reader.feed(">!")] == ["!"]
    assert [*reader.end()] == []


SCHEMAS = {
    "add": {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    "go": None,
}


def write_calls(name: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Write calls as the chat templates of the models write them, independently of the parsers."""
    texts = [(n, json.dumps(v, ensure_ascii=False)) for n, v in calls]
    if name == "hermes":
        line = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
        return "\n".join(line.format(*text) for text in texts)
    if name == "llama3_json":
        return "; ".join('{{"name": "{}", "parameters": {}}}'.format(*text) for text in texts)
    if name == "mistral":
        inner = ", ".join('{{"name": "{}", "arguments": {}}}'.format(*text) for text in texts)
        return f"[TOOL_CALLS][{inner}]"
    if name == "deepseek_v3":
        line = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
        inner = "\n".join(line.format(*text) for text in texts)
        return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"
    if name == "minicpm":
        lines = [f"{n}({', '.join(f'{k}={v!r}' for k, v in v.items())})" for n, v in calls]
        return "<|tool_call_start|>\n```python\n" + "\n".join(lines) + "\n```\n<|tool_call_end|>"

    def plain(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    if name == "glm45":
        pair = "\n<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>"
        inner = [n + "".join(pair.format(k, plain(x)) for k, x in v.items()) for n, v in calls]
        return "\n".join(f"<tool_call>{one}\n</tool_call>" for one in inner)
    assert name == "qwen3_coder"
    inner = [
        f"<function={n}>\n"
        + "".join(f"<parameter={k}>\n{plain(x)}\n</parameter>\n" for k, x in v.items())
        + "</function>"
        for n, v in calls
    ]
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in inner)


WORDS = st.text("abc 天12\"'{}", max_size=8).map(str.strip)
CALLS = st.one_of(
    st.tuples(st.just("add"), st.fixed_dictionaries({"a": st.integers(), "b": WORDS})),
    st.tuples(st.just("go"), st.just({})),
)


@pytest.mark.parametrize("name", FORMATS)
@given(
    st.sampled_from(["", "Let me see. ", "a < b [TOO"]),
    st.lists(CALLS, min_size=1, max_size=3),
    st.lists(st.integers(0, 500), max_size=12),
)
def test_every_format_is_read_wherever_it_is_cut(
    name: str, before: str, calls: list[tuple[str, dict[str, Any]]], places: list[int]
) -> None:
    before = "" if name == "llama3_json" else before  # its calls are whole answers
    whole = before + write_calls(name, calls)
    for pieces in ([whole], cut(whole, places)):
        found = read(pieces, FORMATS[name], SCHEMAS)
        assert [(call.name, json.loads(call.arguments)) for call in found.calls] == calls, whole
        assert found.text == before.strip()


@pytest.mark.parametrize("name", FORMATS)
def test_calls_of_unknown_functions_are_text(name: str) -> None:
    whole = write_calls(name, [("delete", {"a": 1})])
    found = read([whole], FORMATS[name], SCHEMAS)
    assert (found.text, found.calls) == (whole, ())


def test_newer_spellings() -> None:
    found = read(['[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]go{}'], FORMATS["mistral"], SCHEMAS)
    assert [call.name for call in found.calls] == ["add", "go"]
    text = (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
        '{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    )
    (call,) = read([text], FORMATS["deepseek_v3"], SCHEMAS).calls
    assert json.loads(call.arguments) == {"a": 1}


def test_python_calls_are_read_and_never_run() -> None:
    for text in ("__import__('os').system('x')", "add(a=open('x'))", "add(1)", "add(a="):
        whole = f"<|tool_call_start|>{text}<|tool_call_end|>"
        assert read([whole], FORMATS["minicpm"], SCHEMAS) == JoinedAnswer(whole, "", ())


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{{ tools }}<tool_call>", "hermes"),
        ("{{ tools }}<tool_call><function=x>", "qwen3_coder"),
        ("{{ tools }}<tool_call><arg_key>", "glm45"),
        ("{{ tools }}[TOOL_CALLS]", "mistral"),
        ("{{ tools }}<｜tool▁calls▁begin｜>", "deepseek_v3"),
        ("{{ tools }}<|tool_call_start|>", "minicpm"),
        ('{{ tools }}{"name": x, "parameters": y} ipython', "llama3_json"),
        ("{{ messages }}<tool_call>", None),
        ("{{ tools }}", None),
    ],
)
def test_the_format_of_a_template(source: str, name: str | None) -> None:
    found = find_format(source)
    assert (found.name if found else None) == name


@pytest.mark.parametrize("marks", THOUGHT_MARKS)
@given(
    st.text("ab\n<天", max_size=10), st.text("ab<天", max_size=10),
    st.booleans(), st.booleans(), st.lists(st.integers(0, 60), max_size=8),
)  # fmt: skip
def test_thoughts_are_split_wherever_it_is_cut(
    marks: tuple[str, str], thought: str, text: str, is_open: bool, closes: bool, places: list[int]
) -> None:
    whole = (
        ("" if is_open else marks[0] + "\n")
        + thought
        + (f"\n{marks[1]}\n\n{text}" if closes else "")
    )
    found = {}
    for kind, pieces in (("whole", [whole]), ("cut", cut(whole, places))):
        reader = ThoughtReader(marks, is_open)
        parts = [*(part for piece in pieces for part in reader.feed(piece)), *reader.end()]
        found[kind] = JoinedAnswer.join(parts)
    assert found["whole"] == found["cut"]
    assert found["whole"].thoughts.strip("\n") == thought.strip("\n")
    assert found["whole"].text == (text if closes else "")


def test_an_answer_without_thoughts_is_text() -> None:
    for whole in ("hello <think>x</think>", "<thin", "", "<b>"):
        reader = ThoughtReader(THOUGHT_MARKS[0], is_open=False)
        assert [*reader.feed(whole), *reader.end()] == ([whole] if whole else [])
    reader = ThoughtReader(THOUGHT_MARKS[0], is_open=True)
    assert [*reader.feed("a"), *reader.end()] == [Thought("a")]


@pytest.mark.parametrize(
    "text",
    ["", "x", "[]", '{"name": "sub", "arguments": {}}', '{"name": ["add"], "arguments": {}}',
     '{"name": "add", "arguments": 3}', "[" * 100_000],
)  # fmt: skip
def test_what_is_no_call_is_text(text: str) -> None:
    whole = f"<tool_call>{text}</tool_call>"
    assert read([whole]) == JoinedAnswer(whole, "", ())


def test_arguments_may_be_left_out_or_be_text() -> None:
    names: Any = {"add": None}
    assert read_json_call({"name": "add"}, names) == GeneratedToolCall("add", "{}")
    assert read_json_call({"name": "add", "arguments": "{}"}, names) == GeneratedToolCall(
        "add", "{}"
    )
    assert read(['<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>']).calls == (
        GeneratedToolCall("add", '{"a": 1}'),
    )


def test_a_call_that_must_come() -> None:
    """The rule takes what one of the functions takes, references included, and nothing else."""
    tools = [tool("add", POINT), tool("go")]
    use = find_tools(request(tools=tools, tool_choice="required"), HERMES)
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
    use = find_tools(request(tools=tools, tool_choice=named), None)
    assert use.rule is not None
    assert use.begin == ""
    assert use.shown is None
    assert not jsonschema.Draft202012Validator(json.loads(use.rule.source)).is_valid(
        {"name": "add", "arguments": {}}
    )


def test_tools_that_may_be_called_or_not() -> None:
    tools = [tool("add")]
    assert find_tools(request(), HERMES) == ToolUse()
    assert find_tools(request(tools=tools, tool_choice="none"), None) == ToolUse()
    use = find_tools(request(tools=tools), HERMES)
    assert (use.rule, set(use.schemas)) == (None, {"add"})
    assert use.shown == [{"type": "function", "function": {"name": "add"}}]


def test_only_some_tools_are_allowed() -> None:
    tools = [tool("add", POINT), tool("go"), tool("stop")]
    use = find_tools(request(tools=tools, tool_choice=allowed("auto", "stop", "add")), HERMES)
    assert use.shown is not None
    assert [entry["function"]["name"] for entry in use.shown] == ["add", "stop"]
    assert (set(use.schemas), use.rule, use.form) == ({"add", "stop"}, None, HERMES)
    choice = allowed("required", "go")
    body = request(tools=tools, tool_choice=choice)
    use = find_tools(body, HERMES)
    assert use.rule is not None
    check = jsonschema.Draft202012Validator(json.loads(use.rule.source))
    assert check.is_valid({"name": "go", "arguments": {}})
    assert not check.is_valid({"name": "add", "arguments": {"a": 1}})
    for fields, problem in (
        ({"tool_choice": choice}, "tool_choice has no effect without tools"),
        ({"tools": tools, "tool_choice": allowed("required")}, "at least 1 item"),
        ({"tools": tools, "tool_choice": allowed("any", "go")}, "'auto' or 'required'"),
    ):
        with pytest.raises(ValidationError, match=problem):
            request(**fields)


@pytest.mark.parametrize("name", FORMATS)
def test_calls_begin_with_the_starts_of_their_format(name: str) -> None:
    class Tokenizer:
        def encode_chat(self, text: str) -> list[int]:
            return [7] if text == "<tool_call>" else [*text.encode()]

    starts = call_starts(ToolUse(schemas=SCHEMAS, form=FORMATS[name]), Tokenizer())
    assert (7 in starts) == (name in ("hermes", "glm45", "qwen3_coder"))
    texts = tuple(start for start in starts if isinstance(start, str))
    for call in (("add", {"a": 1, "b": "x"}), ("go", {})):
        assert write_calls(name, [call]).startswith(texts)
    assert call_starts(ToolUse(), Tokenizer()) == ()


@pytest.mark.parametrize(
    ("fields", "writes", "problem"),
    [
        ({"tools": [tool("a")]}, False, "does not support tool calls"),
        ({"tools": [tool("a"), tool("a")]}, True, "same name"),
        (
            {"tools": [tool("a")], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
            True,
            "cannot be used together",
        ),
        (
            {"tools": [tool("a")], "tool_choice": "required", "guided_regex": "a"},
            True,
            "cannot be used together",
        ),
        (
            {"tools": [tool("a")], "tool_choice": allowed("auto", "a", "b")},
            True,
            "names the function 'b', which is not in tools",
        ),
        (
            {"tools": [tool("a")], "tool_choice": {"type": "function", "function": {"name": "b"}}},
            True,
            "not in tools",
        ),
    ],
)
def test_tools_that_cannot_be_used(fields: dict[str, Any], writes: bool, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        find_tools(request(**fields), HERMES if writes else None)


@given(
    st.sampled_from(["<extra_id_0> hello", "<extra_id_0>", "<extra", "hello", ""]),
    st.lists(st.integers(0, 30), max_size=5),
)
def test_what_an_answer_begins_with_is_not_shown(text: str, places: list[int]) -> None:
    reading = Reading(ToolUse(), "<extra_id_0>")
    shown = [found for piece in cut(text, places) for found in reading.feed(piece)]
    shown += reading.end()
    assert "".join(map(str, shown)) == text.removeprefix("<extra_id_0>")


def test_a_forced_call() -> None:
    use = find_tools(request(tools=[tool("go")], tool_choice="required"), None)
    for text, calls in (
        ('{"name": "go", "arguments": {}}', (GeneratedToolCall("go", "{}"),)),
        ('{"name": "g', ()),
    ):
        reading = Reading(use)
        found = JoinedAnswer.join([*reading.feed(text), *reading.end()])
        assert found.calls == calls
        assert found.text == ("" if calls else text)
        assert reading.has_calls == bool(calls)


@pytest.mark.parametrize(
    ("text", "is_forced", "is_whole"),
    [
        (CALL, False, True),
        (f"{CALL}\n{CALL}", False, True),
        (CALL.partition("</tool_call>")[0], False, True),  # the close may be a stop string
        (CALL.partition(', "b"')[0], False, False),
        (f"{CALL}\n{CALL}".rpartition("天")[0], False, False),
        ('{"name": "add", "arguments": {"a": 1}}', True, True),
        ('{"name": "add", "arguments": {"a"', True, False),
    ],
)
def test_a_call_that_a_stop_string_cuts(text: str, is_forced: bool, is_whole: bool) -> None:
    choice = "required" if is_forced else "auto"
    use = find_tools(request(tools=[tool("add")], tool_choice=choice), HERMES)
    reading = Reading(use)
    found = JoinedAnswer.join([*reading.feed(text), *reading.end()])
    assert found.calls
    assert (reading.has_calls, reading.is_cut) == (is_whole, not is_whole)


def test_whitespace_after_calls_is_left_out() -> None:
    reading = Reading(find_tools(request(tools=[tool("add")]), HERMES))
    parts = [part for piece in f"Sure. \n{CALL}\n \n{CALL}\n\nDone  it".partition(" \n")
             for part in reading.feed(piece)]  # fmt: skip
    parts += [*reading.end()]
    texts = [part for part in parts if isinstance(part, str)]
    assert "".join(texts) == "Sure. \nDone  it"
