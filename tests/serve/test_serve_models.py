"""A second model that embeds, and a model whose memory is given back while nobody asks."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from tiny_chat_model import write_model

from bmforge.errors import ConfigError
from bmforge.infer import Engine, EngineConfig
from bmforge.provenance import Provenance, ProvenanceSource, write_provenance
from bmforge.serve import app
from bmforge.serve.app import create_app
from bmforge.serve.idle_unloading import IdleUnloadingEngine
from bmforge.serve.settings import ServeConfig

SAID: list[Any] = [{"role": "user", "content": "天气"}]


def client_of(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=60)


def test_a_second_model_embeds(start: Any, engine: Engine, tmp_path: Path) -> None:
    place = write_model(tmp_path / "second", num_layers=1)
    with Engine(place, config=EngineConfig(max_tokens=64)) as second:  # noqa: SIM117
        with start(embedder=second, embedding_name="small") as server, client_of(server) as client:
            assert [model.id for model in client.models.list().data] == ["tiny", "small"]
            for name, model in (("tiny", engine), ("small", second)):
                (found,) = client.embeddings.create(model=name, input="天气").data
                torch.testing.assert_close(torch.tensor([found.embedding]), model.embed("天气"))
            with pytest.raises(openai.BadRequestError, match="does not support chat"):
                client.chat.completions.create(model="small", messages=SAID)
    with pytest.raises(ConfigError, match="no effect without an embedding model"):
        create_app(engine, ServeConfig(embedding_name="small"))


def test_a_model_says_its_license(start: Any, engine: Engine, tmp_path: Path) -> None:
    """And what it was made of; one that says nothing is of unknown license."""
    place = write_model(tmp_path / "second", num_layers=1)
    known = Provenance("Apache-2.0", (ProvenanceSource("data", "poems", "CC-BY-SA-4.0"),))
    write_provenance(place, known)
    with Engine(place, config=EngineConfig(max_tokens=64)) as second:  # noqa: SIM117
        with start(embedder=second, embedding_name="small") as server:
            mine, other = httpx.get(f"{server.url}/v1/models").json()["data"]
            page = httpx.get(f"{server.url}/page/state").json()
    assert (mine["license"], mine["made_of"], page["license"]) == ("unknown", [], "unknown")
    assert other["license"] == "Apache-2.0"
    assert other["made_of"] == [{"kind": "data", "name": "poems", "license": "CC-BY-SA-4.0"}]


def test_an_idle_engine_sleeps_and_wakes(start: Any, model_directory: Path) -> None:
    """By a clock of ours; answers are the same before and after, and nobody is cut off."""
    now, opened = [0.0], []

    def open_engine() -> Engine:
        opened.append(Engine(model_directory, config=EngineConfig(max_tokens=256)))
        return opened[-1]

    sleeper = IdleUnloadingEngine(open_engine, model_directory, 60, lambda: now[0])
    with sleeper, start(other=sleeper, name="tiny") as server, client_of(server) as client:

        def ask() -> str:
            found = client.completions.create(model="tiny", prompt="天", temperature=0)
            return found.choices[0].text

        first = ask()
        now[0] = 59
        assert not sleeper.unload_if_idle()
        now[0] = 61
        assert sleeper.unload_if_idle()
        assert not sleeper.is_open
        with pytest.raises(ConfigError, match="closed"):
            opened[0].generate("a")
        assert client.models.list().data[0].id == "tiny"
        assert not sleeper.is_open  # which that needs no weights for
        with pytest.raises(openai.BadRequestError, match="empty"):
            client.completions.create(model="tiny", prompt="")
        assert ask() == first
        assert sleeper.is_open
        assert len(opened) == 2
        with sleeper._lock:
            sleeper._users += 1
        now[0] = 1000
        assert not sleeper.unload_if_idle()
        with sleeper._lock:
            sleeper._users -= 1
        assert not sleeper.unload_if_idle()
        now[0] = 1061
        assert sleeper.unload_if_idle()


def test_a_model_that_opens_holds_up_nobody_else(start: Any, model_directory: Path) -> None:
    """While it opens the page waits for its figures, and the server answers others."""
    may_open, opening, asked = threading.Event(), threading.Event(), threading.Event()
    now = [0.0]

    def open_engine() -> Engine:
        if now[0]:
            opening.set()
            assert may_open.wait(60)
        return Engine(model_directory, config=EngineConfig(max_tokens=256))

    class Noting(IdleUnloadingEngine):
        def requests_status(self) -> Any:
            asked.set()
            return super().requests_status()

    sleeper = Noting(open_engine, model_directory, 60, lambda: now[0])
    with sleeper, start(other=sleeper, name="tiny") as server, ThreadPoolExecutor(2) as pool:
        now[0] = 100
        assert sleeper.unload_if_idle()
        try:
            said = {"model": "tiny", "prompt": "a", "max_tokens": 2}
            answer = pool.submit(httpx.post, f"{server.url}/v1/completions", json=said, timeout=60)
            assert opening.wait(60)
            asked.clear()
            page = pool.submit(httpx.get, f"{server.url}/page/state", timeout=60)
            assert asked.wait(60)
            assert httpx.get(f"{server.url}/health", timeout=5).status_code == 200
        finally:
            may_open.set()
        assert answer.result(60).status_code == page.result(60).status_code == 200


def test_one_model_at_a_time_is_in_memory(model_directory: Path) -> None:
    """Whoever asks while the engine is being closed waits until it is."""
    now, held = [0.0], []

    def open_engine() -> Engine:
        return Engine(model_directory, config=EngineConfig(max_tokens=64))

    with IdleUnloadingEngine(open_engine, model_directory, 60, lambda: now[0]) as sleeper:
        engine = sleeper._engine
        assert engine is not None
        close = engine.close

        def note() -> None:
            held.append(not sleeper._lock.acquire(blocking=False))
            close()

        engine.close = note  # type: ignore[method-assign]
        now[0] = 100
        assert sleeper.unload_if_idle()
        assert held == [True]
        assert sleeper.call(lambda: 3) == 3


def test_an_engine_that_did_not_sleep_may_sleep_later(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    class Troubled(IdleUnloadingEngine):
        def __init__(self) -> None:
            pass

        def unload_if_idle(self) -> bool:
            looks.append(1)
            if len(looks) == 1:
                raise OSError("a file could not be closed")
            return True

    async def look() -> None:
        task = asyncio.create_task(app._let_sleep(Troubled()))
        while len(looks) < 3 and not task.done():
            await asyncio.sleep(0)
        task.cancel()

    monkeypatch.setattr(app, "_LOOK_S", 0)
    asyncio.run(asyncio.wait_for(look(), 60))
    assert len(looks) >= 3


def test_an_engine_that_was_closed_is_said(start: Any, model_directory: Path) -> None:
    """Whoever waits gets an error, and the server is not ready any more."""
    engine = Engine(model_directory, config=EngineConfig(max_tokens=1024))
    with start(other=engine, name="tiny") as server, client_of(server) as client:
        assert client.get("/../ready", cast_to=httpx.Response).status_code == 200
        bias: dict[str, Any] = {"logit_bias": {"70": 100}, "temperature": 0}
        stream = client.completions.create(
            model="tiny", prompt="a", max_tokens=900, stream=True, **bias
        )
        next(iter(stream))
        server.keep_open()
        engine.close()
        with pytest.raises(openai.APIError, match="has failed"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="closed or has failed"):
            client.completions.create(model="tiny", prompt="a")
        with pytest.raises(openai.InternalServerError):
            client.get("/../ready", cast_to=httpx.Response)
