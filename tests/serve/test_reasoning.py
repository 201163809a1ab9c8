"""Reasoning: split from the answer, switched on and off, and limited."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI
from scripted_engine import ScriptedEngine

from bmforge.errors import ConfigError
from bmforge.infer import GenerationConfig, Request
from bmforge.infer.engine.constraint import Constraint
from bmforge.infer.engine.reasoning_span import ReasoningSpan

SAID: Any = [{"role": "user", "content": "hi"}]
# As Qwen3's template: without thinking, an empty block is written in front of the answer.
SWITCH = (
    "{%- if add_generation_prompt %}<|im_start|>assistant\n"
    "{%- if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)


@pytest.fixture(scope="module")
def thinking(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a template that switches the reasoning."""
    folder = tmp_path_factory.mktemp("thinking") / "tiny"
    shutil.copytree(model_directory, folder)
    file = folder / "tokenizer_config.json"
    old = "{%- if add_generation_prompt %}<|im_start|>assistant\\n"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, SWITCH.replace("\n", "\\n")))
    return folder


@pytest.mark.parametrize("streams", [False, True])
def test_reasoning_is_a_field_of_its_own(
    start: Any, engine: Any, thinking: Path, streams: bool
) -> None:
    scripted: Any = ScriptedEngine(engine, "<think>\nwell...\n</think>\n\nHello")
    with start(other=scripted, place=thinking) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        fields: Any = {"model": server.serving.name, "messages": SAID}
        if streams:
            events = client.chat.completions.create(**fields, stream=True)
            deltas = [event.choices[0].delta for event in events]
            text = "".join(delta.content or "" for delta in deltas)
            thoughts = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        else:
            message = client.chat.completions.create(**fields).choices[0].message
            text, thoughts = message.content, message.reasoning_content  # type: ignore[attr-defined]
        assert (text, thoughts) == ("Hello", "well...")
        hidden = client.chat.completions.create(**fields, extra_body={"include_reasoning": False})
        assert "reasoning_content" not in hidden.choices[0].message.model_dump()
        response = client.responses.create(model=server.serving.name, input="hi")
        assert [item.type for item in response.output] == ["reasoning", "message"]
        used = response.usage.output_tokens_details.reasoning_tokens  # type: ignore[union-attr]
        assert used == len("\nwell...\n")  # a token is a byte here
        usage = hidden.usage.completion_tokens_details  # type: ignore[union-attr]
        assert usage.reasoning_tokens == used  # type: ignore[union-attr]
        body = {"model": server.serving.name, "messages": SAID, "max_tokens": 50}
        found = httpx.post(f"{server.url}/v1/messages", json=body).json()["content"]
        assert [block["type"] for block in found] == ["thinking", "text"]
    with start(other=scripted, place=thinking, split_reasoning=False) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        message = client.chat.completions.create(model="tiny", messages=SAID).choices[0].message
        assert message.content == scripted.text


def test_reasoning_is_switched(start: Any, engine: Any, thinking: Path) -> None:
    scripted: Any = ScriptedEngine(engine, "x")
    with start(other=scripted, place=thinking) as server:
        for fields, is_off in (
            ({}, False), ({"enable_thinking": False}, True), ({"enable_thinking": True}, False),
            ({"chat_template_kwargs": {"enable_thinking": False}}, True),
            ({"reasoning_effort": "none"}, True), ({"reasoning_effort": "high"}, False),
        ):  # fmt: skip
            body = {"model": server.serving.name, "messages": SAID, "max_tokens": 5, **fields}
            assert httpx.post(f"{server.url}/v1/chat/completions", json=body).status_code == 200
            assert scripted.prompt().endswith("</think>\n\n") == is_off, fields
        body["chat_template_kwargs"] = {"enable_thinkin": False}
        found = httpx.post(f"{server.url}/v1/chat/completions", json=body)
        assert found.json()["error"]["param"] == "chat_template_kwargs"


@given(
    st.integers(0, 8), st.lists(st.integers(0, 3), min_size=1, max_size=3),
    st.lists(st.integers(0, 3), max_size=2), st.lists(st.integers(0, 3), max_size=14),
)  # fmt: skip
def test_a_budget_of_thoughts(limit: int, end: list[int], start: list[int], ids: list[int]) -> None:
    """Written with the budget, reasoning that has begun ends by itself or at the limit."""
    budget = ReasoningSpan(tuple(end), tuple(start), limit)
    written: list[int] = []
    free, last = [*ids, *[0] * 20], len(start) + limit
    for id in free:
        forced = budget.next_token(written)
        written.append(id if forced is None else forced)
    if free[: len(start)] != start:
        assert written == free
        return
    places = range(len(start), len(written))
    found = next((at for at in places if written[at : at + len(end)] == end), None)
    assert found is not None
    assert found <= last, (written, end)
    assert written[:found] == free[:found]
    assert budget.count(written) == found - len(start) <= limit


def test_budgets_that_are_refused() -> None:
    for limit, end in ((-1, (1,)), (1, ())):
        with pytest.raises(ConfigError):
            ReasoningSpan(end, (), limit)


