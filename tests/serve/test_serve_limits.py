"""Limits that hold for embeddings and documents as for what is written, and are each client's."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from bmforge.infer import Engine, EngineConfig
from bmforge.models.cpm_bee import CPMBee, CPMBeeConfig
from bmforge.testing.character_tokenizer import BEE_MARKS
from bmforge.tokenizers import CPMBeeTokenizer


def ask(server: Any, path: str, client: Any = httpx, **fields: Any) -> Any:
    body = {"model": server.serving.name, **fields}
    return client.post(f"{server.url}/v1/{path}", json=body, timeout=60)


def held(engine: Engine) -> tuple[threading.Event, threading.Thread]:
    """Keep an engine's thread until the event is set."""
    goes_on, begun = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        goes_on.wait(60)

    thread = threading.Thread(target=engine.call, args=(hold,))
    thread.start()
    assert begun.wait(60)
    return goes_on, thread


def test_texts_that_are_too_long(start: Any) -> None:
    with start(max_prompt_tokens=8) as server:
        assert ask(server, "embeddings", input="12345678").status_code == 200
        for given in ("123456789", ["1", "123456789"], [5] * 9):
            found = ask(server, "embeddings", input=given)
            assert found.status_code == 400
            assert found.json()["error"]["code"] == "context_length_exceeded"
    with start() as server:  # what the engine was planned for
        found = ask(server, "embeddings", input="1" * 1025)
        assert found.json()["error"]["code"] == "context_length_exceeded"
        found = ask(server, "embeddings", input=[1 << 20])
        assert found.status_code == 400
        assert "vocab_size" in found.json()["error"]["message"]
        for id in (1 << 31, 10**19 - 1):  # more than fits a tensor
            assert ask(server, "embeddings", input=[id]).status_code == 400
            assert ask(server, "completions", prompt=[id]).status_code == 400


def test_texts_count_by_batches(start: Any) -> None:
    with start(max_requests=8, max_requests_per_key=4, max_prompts=2) as server:
        assert ask(server, "embeddings", input=["a"] * 8).status_code == 200
        assert ask(server, "embeddings", input=["a"] * 9).status_code == 429
        assert server.serving.admission.count == 0


def test_an_embedding_that_takes_too_long(start: Any, engine: Engine) -> None:
    with start(request_s=0.2) as server:
        goes_on, thread = held(engine)
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(ask, server, "embeddings", input=["a"] * 3)
            while not len(server.serving.live):
                pass
            threading.Event().wait(0.3)  # the deadline is a time
            goes_on.set()
            found = asked.result(60)
        thread.join()
        assert found.status_code == 503
        assert "not finished within 0.2 s" in found.json()["error"]["message"]
        assert found.headers["retry-after"]
        assert ask(server, "embeddings", input="a").status_code == 200


def test_a_client_that_goes_is_not_embedded_for(start: Any, engine: Engine) -> None:
    with start() as server:
        goes_on, thread = held(engine)
        with httpx.Client() as client, pytest.raises(httpx.ReadTimeout):
            client.post(
                f"{server.url}/v1/embeddings",
                json={"model": server.serving.name, "input": ["a"] * 60},
                timeout=0.5,
            )
        while server.serving.admission.count:
            pass
        assert not len(server.serving.live)
        goes_on.set()
        thread.join()
        assert ask(server, "embeddings", input="a").status_code == 200


@pytest.fixture(scope="module")
def bee() -> Any:
    """A CPM-Bee over letters."""
    tokenizer = CPMBeeTokenizer([*BEE_MARKS, *"abcdefgh"])
    config = CPMBeeConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_layers=1,
        num_heads=2, head_dim=16, num_buckets=16, num_relations=64, max_seq_len=64,
    )  # fmt: skip
    model = CPMBee.from_config(config, seed=1).eval()
    with Engine(model, tokenizer=tokenizer, config=EngineConfig(max_tokens=64)) as engine:
        yield engine


def test_documents_keep_to_the_limits(start: Any, bee: Engine) -> None:
    document = {"input": "abc", "<ans>": ""}
    want = bee.fill_documents([document], max_new_tokens=5)
    with start(other=bee, name="bee", max_new_tokens=5, max_requests_per_key=3) as server:
        found = ask(server, "documents", documents=[document])
        assert found.status_code == 200
        assert found.json()["data"] == want
        assert "at most 5" in ask(server, "documents", documents=[document], max_tokens=6).text
        long = {"input": "abc" * 50, "<ans>": ""}
        assert ask(server, "documents", documents=[long]).status_code == 400
        assert ask(server, "documents", documents=[document] * 4).status_code == 429
    with start(other=bee, name="bee", request_s=0.2) as server:
        goes_on, thread = held(bee)
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(ask, server, "documents", documents=[document])
            threading.Event().wait(0.3)
            goes_on.set()
            assert asked.result(60).status_code == 503
        thread.join()


def test_without_keys_each_address_is_a_client(start: Any, engine: Engine) -> None:
    with start(max_requests_per_key=2, max_prompts=1) as server:
        goes_on, thread = held(engine)
        with ThreadPoolExecutor() as pool:
            first = pool.submit(ask, server, "embeddings", input=["a", "b"])
            while server.serving.admission.count < 2:
                pass
            assert ask(server, "embeddings", input="a").status_code == 429
            other = httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.2"))
            second = pool.submit(ask, server, "embeddings", other, input=["a", "b"])
            while server.serving.admission.count < 4:
                assert not second.done(), second.result().text
            goes_on.set()
            assert first.result(60).status_code == second.result(60).status_code == 200
        thread.join()
        other.close()
