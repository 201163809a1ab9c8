"""`/v1/responses` as OpenAI's client uses it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai import OpenAI
from scripted_engine import ScriptedEngine

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOL = {
    "type": "function",
    "name": "weather",
    "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def client(server: Any) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("streams", [False, True])
def test_text(start: Any, engine: Any, model_directory: Any, streams: bool) -> None:
    scripted: Any = ScriptedEngine(engine, "Hello, 天气!")
    with start(other=scripted, place=model_directory) as server, client(server) as openai:
        fields: Any = {
            "model": server.serving.name, "input": "hi", "instructions": "Be short.",
            "max_output_tokens": 40, "temperature": 0,
        }  # fmt: skip
        if streams:
            with openai.responses.stream(**fields) as stream:
                kinds = [event.type for event in stream]
                response = stream.get_final_response()
            assert kinds[:4] == [
                "response.created",
                "response.in_progress",
                "response.output_item.added",
                "response.content_part.added",
            ]
            assert kinds[-1] == "response.completed"
        else:
            response = openai.responses.create(**fields)
        assert response.output_text == "Hello, 天气!"
        assert response.status == "completed"
        assert response.usage is not None
        assert response.usage.input_tokens == len(scripted.requests[0].prompt)
        assert scripted.prompt() == (
            "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        said = {name: fields[name] for name in ("model", "input", "instructions")}
        counted = openai.responses.input_tokens.count(**said)
        assert counted.input_tokens == response.usage.input_tokens


@pytest.mark.parametrize(
    ("fields", "name"),
    [({"max_output_tokens": 10**6}, "max_output_tokens"),
     ({"reasoning": {"effort": "max"}}, "reasoning.effort"),
     ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text.format")],
)  # fmt: skip
def test_errors_name_the_fields_of_responses(start: Any, fields: Any, name: str) -> None:
    with start() as server:
        body = {"model": server.serving.name, "input": "hi", **fields}
        found = httpx.post(f"{server.url}/v1/responses", json=body, timeout=60)
        error = found.json()["error"]
        assert (found.status_code, error["param"]) == (400, name), error
        assert name in error["message"]


@pytest.mark.parametrize("streams", [False, True])
def test_tools_and_a_history_sent_back(
    start: Any, engine: Any, model_directory: Any, streams: bool
) -> None:
    scripted: Any = ScriptedEngine(engine, f"Let me look.\n{CALL}\n{CALL}")
    with start(other=scripted, place=model_directory) as server, client(server) as openai:
        fields: Any = {"model": server.serving.name, "tools": [TOOL]}
        said: list[Any] = [{"role": "user", "content": "weather?"}]
        if streams:
            with openai.responses.stream(input=said, **fields) as stream:
                pieces = [e.delta for e in stream if "arguments.delta" in e.type]
                response = stream.get_final_response()
            assert "".join(pieces) == '{"city": "Paris"}' * 2
            assert len(pieces) > 4
        else:
            response = openai.responses.create(input=said, **fields)
        calls = [item for item in response.output if item.type == "function_call"]
        assert [item.type for item in response.output] == ["message", *["function_call"] * 2]
        assert [json.loads(call.arguments) for call in calls] == [{"city": "Paris"}] * 2
        assert response.output_text.strip() == "Let me look."
        said += [item.model_dump() for item in response.output]
        said += [
            {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
            for call in calls
        ]
        scripted.text = "It is sunny."
        again = openai.responses.create(input=said, **fields)
        assert again.output_text == "It is sunny."
        prompt = scripted.prompt()
        assert prompt.count("<|im_start|>tool\nsunny<|im_end|>") == 2
        assert prompt.count('<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}') == 2


def test_a_cut_answer_and_failures(start: Any, engine: Any, model_directory: Any) -> None:
    scripted: Any = ScriptedEngine(engine, "abc", reason="length")
    with start(other=scripted, place=model_directory) as server, client(server) as openai:
        response = openai.responses.create(model=server.serving.name, input="hi")
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        with openai.responses.stream(model=server.serving.name, input="hi") as stream:
            assert [event.type for event in stream][-1] == "response.incomplete"
        for field, value in (
            ("previous_response_id", "resp_1"), ("background", True), ("truncation", "auto"),
            ("input", []), ("temperature", 3), ("tools", [{"type": "web_search"}]),
            ("reasoning", {"effort": "high"}), ("max_output_tokens", 10**6), ("other", 1),
        ):  # fmt: skip
            body = {"model": server.serving.name, "input": "hi", field: value}
            found = httpx.post(f"{server.url}/v1/responses", json=body)
            assert found.status_code == 400, field
            assert found.json()["error"]["message"]
