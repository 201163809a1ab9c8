"""The clients themselves, where they are installed: their default calls against a server.

Each client runs with its own package; without it, its test is skipped. The forms that they send
are in `test_client_forms.py`, which needs none of them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

pytestmark = pytest.mark.long
TEXTS = [f"text {number}" for number in range(2048)]
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}},
          "required": ["city"], "additionalProperties": False}  # fmt: skip


class City(BaseModel):
    """A city."""

    # With other fields allowed, the random model may add some until its answer is cut off.
    model_config = ConfigDict(extra="forbid")

    large: bool
    capital: bool


@pytest.fixture
def server(start: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    settings = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "LANGSMITH_TRACING": "false", "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none",
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with start(name="tiny") as running:
        yield running


def test_anthropic(server: Any) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    said: dict[str, Any] = {
        "model": "tiny", "max_tokens": 40, "messages": [{"role": "user", "content": "hello"}]
    }  # fmt: skip
    tool = {"name": "weather", "description": "w", "input_schema": SCHEMA}
    assert client.messages.create(**said).usage.output_tokens <= 40
    with client.messages.stream(**said) as stream:
        assert "".join(stream.text_stream) == stream.get_final_message().content[0].text
    choice = {"type": "tool", "name": "weather"}
    said["max_tokens"] = 400  # a call or an object that is cut off is no JSON
    (call,) = client.messages.create(**said, tools=[tool], tool_choice=choice).content
    assert call.input["city"] in ("Paris", "Rome")
    assert isinstance(client.messages.parse(**said, output_format=City).parsed_output, City)
    del said["max_tokens"]
    assert client.messages.count_tokens(**said).input_tokens > 5
    assert [model.id for model in client.models.list()] == ["tiny"]
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**said, "model": "other"}, max_tokens=4)


def test_langchain(server: Any) -> None:
    package = pytest.importorskip("langchain_openai")
    options: dict[str, Any] = {"model": "tiny", "base_url": f"{server.url}/v1", "api_key": "none",
                               "max_retries": 0}  # fmt: skip
    chat = package.ChatOpenAI(**options, max_tokens=20)
    assert chat.invoke("hello").usage_metadata["output_tokens"] <= 20
    assert "".join(piece.content for piece in chat.stream("hello"))
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    chat = package.ChatOpenAI(**options, max_tokens=400)  # JSON that is cut off is no JSON
    calls = chat.bind_tools([tool], tool_choice="any").invoke("hello").tool_calls
    assert calls[0]["args"]["city"] in ("Paris", "Rome")
    for method in ("json_schema", "function_calling"):
        form = chat.with_structured_output(City, method=method)
        assert isinstance(form.invoke("hello"), City)
    responses = package.ChatOpenAI(**options, use_responses_api=True, max_tokens=20)
    assert responses.invoke("hello").content
    for count in (100, 2048):
        embedder = package.OpenAIEmbeddings(
            **options, check_embedding_ctx_length=False, chunk_size=2048
        )
        assert len(embedder.embed_documents(TEXTS[:count])) == count


def test_llama_index(server: Any) -> None:
    models = pytest.importorskip("llama_index.llms.openai_like")
    embeddings = pytest.importorskip("llama_index.embeddings.openai_like")
    llms = pytest.importorskip("llama_index.core.llms")
    options: dict[str, Any] = {"api_base": f"{server.url}/v1", "api_key": "none"}
    model = models.OpenAILike(
        model="tiny", **options, is_chat_model=True, is_function_calling_model=True,
        context_window=1024, max_tokens=20, max_retries=0,
    )  # fmt: skip
    messages = [llms.ChatMessage(role="user", content="hello")]
    assert model.chat(messages).message.content
    assert "".join(piece.delta or "" for piece in model.stream_chat(messages))
    for count in (100, 2048):
        embedder = embeddings.OpenAILikeEmbedding(
            model_name="tiny", **options, embed_batch_size=count
        )
        assert len(embedder.get_text_embedding_batch(TEXTS[:count])) == count


def test_litellm(server: Any) -> None:
    litellm = pytest.importorskip("litellm")
    options: dict[str, Any] = {"api_base": f"{server.url}/v1", "api_key": "none", "num_retries": 0}
    said: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20}
    for provider in ("openai", "hosted_vllm"):
        answer = litellm.completion(model=f"{provider}/tiny", **said, **options)
        assert answer.usage.completion_tokens <= 20
        stream = litellm.completion(model=f"{provider}/tiny", stream=True, **said, **options)
        assert "".join(piece.choices[0].delta.content or "" for piece in stream)
        for count in (100, 2048):
            answer = litellm.embedding(model=f"{provider}/tiny", input=TEXTS[:count], **options)
            assert len(answer.data) == count
    said["max_tokens"] = 400  # an object that is cut off is no JSON
    form = litellm.completion(model="openai/tiny", response_format=City, **said, **options)
    City.model_validate_json(form.choices[0].message.content)
    ranked = litellm.rerank(
        model="cohere/tiny", query="a", documents=["b", "a"], top_n=1, api_base=server.url,
        api_key="none",
    )  # fmt: skip
    assert ranked.results[0]["index"] == 1


def test_agents(server: Any) -> None:
    agents = pytest.importorskip("agents")
    import openai

    async def ask(kind: Any, **options: Any) -> Any:
        client = openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60
        )
        model = kind(model="tiny", openai_client=client)
        settings = agents.ModelSettings(max_tokens=40)
        agent = agents.Agent(name="A", model=model, model_settings=settings, **options)
        return (await agents.Runner.run(agent, "hello")).final_output

    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        assert isinstance(asyncio.run(ask(kind, output_type=City)), City)
    assert isinstance(asyncio.run(ask(agents.OpenAIChatCompletionsModel)), str)


@pytest.mark.parametrize("backend", ["huggingface", "remote"])
def test_lm_eval(server: Any, engine: Any, model_directory: Any, backend: str) -> None:
    """Scores through the server are those of the native interface."""
    models = pytest.importorskip("lm_eval.models.openai_completions")
    instance = pytest.importorskip("lm_eval.api.instance")
    pairs = [("a b", " c"), ("hello wor", "ld"), ("天", "气")]
    model = models.LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions", model="tiny", tokenizer=str(model_directory),
        tokenizer_backend=backend, num_concurrent=1, max_retries=1, max_length=512,
    )  # fmt: skip
    requests = [instance.Instance("loglikelihood", {}, pair, n) for n, pair in enumerate(pairs)]
    scores = [score for score, _ in model.loglikelihood(requests)]
    # `score` returns the mean loss per token, and a token is a byte here.
    losses = engine.score(pairs)
    native = [-loss * len(text.encode()) for loss, (_, text) in zip(losses, pairs, strict=True)]
    assert all(math.isclose(a, b, abs_tol=1e-3) for a, b in zip(scores, native, strict=True)), (
        scores,
        native,
    )
