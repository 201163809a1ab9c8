"""`serve`: listening, until the process is told to stop, and ending what runs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from bmforge.errors import ConfigError
from bmforge.infer import Engine
from bmforge.logging import get_logger
from bmforge.serve.app import create_app
from bmforge.serve.auth import load_keys
from bmforge.serve.receive import MAX_HEAD_BYTES, DeadlineProtocol
from bmforge.serve.serving import Serving
from bmforge.serve.settings import ServeConfig, is_loopback
from bmforge.serve.sleeping import AnyEngine

__all__ = ["GracefulServer", "bind_address", "make_server", "serve"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# After running requests were cut short their answers still have to be sent.
_LAST_WORDS_S = 5


class GracefulServer(uvicorn.Server):
    """Stops when it is told to: takes nothing new, gives what runs its time, then ends it.

    Args:
        config: of uvicorn.
        serving: what it serves.
    """

    def __init__(self, config: uvicorn.Config, serving: Serving) -> None:
        super().__init__(config)
        self.serving = serving

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running requests end, those that take longer with what they have written."""
        serving = self.serving
        serving.admission.is_closing = True
        if serving.live:
            get_logger().info("%d requests have %g s to end", len(serving.live), _grace(serving))
        loop = asyncio.get_running_loop()
        cut = loop.call_later(_grace(serving), serving.live.cancel_all)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at the first signal, and at the second one without waiting."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note a signal."""
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True


def _grace(serving: Serving) -> float:
    return serving.config.grace_s


def serve(
    engine: AnyEngine,
    config: ServeConfig | None = None,
    directory: Path | None = None,
    embedder: Engine | None = None,
    listener: socket.socket | None = None,
    deltas: Mapping[str, str] | None = None,
) -> None:
    """Serve an engine until the process is told to stop (SIGINT, SIGTERM).

    Args:
        engine: stays the caller's, who closes it.
        config: where to listen, and the limits.
        directory: of the model, for its name and its chat template.
        embedder: of a second model, that embeds.
        listener: of `bind_address`; None calls it.
        deltas: as of `create_app`.

    Raises:
        ConfigError: the address is taken or is not ours, or others could ask without a key.
    """
    config = config or ServeConfig()
    keys = load_keys(config, os.environ)
    app = create_app(
        engine, config, directory=directory, keys=keys, embedder=embedder, deltas=deltas
    )
    with listener or bind_address(config) as bound:
        make_server(app, bound).run([bound])
    get_logger().info("stopped")


def make_server(app: FastAPI, listener: socket.socket) -> GracefulServer:
    """Return a server, and say where it will listen.

    Args:
        app: of `create_app`.
        listener: the socket that it is to be run with.
    """
    serving: Serving = app.state.serving
    config = serving.config
    server = GracefulServer(_configure(app, config), serving)
    listener.listen(config.max_connections)  # whoever has read the address is not refused
    address, port = listener.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    get_logger().info("serving %s at http://%s:%d/", serving.name, shown, port)
    if not serving.keys and not is_loopback(config.host):
        get_logger().warning("everybody who reaches %s may ask: there is no key", shown)
    return server


def _configure(app: Any, config: ServeConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=partial(DeadlineProtocol, config),  # type: ignore[arg-type]
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        log_level="critical",  # what goes wrong is logged by the gate, without people's words
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=config.idle_s,  # type: ignore[arg-type]
        timeout_graceful_shutdown=config.grace_s + _LAST_WORDS_S,  # type: ignore[arg-type]
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        backlog=config.max_connections,
    )


def bind_address(config: ServeConfig) -> socket.socket:
    """Return a socket at the address where a server will listen.

    Raises:
        ConfigError: the address is taken, or is not this machine's.
    """
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        made = socket.socket(family)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
        except OSError:
            made.close()
            raise
        return made
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port={config.port} of {config.host} is in use: another server runs there. Stop "
                "it, or give another port; port=0 takes a free one."
            ) from error
        raise ConfigError(
            f"host={config.host!r}, port={config.port} cannot be listened at ({error}). Name an "
            "address of this machine, such as 127.0.0.1, and a port above 1023."
        ) from error
