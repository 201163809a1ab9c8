"""OpenAI's own client against a server with a real engine."""

from __future__ import annotations

import json
import time
from typing import Any

import jsonschema
import openai
import pydantic
import pytest
import torch

from bmforge.infer import Engine, generate

SAID: list[Any] = [{"role": "system", "content": "好"}, {"role": "user", "content": "天气怎么样?"}]
WRITTEN = (
    "<|im_start|>system\n好<|im_end|>\n<|im_start|>user\n天气怎么样?<|im_end|>\n"
    "<|im_start|>assistant\n"
)
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}


def client_of(server: Any, key: str = "none", **more: Any) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60, **more
    )


@pytest.fixture
def client(start: Any) -> Any:
    with start() as server, client_of(server) as client:
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=SAID, **fields)


def reference(engine: Engine, text: str, count: int) -> list[int]:
    """The likeliest tokens by `generate`, the ends of a chat among them."""
    tokenizer = engine.tokenizer
    ids = torch.tensor([tokenizer.encode(text)])
    ends = (tokenizer.eos_id, tokenizer.token_to_id("<|im_end|>"))
    out = generate(engine.model, ids, max_new_tokens=count, eos_token_id=ends)[0].tolist()
    return out[ids.shape[1] :]


def test_a_chat_is_what_generate_writes(client: openai.OpenAI, engine: Engine) -> None:
    """Whole and streamed, with the same usage."""
    new = reference(engine, WRITTEN, 24)
    whole = ask(client, **GREEDY)
    (choice,) = whole.choices
    ends = {engine.tokenizer.eos_id, engine.tokenizer.token_to_id("<|im_end|>")}
    text = engine.tokenizer.decode_written([id for id in new if id not in ends])
    assert choice.message.content == text
    assert choice.finish_reason == ("stop" if new[-1] in ends else "length")
    assert whole.usage.prompt_tokens == len(engine.tokenizer.encode(WRITTEN))
    assert whole.usage.completion_tokens == len(new)
    events = [*ask(client, **GREEDY, stream=True, stream_options={"include_usage": True})]
    assert "".join(e.choices[0].delta.content or "" for e in events if e.choices) == text
    assert events[0].choices[0].delta.role == "assistant"
    assert events[-2].choices[0].finish_reason == choice.finish_reason
    assert events[-1].choices == []
    assert events[-1].usage.completion_tokens == len(new)
    assert len({event.id for event in events}) == 1


def test_several_answers(client: openai.OpenAI) -> None:
    """A seed says which; one answer's stream is that answer's text."""
    drawn: dict[str, Any] = {"n": 3, "seed": 7, "max_tokens": 12, "temperature": 1.3}
    texts = [choice.message.content for choice in ask(client, **drawn).choices]
    assert len(set(texts)) > 1
    streamed = ["", "", ""]
    for event in ask(client, **drawn, stream=True):
        for choice in event.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_probabilities(client: openai.OpenAI, engine: Engine) -> None:
    """Against the model's own scores."""
    new = reference(engine, WRITTEN, 8)
    content = ask(client, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3)
    told = content.choices[0].logprobs.content
    ids = torch.tensor([[*engine.tokenizer.encode(WRITTEN), *new]])
    with torch.no_grad():
        scores = engine.model(ids).logits[0, -len(new) - 1 : -1].float().log_softmax(-1)
    for one, row, id in zip(told, scores, new, strict=True):
        assert one.logprob == pytest.approx(float(row[id]), abs=1e-4)
        best = [top.logprob for top in one.top_logprobs]
        assert best == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
    streamed = ask(client, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3, stream=True)
    parts = [e.choices[0].logprobs for e in streamed if e.choices and e.choices[0].logprobs]
    assert [one for part in parts for one in part.content] == told


def test_stop_and_bias(client: openai.OpenAI, engine: Engine) -> None:
    """An answer ends in front of a stop; a bias of 100 is an answer of one letter."""
    bias = {str(engine.tokenizer.encode("x")[0]): 100}
    (choice,) = ask(client, **GREEDY, logit_bias=bias).choices
    assert choice.message.content == "x" * 24
    (choice,) = ask(client, temperature=0, logit_bias=bias, stop="xxxx").choices
    assert (choice.message.content, choice.finish_reason) == ("", "stop")


