"""A tiny model with a tokenizer of bytes, an engine over it, and a server in a thread."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tiny_chat_model import write_model

from bmforge.infer import Engine, EngineConfig
from bmforge.serve.app import create_app
from bmforge.serve.auth import ApiKeys, load_keys
from bmforge.serve.lifecycle import GracefulServer, bind_address, make_server
from bmforge.serve.serving import Serving
from bmforge.serve.settings import ServeConfig

CHROMIUM = Path(os.environ.get("BMFORGE_CHROMIUM", "/usr/bin/chromium-headless-shell"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium; where CI runs it must be there."""
    if not CHROMIUM.exists() and os.environ.get("CI") != "true":
        pytest.skip("needs Debian's chromium-headless-shell")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as found:
        browser = found.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def engine(model_directory: Path) -> Iterator[Engine]:
    with Engine(model_directory, config=EngineConfig(max_tokens=1024)) as engine:
        yield engine


class Running:
    """A server that runs in a thread.

    Attributes:
        port: where it listens.
        serving: what it serves with.
    """

    def __init__(self, port: int, server: GracefulServer) -> None:
        self.port, self._server = port, server
        self.serving: Serving = server.serving
        self.url = f"http://127.0.0.1:{port}"

    def keep_open(self) -> None:
        """Go on after a failure of the engine, so that the answers can be read."""
        self._server.stops_at_failure = False

    def connections(self) -> set[Any]:
        """All that are open."""
        return self._server.server_state.connections


Start = Callable[..., Any]


@pytest.fixture
def start(engine: Engine, model_directory: Path) -> Start:
    """Start a server for a `with` block; it has stopped when the block ends."""

    @contextmanager
    def begin(
        keys: str = "",
        send_buffer: int = 0,
        other: Any = None,
        place: Path | None = None,
        embedder: Any = None,
        deltas: Any = None,
        admin: str = "",
        **limits: Any,
    ) -> Iterator[Running]:
        config = ServeConfig(**{"port": 0, "grace_s": 5.0, "log_requests": False, **limits})
        place = place if other else model_directory
        given = load_keys(config, {"BMFORGE_API_KEYS": keys})
        app = create_app(
            other or engine,
            config,
            directory=place,
            keys=given,
            embedder=embedder,
            deltas=deltas,
            admin=ApiKeys([admin]) if admin else None,
        )
        listener = bind_address(config)
        server = make_server(app, listener)
        if send_buffer:  # of the connections too, so that little is enough to fill one
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield Running(listener.getsockname()[1], server)
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()

    return begin
