"""`/v1/messages` in Anthropic's documented format."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from scripted_engine import ScriptedEngine

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOL = {
    "name": "weather",
    "description": "the weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def post(server: Any, path: str = "messages", **fields: Any) -> httpx.Response:
    body = {
        "model": server.serving.name, "max_tokens": 50,
        "messages": [{"role": "user", "content": "hi"}], **fields,
    }  # fmt: skip
    body = {name: value for name, value in body.items() if value is not None}
    headers = {"anthropic-version": "2023-06-01", "x-api-key": "a-key-of-a-client"}
    return httpx.post(f"{server.url}/v1/{path}", json=body, headers=headers, timeout=60)


def read(response: httpx.Response) -> dict[str, Any]:
    """Rebuild the message from its events, as the documentation says."""
    message: dict[str, Any] = {}
    texts: dict[int, str] = {}
    for block in response.text.strip().split("\n\n"):
        name, _, data = block.partition("\ndata: ")
        event = json.loads(data)
        assert name == f"event: {event['type']}"
        if event["type"] == "message_start":
            message = event["message"]
        elif event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta = dict(event["delta"])
            delta.pop("type")
            texts[event["index"]] = texts.get(event["index"], "") + "".join(delta.values())
        elif event["type"] == "content_block_stop":
            content = message["content"][event["index"]]
            text = texts.get(event["index"], "")
            kind = {"text": "text", "thinking": "thinking", "tool_use": "input"}[content["type"]]
            content[kind] = json.loads(text or "{}") if kind == "input" else text
        elif event["type"] == "message_delta":
            message |= {**event["delta"], "usage": event["usage"]}
    assert event == {"type": "message_stop"}
    return message


@pytest.mark.parametrize("streams", [False, True])
def test_text_with_a_system_of_blocks(
    start: Any, engine: Any, model_directory: Any, streams: bool
) -> None:
    scripted: Any = ScriptedEngine(engine, "Hello, 天气!")
    with start(other=scripted, place=model_directory) as server:
        block = {"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}
        found = post(server, system=[block], stream=streams, metadata={"user_id": "u"})
        message = read(found) if streams else found.json()
        assert message["content"] == [{"type": "text", "text": "Hello, 天气!"}]
        assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
        usage, prompt = message["usage"], scripted.requests[0].prompt
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(prompt)
        assert "<|im_start|>system\nBe short.<|im_end|>" in scripted.prompt()
        counted = post(server, "messages/count_tokens", system=[block], max_tokens=None)
        assert counted.json() == {"input_tokens": len(prompt)}


def test_system_messages_within_a_conversation(
    start: Any, engine: Any, model_directory: Any
) -> None:
    scripted: Any = ScriptedEngine(engine, "yes")
    turns = [{"role": "user", "content": "a"},
             {"role": "system", "content": [{"type": "text", "text": "Be short."}]},
             {"role": "user", "content": "b"}]  # fmt: skip
    tool = {"name": "f", "input_schema": {}, "eager_input_streaming": True, "input_examples": []}
    with start(other=scripted, place=model_directory) as server:
        assert post(server, messages=turns, tools=[tool]).status_code == 200
        assert scripted.prompt().endswith(
            "<|im_start|>user\na<|im_end|>\n<|im_start|>system\nBe short.<|im_end|>\n"
            "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
        )
        found = post(server, messages=turns, tools=[{**tool, "input_examples": [{"a": 1}]}])
        assert found.json()["error"]["param"] == "tools.0.input_examples"


@pytest.mark.parametrize("streams", [False, True])
def test_tools_there_and_back(start: Any, engine: Any, model_directory: Any, streams: bool) -> None:
    scripted: Any = ScriptedEngine(engine, f"Let me look.\n{CALL}\n{CALL}")
    with start(other=scripted, place=model_directory) as server:
        choice = {"type": "auto"}
        found = post(server, tools=[TOOL], tool_choice=choice, stream=streams)
        message = read(found) if streams else found.json()
        kinds = [block["type"] for block in message["content"]]
        assert kinds == ["text", "tool_use", "tool_use"]
        assert message["content"][1]["input"] == {"city": "Paris"}
        assert message["content"][1]["id"] != message["content"][2]["id"]
        assert message["stop_reason"] == "tool_use"
        text = [{"type": "text", "text": "sun"}]
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": text}
            for block in message["content"][1:]
        ]
        said = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": message["content"]},
            {"role": "user", "content": [*results, {"type": "text", "text": "so?"}]},
        ]
        post(server, tools=[TOOL], messages=said)
        prompt = scripted.prompt()
        assert prompt.count("<|im_start|>tool\nsun<|im_end|>") == 2
        assert "<|im_start|>user\nso?<|im_end|>" in prompt
        one = {"type": "auto", "disable_parallel_tool_use": True}
        kinds = [b["type"] for b in post(server, tools=[TOOL], tool_choice=one).json()["content"]]
        assert kinds == ["text", "tool_use"]


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ({"content": "no such city", "is_error": True}, "Error: no such city"),
        ({"content": [{"type": "text", "text": "none"}], "is_error": True}, "Error: none"),
        ({"content": "error: none", "is_error": True}, "error: none"),
        ({"is_error": True}, "Error"),
        ({"content": "sun", "is_error": False}, "sun"),
    ],
)
def test_the_model_reads_that_a_tool_failed(
    start: Any, engine: Any, model_directory: Any, result: dict[str, Any], shown: str
) -> None:
    scripted: Any = ScriptedEngine(engine, "Sorry.")
    use = {"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "Paris"}}
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", **result}]},
    ]
    with start(other=scripted, place=model_directory) as server:
        assert post(server, tools=[TOOL], messages=turns).status_code == 200
        assert f"<|im_start|>tool\n{shown}<|im_end|>" in scripted.prompt()


def test_why_an_answer_ends(start: Any, engine: Any, model_directory: Any) -> None:
    scripted: Any = ScriptedEngine(engine, "abc", reason="length")
    with start(other=scripted, place=model_directory) as server:
        assert post(server).json()["stop_reason"] == "max_tokens"
        post(server, messages=[
            {"role": "user", "content": "hi"}, {"role": "assistant", "content": "I say"},
        ])  # fmt: skip
        assert scripted.prompt().endswith("<|im_start|>assistant\nI say")
    with start() as server:  # the real engine stops at a stop sequence
        found = post(server, stop_sequences=["q", "nothing"], top_k=1).json()
        plain = post(server, top_k=1).json()["content"][0]["text"]
        stop = plain[3]
        found = post(server, stop_sequences=["nothing", stop], top_k=1).json()
        assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", stop)
        assert "".join(block["text"] for block in found["content"]) == plain.partition(stop)[0]


def test_errors_have_anthropics_form(start: Any) -> None:
    with start() as server:
        for field, value in (
            ("max_tokens", None), ("messages", []), ("temperature", 2), ("model", "else"),
            ("messages", [{"role": "developer", "content": "a"}]), ("max_tokens", 10**6),
            ("thinking", {"type": "enabled", "budget_tokens": 10}), ("other", 1),
            ("messages", [{"role": "user", "content": [{"type": "image", "source": {}}]}]),
        ):  # fmt: skip
            found = post(server, **{field: value})
            assert found.status_code == (404 if field == "model" else 400), field
            assert found.json()["type"] == "error"
            assert set(found.json()["error"]) >= {"type", "message"}
    with start(keys="a-key-of-a-client") as server:
        assert post(server).status_code == 200
        found = httpx.post(f"{server.url}/v1/messages", json={})
        assert (found.status_code, found.json()["type"]) == (401, "error")