def test_completions(client: openai.OpenAI, engine: Engine) -> None:
    """Of texts and of ids, several at once, with their probabilities."""
    prompts = ["天", "once upon"]
    new = [reference(engine, text, 6) for text in prompts]
    ids = [engine.tokenizer.encode(text) for text in prompts]
    eos = engine.tokenizer.eos_id
    texts = [engine.tokenizer.decode_written([i for i in row if i != eos]) for row in new]
    for given in (prompts, ids):
        found = client.completions.create(
            model="tiny", prompt=given, max_tokens=6, temperature=0, logprobs=2
        )
        assert [choice.text for choice in found.choices] == texts
        assert [choice.index for choice in found.choices] == [0, 1]
        assert found.usage.prompt_tokens == sum(map(len, ids))
        assert len(found.choices[1].logprobs.tokens) == len(new[1])
    streamed = ["", ""]
    for event in client.completions.create(
        model="tiny", prompt=prompts, max_tokens=6, temperature=0, stream=True
    ):
        streamed[event.choices[0].index] += event.choices[0].text
    assert streamed == texts


def test_embeddings(client: openai.OpenAI, engine: Engine) -> None:
    """The client asks for base64 by itself, and for numbers where it is told to."""
    texts = ["hello", "天气"]
    want = engine.embed(texts)
    for form in ({}, {"encoding_format": "float"}):
        found = client.embeddings.create(model="tiny", input=texts, **form)
        got = torch.tensor([one.embedding for one in found.data])
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert found.usage.prompt_tokens == sum(len(engine.tokenizer.encode(text)) for text in texts)
    one = client.embeddings.create(model="tiny", input=engine.tokenizer.encode("hello"))
    torch.testing.assert_close(torch.tensor([one.data[0].embedding]), want[:1])


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert client.models.retrieve("tiny").id == "tiny"


class Weather(pydantic.BaseModel):
    """What a model has to say, as a program wants it."""

    city: str = pydantic.Field(max_length=8)
    degrees: int = pydantic.Field(ge=-9, le=99)
    sky: bool


def test_answers_of_a_form(client: openai.OpenAI) -> None:
    """Random weights write what a schema allows."""
    for seed in range(2):
        got = client.chat.completions.parse(
            model="tiny", messages=SAID, response_format=Weather, seed=seed, max_tokens=200
        )
        assert isinstance(got.choices[0].message.parsed, Weather)
    (choice,) = ask(
        client, max_tokens=40, extra_body={"structured_outputs": {"regex": "[a-c]{3}天"}}
    ).choices
    assert choice.message.content[3:] == "天"
    (choice,) = ask(
        client, max_tokens=40, extra_body={"structured_outputs": {"choice": ["天气", "<b>"]}}
    ).choices
    assert choice.message.content in ("天气", "<b>")


def test_calls_that_must_come(client: openai.OpenAI) -> None:
    """Whole and streamed: the arguments are what the function takes."""
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    tools: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
    fields: dict[str, Any] = {"tools": tools, "tool_choice": "required", "max_tokens": 200}
    (choice,) = ask(client, **fields, seed=1).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    jsonschema.validate(json.loads(call.function.arguments), schema)
    events = [*ask(client, **fields, seed=1, stream=True)]
    first, *more = [c for e in events for c in e.choices[0].delta.tool_calls or ()]
    assert first.function.name == "add"
    assert {piece.index for piece in more} == {0}
    arguments = "".join(piece.function.arguments for piece in more)
    assert json.loads(arguments) == json.loads(call.function.arguments)
    said = [*SAID, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    again = client.chat.completions.create(model="tiny", messages=said, tools=tools, **GREEDY)
    assert again.choices[0].finish_reason in ("stop", "length")


ELSEWHERE = {"name": "a", "schema": {"$ref": "http://x/y"}}
REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"extra_body": {"best": 1}}, "best", "is not supported"),
    ({"extra_body": {"functions": []}}, "functions", "must be null"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "has no effect"),
    ({"temperature": 3}, "temperature", "less than or equal to 2"),
    ({"temperature": "1"}, "temperature", "valid number"),
    ({"top_p": -1}, "top_p", "greater than or equal to 0"),
    ({"n": 99}, "n", "at most 8"),
    ({"stop": [""]}, "stop", "empty"),
    ({"stop": ["a"] * 9}, "stop", "at most 8"),
    ({"max_tokens": 100_000}, "max_tokens", "at most"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, None, "cannot be used together"),
    ({"logit_bias": {"5000": 1}}, "logit_bias", "not a token id"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "not a token id"),
    ({"top_logprobs": 2}, None, "no effect without logprobs"),
    ({"logprobs": True, "top_logprobs": 99}, "top_logprobs", "at most 20"),
    ({"tool_choice": "required"}, None, "no effect without tools"),
    ({"stream_options": {"include_usage": True}}, None, "no effect without stream"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": ELSEWHERE}},
        "response_format",
        "refers to another document",
    ),
    ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs", "not supported"),
    ({"extra_body": {"structured_outputs": {}}}, "structured_outputs", "no constraint"),
]  # fmt: skip


