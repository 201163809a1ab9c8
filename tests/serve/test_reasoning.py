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
from bmforge.infer.engine.thought_budget import ThoughtBudget

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
    st.integers(1, 8), st.lists(st.integers(0, 3), min_size=1, max_size=3),
    st.lists(st.integers(0, 3), max_size=2), st.lists(st.integers(0, 3), max_size=14),
)  # fmt: skip
def test_a_budget_of_thoughts(limit: int, end: list[int], start: list[int], ids: list[int]) -> None:
    """Written with the budget, reasoning that has begun ends by itself or at the limit."""
    budget = ThoughtBudget(limit, tuple(end), tuple(start))
    written: list[int] = []
    for id in [*ids, *[0] * 20]:
        forced = budget.next_token(written)
        written.append(id if forced is None else forced)
    begun = written[: len(start)] == start and len(start) <= limit
    free = [*ids, *[0] * 20]
    if not begun:
        return
    ends_itself = any(
        free[at : at + len(end)] == end for at in range(len(start), limit) if at + len(end) <= limit
    )
    if ends_itself:
        assert written == free
    else:
        found = [at for at in range(len(start), limit + 1) if written[at : at + len(end)] == end]
        assert found, (written, end)


def test_budgets_that_are_refused() -> None:
    for limit, end in ((0, (1,)), (1, ())):
        with pytest.raises(ConfigError):
            ThoughtBudget(limit, end)


def test_the_engine_keeps_the_budget(start: Any, engine: Any, thinking: Path) -> None:
    """Reasoning that the prompt has begun; the random model never ends it by itself."""
    settings = (thinking / "tokenizer_config.json").read_text()
    place = thinking.parent / "open"
    shutil.copytree(thinking, place)
    opened = settings.replace("{%- if enable_thinking is", "<think>\\n{%- if enable_thinking is")
    (place / "tokenizer_config.json").write_text(opened)
    with start(place=place, other=engine) as server:
        body = {
            "model": server.serving.name, "messages": SAID, "max_tokens": 30, "temperature": 0,
            "thinking_token_budget": 6, "ignore_eos": True,
        }  # fmt: skip
        choice = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()["choices"][0]
        plain = {**body, "thinking_token_budget": None}
        free = httpx.post(f"{server.url}/v1/chat/completions", json=plain).json()["choices"][0]
        assert free["message"]["content"] == ""
        thoughts = choice["message"]["reasoning_content"]
        assert free["message"]["reasoning_content"].startswith(thoughts.rstrip("\ufffd"))
        assert choice["message"]["content"]
