"""A second model that embeds, and a model whose memory is given back while nobody asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from conftest import write_model

from bmforge.errors import ConfigError
from bmforge.infer import Engine, EngineConfig
from bmforge.serve.app import create_app
from bmforge.serve.settings import ServeConfig
from bmforge.serve.sleeping import SleepingEngine

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
            with pytest.raises(openai.BadRequestError, match="not for chat"):
                client.chat.completions.create(model="small", messages=SAID)
    with pytest.raises(ConfigError, match="no effect without a second model"):
        create_app(engine, ServeConfig(embedding_name="small"))


def test_an_idle_engine_sleeps_and_wakes(start: Any, model_directory: Path) -> None:
    """By a clock of ours; answers are the same before and after, and nobody is cut off."""
    now, opened = [0.0], []

    def open_engine() -> Engine:
        opened.append(Engine(model_directory, config=EngineConfig(max_tokens=256)))
        return opened[-1]

    sleeper = SleepingEngine(open_engine, model_directory, 60, lambda: now[0])
    with sleeper, start(other=sleeper, name="tiny") as server, client_of(server) as client:

        def ask() -> str:
            found = client.completions.create(model="tiny", prompt="天", temperature=0)
            return found.choices[0].text

        first = ask()
        now[0] = 59
        assert not sleeper.doze()
        now[0] = 61
        assert sleeper.doze()
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
        assert not sleeper.doze()
        with sleeper._lock:
            sleeper._users -= 1
        assert not sleeper.doze()
        now[0] = 1061
        assert sleeper.doze()


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
        engine.close()
        with pytest.raises(openai.APIError, match="cannot go on"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="closed, or has failed"):
            client.completions.create(model="tiny", prompt="a")
        with pytest.raises(openai.InternalServerError):
            client.get("/../ready", cast_to=httpx.Response)