def test_what_is_refused(client: openai.OpenAI) -> None:
    for fields, param, problem in REFUSED:
        with pytest.raises(openai.BadRequestError, match=problem) as caught:
            ask(client, **fields)
        assert caught.value.param == param, fields
        assert caught.value.type == "invalid_request_error"


def test_messages_that_are_refused(client: openai.OpenAI) -> None:
    for said, problem in (
        ([], "at least 1 item"),
        ([{"role": "user"}], "content is required"),
        ([{"role": "boss", "content": "a"}], "messages"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "text"),
        ([{"role": "tool", "content": "a"}], "tool_call_id"),
        ([{"role": "user", "content": "a" * 2000}], "accepts at most 1023"),
    ):
        with pytest.raises(openai.BadRequestError, match=problem):
            client.chat.completions.create(model="tiny", messages=said)  # type: ignore[arg-type]
    with pytest.raises(openai.NotFoundError, match="unknown model 'other'"):
        client.chat.completions.create(model="other", messages=SAID)
    with pytest.raises(openai.BadRequestError, match="does not support documents"):
        client.post("/documents", body={"model": "tiny", "documents": [{}]}, cast_to=object)


def test_keys_and_their_errors(start: Any) -> None:
    key = "the-key-of-this-test"
    with start(keys=key, max_rate_per_min=3) as server:
        for wrong in ("nothing", key[:-1]):
            with client_of(server, wrong) as client, pytest.raises(openai.AuthenticationError):
                ask(client, **GREEDY)
        with client_of(server, key) as client:
            assert ask(client, **GREEDY).choices
            ask(client, **GREEDY)
            ask(client, **GREEDY)
            with pytest.raises(openai.RateLimitError) as caught:
                ask(client, **GREEDY)
            assert int(caught.value.response.headers["retry-after"]) >= 1


def test_other_hosts_and_large_bodies(start: Any) -> None:
    with start(max_body_bytes=1000) as server:
        headers = {"Host": "evil.example"}
        with client_of(server, default_headers=headers) as client:  # noqa: SIM117
            with pytest.raises(openai.PermissionDeniedError, match="host names of its own"):
                client.models.list()
        with client_of(server) as client, pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(model="tiny", prompt="a" * 2000)
        assert caught.value.status_code == 413


def test_a_server_that_stops_takes_nothing(start: Any) -> None:
    with start() as server, client_of(server) as client:
        server.serving.admission.is_closing = True
        with pytest.raises(openai.InternalServerError, match="stopping") as caught:
            ask(client, **GREEDY)
        assert caught.value.status_code == 503


def test_an_answer_that_takes_too_long_ends(start: Any) -> None:
    """At its deadline it is what was written until then."""
    with start(request_s=1.0) as server, client_of(server) as client:
        begin = time.monotonic()
        bias = {"5": 100}  # it would never end
        (choice,) = client.completions.create(
            model="tiny", prompt=["a"], max_tokens=1000, logit_bias=bias, temperature=0
        ).choices
        assert choice.finish_reason == "length"
        assert time.monotonic() - begin < 30
