"""What clients do that are not well-behaved, by raw sockets."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from bmforge.infer import Engine

PATIENCE = 1000  # looks of a hundredth of a second


def connect(server: Any, receive_buffer: int = 0) -> socket.socket:
    made = socket.socket()
    if receive_buffer:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    made.settimeout(120)
    made.connect(("127.0.0.1", server.port))
    return made


def message(body: Any, path: str = "/v1/completions", more: str = "") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{more}"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def endless(**more: Any) -> dict[str, Any]:
    """A request whose answer goes on for 900 tokens."""
    fixed = {"prompt": "a", "max_tokens": 900, "temperature": 0, "logit_bias": {"70": 100}}
    return {"model": "tiny", **fixed, **more}


def read_all(connection: socket.socket) -> bytes:
    found = b""
    try:
        while data := connection.recv(65536):
            found += data
    except ConnectionResetError:
        pass
    return found


def until(condition: Any) -> bool:
    """Look again and again, for ten seconds, whether something is so."""
    waiting = threading.Event()
    return any(condition() or waiting.wait(0.01) for _ in range(PATIENCE))


def is_idle(engine: Engine) -> bool:
    status = engine.requests_status()
    return status.running == status.waiting == 0


def ends(server: Any) -> dict[str, float]:
    """How many answers ended, by the reason."""
    found = {}
    with closing(connect(server)) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        for line in read_all(connection).decode().splitlines():
            if line.startswith("bmforge_answers_total{"):
                found[line.split('"')[1]] = float(line.split()[-1])
    return found


def test_half_sent_heads_and_bodies_are_closed(start: Any) -> None:
    """However slowly they come; a long answer beside them is whole."""
    whole = message(endless(max_tokens=40))
    with start(receive_s=0.5) as server, ExitStack() as stack:
        parts = [b"", b"P", b"GET / HTTP/1.1\r\nHost: local", whole[:-1], whole[: len(whole) // 2]]
        half = [stack.enter_context(closing(connect(server))) for _ in parts]
        for connection, part in zip(half, parts, strict=True):
            connection.sendall(part)
        slow = stack.enter_context(closing(connect(server)))
        other = stack.enter_context(closing(connect(server)))
        other.sendall(message(endless(stream=True), more="Connection: close\r\n"))
        waiting, is_closed = threading.Event(), False
        for byte in whole:
            try:
                slow.sendall(bytes([byte]))
            except OSError:
                is_closed = True
                break
            waiting.wait(0.02)
        assert is_closed
        for connection in half:
            answer = read_all(connection)
            assert answer == b"" or b" 408 " in answer.split(b"\r\n")[0]
        assert b"data: [DONE]" in read_all(other)
        assert until(lambda: server.serving.admission.count == 0)


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_goes_ends_its_request(start: Any, engine: Engine, streams: bool) -> None:
    """Whether its answer is streamed or not, behind its body or before its head was read."""
    with start() as server:
        for number in range(1, 4):
            connection = connect(server)
            connection.sendall(message(endless(stream=streams)))
            if number < 3:
                assert until(lambda: not is_idle(engine))
            connection.close()
            assert until(lambda: is_idle(engine) and server.serving.admission.count == 0)
        assert set(ends(server)) == {"left"}
        assert until(lambda: not server.serving.live)


def test_a_reader_that_stops_is_left(start: Any, engine: Engine) -> None:
    """Its answer is cancelled when too much is waiting, its connection when it takes nothing."""
    limits = {"max_unread_bytes": 600, "send_s": 0.5}
    with start(send_buffer=4096, **limits) as server, ExitStack() as stack:
        before = engine.requests_status().pages_used
        readers = [stack.enter_context(closing(connect(server, 2048))) for _ in range(5)]
        for connection in readers:
            connection.sendall(message(endless(stream=True, logprobs=5)))
        assert until(lambda: ends(server).get("left") == 5)
        assert until(lambda: is_idle(engine) and not server.serving.live)
        assert engine.requests_status().pages_used == before
        for connection in readers:
            assert b"[DONE]" not in read_all(connection)


@pytest.mark.parametrize("cut", [0, 1, 10_000])
def test_pipelined_requests_are_answered_in_order(start: Any, cut: int) -> None:
    """However the bytes are divided into packets."""
    get = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    requests = [message(endless(max_tokens=n)) for n in (2, 3, 4)]
    data = get + b"\r\n" + b"".join(requests) + get + b"Connection: close\r\n\r\n"
    with start() as server, closing(connect(server)) as connection:
        size = cut or len(data)
        for start_ in range(0, len(data), size):
            connection.sendall(data[start_ : start_ + size])
        file = connection.makefile("rb")
        bodies = [json.loads(read_answer(file)[2]) for _ in range(5)]
        tokens = [body["usage"]["completion_tokens"] for body in bodies[1:4]]
        assert tokens == [2, 3, 4]
        assert bodies[0] == bodies[4] == {"status": "ok"}
        assert file.read() == b""


@pytest.mark.parametrize("is_sent", [True, False])
def test_a_body_divided_while_another_request_is_answered(
    start: Any, engine: Engine, is_sent: bool
) -> None:
    """The head comes in one packet with the request before it, the rest of the body later."""
    first, second = message(endless()), message(endless(max_tokens=3))
    with start(receive_s=0.5) as server, closing(connect(server)) as connection:
        connection.sendall(first + second[:-20])
        assert until(lambda: not is_idle(engine))
        if is_sent:
            connection.sendall(second[-20:])
        file = connection.makefile("rb")
        assert json.loads(read_answer(file)[2])["usage"]["completion_tokens"] == 900
        status, _, body = read_answer(file)
        if is_sent:
            assert json.loads(body)["usage"]["completion_tokens"] == 3
        else:
            assert status == 408


def test_a_client_behind_pipelined_requests_goes(start: Any, engine: Engine) -> None:
    with start() as server:
        connection = connect(server)
        connection.sendall(message(endless()) * 2)
        assert until(lambda: not is_idle(engine))
        connection.close()
        assert until(lambda: is_idle(engine) and server.serving.admission.count == 0)


@pytest.mark.parametrize("streams", [False, True])
def test_a_half_closed_client_gets_its_answer(start: Any, streams: bool) -> None:
    with start() as server, closing(connect(server)) as connection:
        connection.sendall(message(endless(max_tokens=60, stream=streams)))
        connection.shutdown(socket.SHUT_WR)
        heads = read_all(connection).split(b"\r\n\r\n")
        while heads[0].startswith(b"HTTP/1.1 100"):
            heads = heads[1:]
        assert heads[0].startswith(b"HTTP/1.1 200")
        if streams:
            assert b"[DONE]" in b"".join(heads)
        else:
            assert json.loads(heads[1])["usage"]["completion_tokens"] == 60


def test_requests_one_after_the_other_share_a_connection(start: Any) -> None:
    with start() as server, closing(connect(server)) as connection:
        file = connection.makefile("rb")
        for _ in range(3):
            connection.sendall(message(endless(max_tokens=3)))
            status, headers, body = read_answer(file)
            assert status == 200
            assert json.loads(body)["usage"]["completion_tokens"] == 3
            assert headers["x-content-type-options"] == "nosniff"
            assert "access-control-allow-origin" not in headers


def read_answer(file: Any) -> tuple[int, dict[str, str], bytes]:
    status = int(file.readline().split()[1])
    headers = {}
    while (line := file.readline().decode().strip()) != "":
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return status, headers, file.read(int(headers["content-length"]))


def test_more_connections_than_there_may_be(start: Any) -> None:
    with start(max_connections=3) as server, ExitStack() as stack:
        held = [stack.enter_context(closing(connect(server))) for _ in range(3)]
        assert until(lambda: len(server.connections()) == 3)
        with closing(connect(server)) as another:
            assert b" 503 " in read_all(another)
        held[0].close()
        assert until(lambda: len(server.connections()) == 2)
        assert ends(server) is not None


def hostile() -> Iterator[tuple[str, bytes, int]]:
    """(what, bytes, status) of requests that are refused."""
    yield "text", message(b"hello"), 400
    yield "nothing", message(b""), 400
    yield "a list", message(b"[]"), 400
    yield "NaN", message(b'{"model": "tiny", "prompt": "a", "temperature": NaN}'), 400
    yield "twice", message(b'{"model": "tiny", "model": "tiny", "prompt": "a"}'), 400
    yield "surrogate", message(rb'{"model": "tiny", "prompt": "\ud800"}'), 400
    yield "deep", message(b'{"model": "tiny", "prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}"), 400
    yield "ids", message({"model": "tiny", "prompt": [1, 99999]}), 400
    yield "negative", message({"model": "tiny", "prompt": [-1]}), 400
    yield "mixed", message({"model": "tiny", "prompt": [1, "a"]}), 400
    yield "empty", message({"model": "tiny", "prompt": ""}), 400
    yield "none", message({"model": "tiny", "prompt": []}), 400
    yield "one empty", message({"model": "tiny", "prompt": ["a", ""]}), 400
    yield "null", message({"model": "tiny", "prompt": None}), 400
    yield "long", message({"model": "tiny", "prompt": "a" * 5000}), 400
    yield "echo", message({"model": "tiny", "prompt": "a", "echo": 3}), 400
    yield "bytes", message(b'{"model": "tiny", "prompt": "\xff"}'), 400
    plain = message({"model": "tiny", "prompt": "a"}).replace(b"application/json", b"text/plain")
    yield "a form's type", plain, 400
    yield "another path", message(b"{}", "/v1/else"), 404
    yield "dots", message(b"{}", "/v1/../../etc/passwd"), 404
    yield "a file", b"GET /page/..%2f..%2fapp.py HTTP/1.1\r\nHost: localhost\r\n\r\n", 404
    yield "another method", b"GET /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n", 405
    yield "no host", b"GET /health HTTP/1.1\r\n\r\n", 400
    yield "two lengths", message(b"{}", more="Content-Length: 5\r\n"), 400
    yield "another host", b"GET /health HTTP/1.1\r\nHost: a.b\r\n\r\n", 403
    yield "old", b"GET /health HTTP/1.0\r\n\r\n", 403
    yield "another site", message(b"{}", more="Origin: http://evil.example\r\n"), 403
    yield "a long head", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 40_000, 431
    whole = b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000 + b"\r\n\r\n"
    yield "a long whole head", whole, 431
    yield "noise", bytes(range(256)) * 4 + b"\r\n\r\n", 400
    yield "large", message(b"x" * 3_000_000), 413


def test_hostile_requests(start: Any) -> None:
    with start() as server:
        for what, data, status in hostile():
            with closing(connect(server)) as connection:
                try:
                    connection.sendall(data)
                    connection.shutdown(socket.SHUT_WR) if status == 413 else None
                except (ConnectionResetError, BrokenPipeError):
                    pass
                answer = read_all(connection) if status == 431 else b""
                line = answer or connection.makefile("rb").readline()
                assert line.split()[1:2] == [str(status).encode()], what
                if answer:  # in OpenAI's format too
                    assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["message"]
        assert ends(server) == {}