@pytest.fixture(scope="module")
def opened(thinking: Path) -> Path:
    """The tiny model with a template that begins the reasoning."""
    settings = (thinking / "tokenizer_config.json").read_text()
    place = thinking.parent / "open"
    shutil.copytree(thinking, place)
    text = settings.replace("{%- if enable_thinking is", "<think>\\n{%- if enable_thinking is")
    (place / "tokenizer_config.json").write_text(text)
    return place


def test_the_engine_keeps_the_budget(start: Any, engine: Any, opened: Path) -> None:
    """Reasoning that the prompt has begun; the random model never ends it by itself."""
    with start(place=opened, other=engine) as server, httpx.Client(timeout=60) as client:
        body = {
            "model": server.serving.name, "messages": SAID, "max_tokens": 30, "temperature": 0,
            "thinking_token_budget": 6, "ignore_eos": True,
        }  # fmt: skip
        choice = client.post(f"{server.url}/v1/chat/completions", json=body).json()["choices"][0]
        plain = {**body, "thinking_token_budget": None}
        free = client.post(f"{server.url}/v1/chat/completions", json=plain).json()["choices"][0]
        assert free["message"]["content"] == ""
        thoughts = choice["message"]["reasoning_content"]
        assert free["message"]["reasoning_content"].startswith(thoughts.rstrip("\ufffd"))
        assert choice["message"]["content"]
        body["structured_outputs"] = {"choice": ["yes", "no"]}
        message = client.post(f"{server.url}/v1/chat/completions", json=body).json()["choices"][0]
        assert message["message"]["reasoning_content"] == thoughts
        assert message["message"]["content"] in ("yes", "no")


@pytest.mark.parametrize("begins", ["in the prompt", "in the answer", "not at all"])
def test_constraints_apply_after_the_reasoning(engine: Any, begins: str) -> None:
    """The answer is the free one up to the end of its reasoning, then the constrained one."""
    prompt, rule = engine.tokenizer.encode_prompt("Is it?"), Constraint.regex("[ab]{5}")
    options = GenerationConfig(max_new_tokens=30, eos_token_id=())

    def write(*ids: int, **more: Any) -> list[int]:
        return list(engine.submit(Request([*prompt, *ids], options, **more)).wait()[0].ids)

    free = write()
    first = next(id for id in range(5) if id != free[0])  # a mark, which the rule does not allow
    if begins == "not at all":
        span = ReasoningSpan((free[9],), (first,))
        assert write(constraint=rule, thoughts=span) == write(constraint=rule)
        return
    start = () if begins == "in the prompt" else (free[0],)
    at = free.index(free[9], len(start)) + 1
    span = ReasoningSpan((free[at - 1],), start)
    expected = [*free[:at], *write(*free[:at], constraint=rule)]
    assert write(constraint=rule, thoughts=span) == expected


def test_structured_output_of_a_model_that_thinks(
    start: Any, engine: Any, thinking: Path, opened: Path
) -> None:
    """An answer in JSON is content, and its reasoning is written before it."""
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    for place, text, fields, has_span in (
        (opened, 'hm</think>\n\n{"a": 1}', {}, True),
        (thinking, '<think>hm</think>\n\n{"a": 1}', {}, True),
        (thinking, '{"a": 1}', {"enable_thinking": False}, False),
    ):  # fmt: skip
        scripted: Any = ScriptedEngine(engine, text)
        with start(other=scripted, place=place) as server, httpx.Client(timeout=60) as client:
            body = {"model": server.serving.name, "messages": SAID, "response_format": schema}
            found = client.post(f"{server.url}/v1/chat/completions", json={**body, **fields}).json()
            assert found["choices"][0]["message"]["content"] == '{"a": 1}'
            span = scripted.requests[-1].thoughts
            assert (span is not None) == has_span
            if has_span:
                assert engine.tokenizer.decode(span.end) == "</think>"
                assert (span.start == ()) == (place is opened)


def test_messages_are_continued_after_their_reasoning(
    start: Any, engine: Any, thinking: Path, opened: Path
) -> None:
    asked = "<|im_start|>assistant"
    for place, last, end in (
        (thinking, {"content": "It is"}, f"{asked}It is"),
        (thinking, {"content": "It is", "reasoning_content": "hm"},
         f"{asked}<think>\nhm\n</think>\n\nIt is"),
        (thinking, {"content": "", "reasoning": "hm"}, f"{asked}<think>\nhm"),
        (opened, {"content": "It is"}, f"{asked}\n<think>\n</think>\n\nIt is"),
        (opened, {"content": "It is", "reasoning_content": "hm"},
         f"{asked}\n<think>hm\n</think>\n\nIt is"),
        (opened, {"content": "", "reasoning_content": "hm"}, f"{asked}\n<think>hm"),
        (opened, {"content": "<think>hm</think>It is"}, f"{asked}\n<think>hm</think>It is"),
    ):  # fmt: skip
        scripted: Any = ScriptedEngine(engine, " so")
        with start(other=scripted, place=place) as server, httpx.Client(timeout=60) as client:
            messages = [*SAID, {"role": "assistant", **last}]
            body = {"model": server.serving.name, "messages": messages}
            body["continue_final_message"] = True
            found = client.post(f"{server.url}/v1/chat/completions", json=body)
            assert scripted.prompt().endswith(end), last
            message = found.json()["choices"][0]["message"]
            shown = message["content"] if last["content"] else message["reasoning_content"]
            assert shown == " so"
