"""Runs the server until the process is stopped, with a graceful shutdown (`serve`)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from bmforge.errors import BmforgeError, ConfigError
from bmforge.infer import Engine
from bmforge.infer.engine.runtime_adapters import load_adapter_
from bmforge.logging import get_logger
from bmforge.serve.adapter_registry import LoadAdapter
from bmforge.serve.app import create_app
from bmforge.serve.auth import load_admin_key, load_keys
from bmforge.serve.connection import DeadlineProtocol
from bmforge.serve.idle_unloading import AnyEngine
from bmforge.serve.pauses import short_pauses
from bmforge.serve.serving import Serving
from bmforge.serve.settings import MAX_HEAD_BYTES, ServeConfig, is_loopback

__all__ = ["GracefulServer", "bind_address", "make_server", "serve"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Time in seconds to send the answers of cancelled requests.
_LAST_WORDS_S = 5


class GracefulServer(uvicorn.Server):
    """Server with graceful shutdown.

    It rejects new requests, waits for running ones, and cancels those that take too long.

    Args:
        config: configuration of uvicorn.
        serving: server state.

    Attributes:
        stops_at_failure: True if the server stops when its engine has failed.
    """

    def __init__(self, config: uvicorn.Config, serving: Serving) -> None:
        super().__init__(config)
        self.serving, self.stops_at_failure = serving, True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for running requests; cancel those that exceed the grace period."""
        serving = self.serving
        serving.admission.is_closing = True
        if serving.live:
            get_logger().info(
                "waiting for %d requests to finish, for at most %g s",
                len(serving.live),
                _grace(serving),
            )
        loop = asyncio.get_running_loop()
        cut = loop.call_later(_grace(serving), serving.live.cancel_all)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()

    async def on_tick(self, counter: int) -> bool:
        """Return True if the server must stop, for example after a failure of its engine."""
        failure = self.serving.failure
        if failure is not None and self.stops_at_failure and not self.should_exit:
            get_logger().error("the engine has failed (%r), so the server stops", failure)
            self.should_exit = True
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop gracefully on the first signal, and immediately on the second."""
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
        """Record a received signal."""
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True


def _grace(serving: Serving) -> float:
    return serving.config.timeouts.grace_s


def serve(
    engine: AnyEngine,
    config: ServeConfig | None = None,
    directory: Path | None = None,
    embedder: Engine | None = None,
    listener: socket.socket | None = None,
    deltas: Mapping[str, str] | None = None,
    load_adapter: LoadAdapter = load_adapter_,
) -> None:
    """Serve an engine until the process is stopped (SIGINT, SIGTERM).

    Args:
        engine: engine, which the caller closes.
        config: address and limits.
        directory: directory of the model, for its name and chat template.
        embedder: engine of a second model for embeddings.
        listener: result of `bind_address`; if None, a socket is created.
        deltas: adapters, see `create_app`.
        load_adapter: function that loads an adapter at run time.

    Raises:
        ConfigError: the address is in use or belongs to another machine, or a key is required.
        EngineFailedError: the engine has failed, and the server has stopped.
    """
    config = config or ServeConfig()
    keys, admin = load_keys(config, os.environ), load_admin_key(config, os.environ)
    app = create_app(
        engine,
        config,
        directory=directory,
        keys=keys,
        embedder=embedder,
        deltas=deltas,
        admin=admin,
        load_adapter=load_adapter,
    )
    with listener or bind_address(config) as bound:
        try:
            with short_pauses():
                make_server(app, bound).run([bound])
        finally:
            if config.uds is not None:
                config.uds.unlink(missing_ok=True)
    failure = app.state.serving.failure
    if failure is not None:
        raise EngineFailedError(
            f"the engine has failed ({failure!r}), and the server has stopped. Start it again."
        ) from failure
    get_logger().info("stopped")


class EngineFailedError(BmforgeError, RuntimeError):
    """Raised if the engine's thread ended with an error while serving."""


def check_certificate(config: ServeConfig) -> None:
    """Check the TLS certificate and its key, before the model is loaded.

    Raises:
        ConfigError: a file cannot be read, or the key does not belong to the certificate.
    """
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            config.ssl_certfile, config.ssl_keyfile
        )
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"ssl_certfile={str(config.ssl_certfile)!r}, ssl_keyfile={str(config.ssl_keyfile)!r} "
            f"cannot be used ({error}). Use a certificate chain and its key in PEM format."
        ) from error


def make_server(app: FastAPI, listener: socket.socket) -> GracefulServer:
    """Create a server for an application, and log its address.

    Args:
        app: result of `create_app`.
        listener: socket on which the server accepts connections.
    """
    serving: Serving = app.state.serving
    config = serving.config
    server = GracefulServer(_configure(app, config), serving)
    listener.listen(config.load.max_connections)  # listen before the address is announced
    if config.uds is not None:
        get_logger().info("serving %s at the Unix socket %s", serving.name, config.uds)
        return server
    address, port = listener.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    scheme = "http" if config.ssl_certfile is None else "https"
    get_logger().info("serving %s at %s://%s:%d/", serving.name, scheme, shown, port)
    if not serving.keys and not is_loopback(config.host):
        get_logger().warning(
            "no API key is set, so every machine that reaches %s can use the server. Set "
            "keys_file to restrict access.",
            shown,
        )
    return server


def _configure(app: Any, config: ServeConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=partial(DeadlineProtocol, config),  # type: ignore[arg-type]
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        log_level="critical",  # the middleware logs errors without private text
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=config.timeouts.idle_s,  # type: ignore[arg-type]
        timeout_graceful_shutdown=config.timeouts.grace_s + _LAST_WORDS_S,  # type: ignore[arg-type]
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        backlog=config.load.max_connections,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
    )


def bind_address(config: ServeConfig) -> socket.socket:
    """Create a socket that is bound to the server's address.

    Raises:
        ConfigError: the address is in use, or belongs to another machine.
    """
    check_certificate(config)
    if config.uds is not None:
        return _bind_path(config.uds)
    try:
        addresses = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = addresses[0]
        # asyncio sets TCP_NODELAY only if the protocol is given. Without it the body of a response,
        # which is sent after the head, waits 40 ms for the client's delayed acknowledgement.
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
        return listener
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port={config.port} of {config.host} is already in use by another server. Stop "
                "it, or choose another port; port=0 selects a free port."
            ) from error
        raise ConfigError(
            f"cannot listen at host={config.host!r}, port={config.port} ({error}). Use an "
            "address of this machine, such as 127.0.0.1, and a port above 1023."
        ) from error


def _bind_path(path: Path) -> socket.socket:
    """Create a Unix socket that only this user can access; replace a socket without a server."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        with socket.socket(socket.AF_UNIX) as other:
            is_used = path.is_socket() and other.connect_ex(str(path)) == 0
        if is_used:
            raise ConfigError(
                f"uds={str(path)!r} is already in use by another server. Stop it, or choose "
                "another path."
            )
        if path.is_socket():
            path.unlink()
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        return listener
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen at uds={str(path)!r} ({error}). Use a path that does not exist, in "
            "a directory where you may write."
        ) from error
    except ConfigError:
        listener.close()
        raise
