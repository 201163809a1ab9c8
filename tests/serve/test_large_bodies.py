"""Large bodies are validated in a thread, with the same answers as small ones."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import anyio
import httpx
import pytest
from fastapi import APIRouter, FastAPI
from pydantic import model_validator
from starlette.testclient import TestClient

from bmforge.serve import chat_requests
from bmforge.serve.body_budget import BodyBudget
from bmforge.serve.http_json import StrictRoute
from bmforge.serve.message_types import Strict
from bmforge.serve.settings import ServeConfig

PADDING = "a" * (1 << 17)
VALIDATED_IN: list[int] = []


class Text(Strict):
    """Part of a body that records the thread of its validation."""

    text: str

    @model_validator(mode="after")
    def _record(self) -> Text:
        VALIDATED_IN.append(threading.get_ident())
        return self


class Texts(Strict):
    """Body of a request."""

    texts: list[Text]


async def count(body: Texts) -> dict[str, int]:
    return {"count": len(body.texts), "loop": threading.get_ident()}


@pytest.fixture
def client() -> Iterator[TestClient]:
    config, app, router = ServeConfig(), FastAPI(), APIRouter(route_class=StrictRoute)
    router.post("/count")(count)
    app.include_router(router)
    bodies, run = BodyBudget(config.body.max_body_bytes), anyio.to_thread.run_sync
    app.state.serving = SimpleNamespace(config=config, bodies=bodies, parse=run)
    VALIDATED_IN.clear()
    with TestClient(app) as client:
        yield client


@pytest.mark.parametrize(("text", "is_large"), [("a", False), (PADDING, True)])
def test_large_bodies_are_validated_once_and_off_the_event_loop(
    client: TestClient, text: str, is_large: bool
) -> None:
    answer = client.post("/count", json={"texts": [{"text": text}]}).json()
    assert answer["count"] == 1
    assert len(VALIDATED_IN) == 1
    assert (VALIDATED_IN[0] != answer["loop"]) == is_large


def test_answers_do_not_wait_for_acknowledgements(start: Any) -> None:
    with start() as server, httpx.Client() as http:
        http.get(f"{server.url}/health").raise_for_status()
        (connection,) = server.connections()
        own = connection.transport.get_extra_info("socket")
        assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {"messages": [{"role": "user"}]}),
    ("chat/completions", {"messages": [{"role": "nobody", "content": "a"}]}),
    ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "nothing": 1}),
    ("chat/completions", {"messages": "a"}),
    ("messages", {"messages": [{"role": "user", "content": 1}], "max_tokens": 1}),
    ("responses", {"input": [{"role": "user", "content": 1}]}),
    ("completions", {"prompt": "a", "temperature": "hot"}),
]


def test_faults_have_the_same_errors_in_large_bodies(start: Any) -> None:
    with start() as server, httpx.Client(timeout=60) as http:
        for path, fields in FAULTS:
            send = partial(http.post, f"{server.url}/v1/{path}")
            small, large = (
                send(json={"model": "tiny", "user": user, **fields}) for user in ("a", PADDING)
            )
            assert small.status_code == large.status_code == 400, (path, small.text)
            assert small.json() == large.json()


@pytest.mark.parametrize(("count", "is_long"), [(3, False), (400, True)])
def test_long_conversations_are_checked_off_the_event_loop(
    start: Any, monkeypatch: pytest.MonkeyPatch, count: int, is_long: bool
) -> None:
    real, threads = chat_requests._check_all, []

    def check(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return real(*arguments)

    monkeypatch.setattr(chat_requests, "_check_all", check)
    turns = [{"role": "user", "content": "a"}] * count
    with start() as server:
        body = {"model": "tiny", "messages": turns, "max_tokens": 1}
        httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert [name.startswith("AnyIO") for name in threads] == [is_long]
