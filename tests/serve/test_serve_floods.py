"""Floods: ten thousand hostile requests, cuts, queues, readers that stop; then all is as before."""

from __future__ import annotations

import json
import os
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from test_serve_process import served
from test_serve_sockets import endless, message, read_all, until

from bmforge.serve import rules, serving

pytestmark = pytest.mark.long
REFUSED = {400, 403, 404, 405, 408, 413, 429, 431, 503, 505}
PLAIN: dict[str, Any] = {
    "model": "tiny", "messages": [{"role": "user", "content": "天气"}], "max_tokens": 4,
    "temperature": 0, "stop": ["x"], "n": 1, "logit_bias": {"7": 1}, "top_p": 0.5,
    "response_format": {"type": "text"}, "stream": False,
}  # fmt: skip
REFERENCE = {"model": "tiny", "prompt": "天气", "max_tokens": 24, "temperature": 0}
WHOLE = message({**REFERENCE, "stream": True})
VALUES: list[Any] = [
    None, True, -1, 0, 10**30, 1e308, "", "a" * 3000, [], {}, [[]], {"a": {}}, "\x00", [None], -0.0,
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#/x"}}},
]  # fmt: skip


def connect(port: int, receive_buffer: int = 0) -> socket.socket:
    made = socket.socket()
    if receive_buffer:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    made.settimeout(60)
    made.connect(("127.0.0.1", port))
    return made


def spoil(draw: random.Random) -> bytes:
    """A request with something wrong in it, most of the time."""
    path = draw.choice(
        ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/documents"]
    )
    kind = draw.randrange(5)
    if kind == 0:
        return message(draw.randbytes(draw.randrange(400)), path)
    body = json.loads(json.dumps(PLAIN))
    for _ in range(draw.randrange(1, 4)):
        body[draw.choice([*body, "prompt", "input", "tools", "other"])] = draw.choice(VALUES)
    data = bytearray(json.dumps(body, ensure_ascii=draw.random() < 0.5).encode())
    if kind == 1:
        for _ in range(draw.randrange(1, 6)):
            data[draw.randrange(len(data))] = draw.randrange(256)
    if kind == 2:
        data = data[: draw.randrange(len(data))]
    whole = message(bytes(data), path)
    if kind == 3:
        head = bytearray(whole)
        head[draw.randrange(len(head) - len(data))] = draw.randrange(256)
        return bytes(head)
    return whole


def send_one(port: int, data: bytes) -> int:
    """Send a request; return the status, 0 where the connection was closed without one."""
    with closing(connect(port)) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            file = connection.makefile("rb")
            while (line := file.readline()).split()[1:2] == [b"100"]:  # the server's probes
                file.readline()
        except OSError:
            return 0
        return int(line.split()[1]) if line else 0


def post(port: int, body: Any, path: str = "/v1/completions") -> Any:
    with closing(connect(port)) as connection:
        connection.sendall(message(body, path, "Connection: close\r\n"))
        answer = read_all(connection)
        return json.loads(answer.partition(b"\r\n\r\n")[2])


# Most threads that tokenize, parse and translate schemas; see `Serving` and `RuleChecker`.
WORKERS = serving._TOKENIZING_THREADS + 1 + rules._AT_ONCE


class State:
    """What a process holds."""

    def __init__(self, process: Any, port: int) -> None:
        place = Path(f"/proc/{process.pid}")
        pages = int((place / "statm").read_text().split()[1])
        self.resident = pages * os.sysconf("SC_PAGE_SIZE")
        self.files = len(list((place / "fd").iterdir()))
        self.threads = len(list((place / "task").iterdir()))
        with closing(connect(port)) as connection:
            connection.sendall(
                b"GET /page/state HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            )
            found = json.loads(read_all(connection).partition(b"\r\n\r\n")[2])
        self.pages = found["pages_used"]
        self.is_idle = found["running"] == found["waiting"] == 0


def everything(port: int, draw: random.Random, requests: int, cuts: int) -> dict[int, int]:
    """All that may be done to a server; return how many hostile requests had which status."""
    with ThreadPoolExecutor(8) as pool:
        spoilt = [spoil(draw) for _ in range(requests)]
        found = [*pool.map(lambda data: send_one(port, data), spoilt)]
        places = [draw.randrange(len(WHOLE) + 1) for _ in range(cuts)]
        assert set(pool.map(lambda place: cut_off(port, WHOLE[:place]), places)) == {True}
    assert flood(port, 160) <= {200, 429, 503}
    half = [connect(port) for _ in range(200)]
    for number, connection in enumerate(half):
        connection.sendall(WHOLE[: number % (len(WHOLE) - 1)])
    readers = [connect(port, 2048) for _ in range(50)]
    for connection in readers:
        connection.sendall(message(endless(stream=True, logprobs=5)))
    for connection in half:
        read_all(connection)
    for connection in (*half, *readers):
        connection.close()
    return {status: found.count(status) for status in set(found)}


def test_floods(model_directory: Path, tmp_path: Path) -> None:
    """After a first round, which makes what is made once, nothing grows; others' answers hold."""
    limits = ["--receive-s", "2", "--send-s", "2", "--max-unread-bytes", "600", "--no-log-requests"]
    limits += ["--max-rate-per-min", "10000000", "--max-requests", "16"]
    limits += ["--max-requests-per-key", "16"]
    with served(model_directory, tmp_path / "log", *limits) as (process, port):
        threading.Thread(target=process.stderr.read, daemon=True).start()
        alone = post(port, REFERENCE)["choices"]
        draw = random.Random(21)
        everything(port, draw, 1000, 100)
        assert until(lambda: State(process, port).is_idle)
        before = State(process, port)
        statuses = everything(port, draw, 10_000, 1000)
        assert set(statuses) <= REFUSED | {0, 200}, statuses
        assert statuses[400] > 5000
        assert until(lambda: State(process, port).is_idle)
        assert post(port, REFERENCE)["choices"] == alone
        assert until(lambda: State(process, port).files <= before.files)
        after = State(process, port)
        assert after.pages == before.pages
        # Threads for parsing and tokenizing start when they are needed, and end when idle. Those
        # for schemas, in asyncio's pool, start when they are needed, and stay.
        assert after.threads <= before.threads + WORKERS
        assert after.resident <= before.resident + (16 << 20)
        assert process.poll() is None


def cut_off(port: int, data: bytes) -> bool:
    with closing(connect(port)) as connection:
        connection.sendall(data)
    return True


def flood(port: int, count: int) -> set[int]:
    """Ask ten times as much at once as may wait."""
    body = message({"model": "tiny", "prompt": "a", "max_tokens": 30}, more="Connection: close\r\n")

    def one(_: int) -> int:
        with closing(connect(port)) as connection:
            connection.sendall(body)
            return int(read_all(connection).split()[1])

    with ThreadPoolExecutor(count) as pool:
        return set(pool.map(one, range(count)))
