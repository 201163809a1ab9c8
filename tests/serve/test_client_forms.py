"""Requests in the forms that popular clients send, written out by hand; no client is needed.

Each form was recorded from the client's own calls: anthropic 2.14, langchain-openai 1.7,
llama-index 0.14, LiteLLM 1.110, OpenAI Agents 0.20 and lm-eval 0.4.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from scripted_engine import ScriptedEngine

from bmforge.infer import Engine
from bmforge.infer.engine.request import Handle, Request

HELLO = [{"role": "user", "content": "hello"}]
CITY = {
    "title": "City",
    "type": "object",
    "description": "A city.",
    "properties": {"city": {"enum": ["Paris", "北京"]}, "large": {"type": "boolean"}},
    "required": ["city", "large"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"], "title": "City"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "w", "parameters": WEATHER}
TOOL = {"type": "function", "function": FUNCTION}
STRICT_TOOL = {"type": "function", "function": {**FUNCTION, "strict": True}}
FLAT_TOOL = {"type": "function", **FUNCTION, "strict": True}
CALL = {"id": "call_1", "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}  # fmt: skip
CALLED: list[dict[str, Any]] = [
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
]
FORM = {"type": "json_schema", "json_schema": {"name": "City", "strict": True, "schema": CITY}}

# client and call -> (fields of a chat completion, whether a call of the function is required)
CHATS: dict[str, tuple[dict[str, Any], bool]] = {
    "langchain invoke": ({"messages": HELLO, "stream": False}, False),
    "langchain logprobs": ({"messages": HELLO, "stream": False, "logprobs": True,
                            "top_logprobs": 2}, False),
    "langchain bind_tools": ({"messages": HELLO, "stream": False, "tools": [TOOL]}, False),
    "langchain result of a tool": ({"messages": HELLO + CALLED, "max_completion_tokens": 4,
                                    "stream": False, "tools": [TOOL]}, False),
    "langchain required": ({"messages": HELLO, "parallel_tool_calls": False, "tools": [TOOL],
                            "tool_choice": "required"}, True),
    "langchain strict": ({"messages": HELLO, "tools": [STRICT_TOOL], "tool_choice": {
        "type": "function", "function": {"name": "get_weather"}}}, True),
    "llama-index chat": ({"messages": [{"role": "system", "content": "s"}, *HELLO],
                          "stream": False, "temperature": 0.1}, False),
    "llama-index auto": ({"messages": HELLO + CALLED, "parallel_tool_calls": False,
                          "tool_choice": "auto", "temperature": 0.1,
                          "tools": [{**TOOL, "function": {**FUNCTION, "strict": False}}]}, False),
    "openai pydantic_function_tool": (
        {"messages": [{"role": "developer", "content": "d"}, {"role": "user", "content": "x",
                                                              "name": "u"}],
         "tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}]}, False),
    "openai allowed_tools": (
        {"messages": HELLO, "tools": [TOOL, {**TOOL, "function": {"name": "other"}}],
         "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
             {"type": "function", "function": {"name": "get_weather"}}]}}}, True),
    "agents settings": ({"messages": HELLO, "metadata": {"a": "b"}, "store": False,
                         "temperature": 0.5, "top_p": 0.9, "verbosity": "medium"}, False),
    "litellm tool message with a name": ({"messages": [*HELLO, CALLED[0], {
        **CALLED[1], "name": "get_weather"}], "tools": [TOOL]}, False),
    "lm-eval local-chat-completions": ({"messages": HELLO, "temperature": 0, "stop": ["\n"],
                                        "seed": 1234}, False),
}  # fmt: skip


def post(server: Any, path: str, body: dict[str, Any]) -> httpx.Response:
    body = {"model": server.serving.name, **body}
    headers = {"anthropic-version": "2023-06-01", "authorization": "Bearer none"}
    return httpx.post(server.url + path, json=body, headers=headers, timeout=60)


def test_chats(start: Any) -> None:
    with start() as server:
        for name, (fields, is_required) in CHATS.items():
            most = {} if is_required or "max_completion_tokens" in fields else {"max_tokens": 4}
            answer = post(server, "/v1/chat/completions", {**fields, **most})
            assert answer.status_code == 200, (name, answer.text)
            message = answer.json()["choices"][0]["message"]
            if is_required:
                (call,) = message["tool_calls"]
                jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER)


STRUCTURED: dict[str, tuple[str, dict[str, Any]]] = {
    "langchain, agents, litellm": (
        "/v1/chat/completions",
        {"messages": HELLO, "response_format": FORM},
    ),
    "agents responses": (
        "/v1/responses",
        {"input": HELLO, "include": [], "tools": [],
         "text": {"format": {"type": "json_schema", "strict": True, "name": "final_output",
                             "schema": CITY}}},
    ),
    "anthropic parse": (
        "/v1/messages",
        {"messages": HELLO, "max_tokens": 100,
         "output_config": {"format": {"type": "json_schema", "schema": CITY}}},
    ),
    "anthropic beta": (
        "/v1/messages",
        {"messages": HELLO, "max_tokens": 100,
         "output_format": {"type": "json_schema", "schema": CITY}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STRUCTURED)
def test_structured_output(start: Any, name: str) -> None:
    path, body = STRUCTURED[name]
    with start() as server:
        answer = post(server, path, body).json()
    if "choices" in answer:
        text = answer["choices"][0]["message"]["content"]
    else:
        blocks = answer["content"] if "content" in answer else answer["output"][-1]["content"]
        text = blocks[0]["text"]
    jsonschema.validate(json.loads(text), CITY)


class Biased:
    """An engine that prefers one token wherever the constraint allows it."""

    def __init__(self, engine: Engine, token: int) -> None:
        self._engine, self._token = engine, token

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: Request) -> Handle:
        options = replace(request.options, logit_bias={self._token: 30.0})
        return self._engine.submit(replace(request, options=options))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("begins", ["<", "{"])
def test_structured_output_with_tools(
    start: Any, engine: Engine, model_directory: Path, path: str, begins: str
) -> None:
    """OpenAI Agents, LangChain and pydantic-ai send a schema and tools in the same request.

    The answer is a call, or text that matches the schema, whichever token comes first.
    """
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": HELLO, "tools": [TOOL], "max_tokens": 60,
                                 "response_format": FORM},
        "/v1/responses": {"input": HELLO, "tools": [FLAT_TOOL], "max_output_tokens": 60,
                          "text": {"format": {"type": "json_schema", "strict": True,
                                              "name": "final_output", "schema": CITY}}},
        "/v1/messages": {"messages": HELLO, "max_tokens": 60,
                         "tools": [{"name": "get_weather", "input_schema": WEATHER}],
                         "output_config": {"format": {"type": "json_schema", "schema": CITY}}},
    }  # fmt: skip
    biased = Biased(engine, engine.tokenizer.encode(begins)[0])
    with start(other=biased, place=model_directory) as server:
        answer = post(server, path, bodies[path]).json()
    if "choices" in answer:
        text = answer["choices"][0]["message"]["content"]
    elif "output" in answer:
        text = answer["output"][0]["content"][0]["text"]
    else:
        text = answer["content"][0]["text"]
    if begins == "{":
        jsonschema.validate(json.loads(text), CITY)
    else:  # the model writes a call only by chance, but nothing else than the start of one
        assert text.startswith("<tool_call>")


def test_a_required_call_with_structured_output(start: Any) -> None:
    with start() as server:
        body = {"messages": HELLO, "tools": [TOOL], "response_format": FORM}
        body["tool_choice"] = "required"
        answer = post(server, "/v1/chat/completions", body).json()
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER)


@pytest.mark.parametrize("streams", [False, True])
def test_a_stop_string_within_the_arguments_of_a_call(
    start: Any, engine: Engine, model_directory: Path, streams: bool
) -> None:
    """The end of such an answer is no call, since its arguments are not JSON."""
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ro'
    scripted: Any = ScriptedEngine(engine, text)
    said = {"messages": HELLO, "max_tokens": 99, "stream": streams}
    anthropic_tool = {"name": "get_weather", "input_schema": WEATHER}
    with start(other=scripted, place=model_directory) as server:
        chat = post(server, "/v1/chat/completions", {**said, "tools": [TOOL]})
        messages = post(server, "/v1/messages", {**said, "tools": [anthropic_tool]})
        body = {"input": HELLO, "tools": [FLAT_TOOL], "stream": streams}
        responses = post(server, "/v1/responses", body)
    if streams:
        assert '"finish_reason":"stop"' in chat.text
        assert '"finish_reason":"tool_calls"' not in chat.text
        assert '"stop_reason":"end_turn"' in messages.text
        last = json.loads(responses.text.strip().rpartition("data: ")[2])["response"]
    else:
        assert chat.json()["choices"][0]["finish_reason"] == "stop"
        assert messages.json()["stop_reason"] == "end_turn"
        last = responses.json()
    assert [item["status"] for item in last["output"]] == ["incomplete"]
    assert last["output"][0]["arguments"] == '{"city": "Ro'


def test_neutral_log_probabilities(start: Any) -> None:
    with start() as server:
        body = {"messages": HELLO, "max_tokens": 2, "logprobs": False, "top_logprobs": 0}
        assert post(server, "/v1/chat/completions", body).status_code == 200
        assert post(server, "/v1/chat/completions", {**body, "top_logprobs": 1}).status_code == 400


def test_responses_of_agents_and_langchain(start: Any) -> None:
    call = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "get_weather",
            "arguments": '{"city": "Rome"}', "status": "completed"}  # fmt: skip
    result = {"type": "function_call_output", "call_id": "call_1", "output": "sunny"}
    with start() as server:
        for conversation in (HELLO, [{"type": "message", **HELLO[0]}], [*HELLO, call, result]):
            body = {
                "include": [],
                "input": conversation,
                "tools": [FLAT_TOOL],
                "max_output_tokens": 4,
            }
            assert post(server, "/v1/responses", body).status_code == 200
        allowed = {"type": "allowed_tools", "mode": "required",
                   "tools": [{"type": "function", "name": "get_weather"}]}  # fmt: skip
        other = {"type": "function", "name": "other"}
        body = {"input": HELLO, "tools": [other, FLAT_TOOL], "tool_choice": allowed}
        answer = post(server, "/v1/responses", body).json()
        assert answer["output"][-1]["name"] == "get_weather"
        assert answer["tool_choice"] == allowed
        body = {"input": HELLO, "tools": [FLAT_TOOL], "tool_choice": "required"}
        output = post(server, "/v1/responses", body).json()["output"]
        jsonschema.validate(json.loads(output[-1]["arguments"]), WEATHER)


def test_threads_are_refused_as_the_client_of_anthropic_expects(start: Any) -> None:
    # It sends the whole conversation without `thread` after this error, and no other.
    with start() as server:
        body = {"messages": HELLO, "max_tokens": 4}
        answer = post(server, "/v1/messages", {**body, "thread": {"type": "create"}})
        assert answer.status_code == 400
        assert answer.json()["error"]["details"]["error_code"] == "thread_unsupported_request"
        assert post(server, "/v1/messages", body).status_code == 200


def test_errors_of_messages_have_the_types_and_fields_of_anthropic(start: Any) -> None:
    with start() as server:
        body = {"messages": HELLO, "max_tokens": 4}
        unknown = post(server, "/v1/messages", {**body, "model": "other"})
        assert (unknown.status_code, unknown.json()["type"]) == (404, "error")
        assert unknown.json()["error"]["type"] == "not_found_error"
        thinking = {"type": "enabled", "budget_tokens": 1024}
        refused = post(server, "/v1/messages", {**body, "thinking": thinking}).json()["error"]
        assert (refused["type"], refused["param"]) == ("invalid_request_error", "thinking")
        adaptive = post(server, "/v1/messages", {**body, "thinking": {"type": "adaptive"}})
        assert adaptive.status_code == 200, adaptive.text
        both = {"output_format": STRUCTURED["anthropic beta"][1]["output_format"],
                **{"output_config": STRUCTURED["anthropic parse"][1]["output_config"]}}  # fmt: skip
        assert post(server, "/v1/messages", {**body, **both}).status_code == 400


@pytest.mark.parametrize("count", [100, 2048])
def test_embeddings_of_many_texts(start: Any, count: int) -> None:
    texts = [f"text {number}" for number in range(count)]
    body = {"input": texts, "encoding_format": "base64"}
    with start() as server:
        data = post(server, "/v1/embeddings", body).json()["data"]
        assert [item["index"] for item in data] == list(range(count))
        single = post(server, "/v1/embeddings", {**body, "input": texts[-1]}).json()["data"][0]
    assert len(data[-1]["embedding"]) == len(single["embedding"])


def test_text_completions_of_langchain_and_litellm(start: Any) -> None:
    neutral = {"frequency_penalty": 0, "logprobs": None, "n": 1, "presence_penalty": 0,
               "seed": None, "temperature": 0.7, "top_p": 1, "max_tokens": 2}  # fmt: skip
    with start() as server:
        body = {"prompt": ["hello"] * 20, **neutral}
        assert len(post(server, "/v1/completions", body).json()["choices"]) == 20


def test_rankings_of_cohere_jina_and_vllm(start: Any) -> None:
    body = {"query": "a", "documents": ["b", "a"], "top_n": 1, "return_documents": True}
    with start() as server:
        for fields in (
            {"max_chunks_per_doc": None, "rank_fields": ["text"], "return_documents": False},
            {"documents": [{"text": "b"}, {"text": "a"}], "truncation": False},
            {"max_tokens_per_doc": 0, "max_tokens_per_query": 0, "priority": 0, "softmax": True},
        ):
            results = post(server, "/v2/rerank", {**body, **fields}).json()["results"]
            assert [item["index"] for item in results] == [1]
        for name, value in (("max_tokens_per_doc", 4096), ("rank_fields", ["title"]), ("top_k", 1),
                            ("truncation", True)):  # fmt: skip
            refused = post(server, "/v2/rerank", {**body, name: value})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            results = post(server, path, body).json()["results"]
            assert [item["index"] for item in results] == [1]


def test_the_remote_tokenizer_of_lm_eval(start: Any, engine: Any) -> None:
    with start() as server:
        info = httpx.get(f"{server.url}/tokenizer_info", timeout=60).json()
        assert info["eos_token"] == "</s>"
        assert (info["bos_token"], info["pad_token"]) == ("<s>", "<pad>")
        assert "<|im_start|>" in info["chat_template"]
        for text in ("test", info["eos_token"]):
            body = {"prompt": text, "add_special_tokens": False}
            ids = httpx.post(f"{server.url}/tokenize", json=body, timeout=60).json()["tokens"]
            assert ids == engine.tokenizer.encode(text)
        assert ids == [engine.tokenizer.eos_id]
