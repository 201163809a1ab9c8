"""Rewards of servers and functions that answer slowly, wrongly or with strange numbers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from bmforge.align.rewards import open_rewards

BATCH = {"prompts": ["p", "p"], "completions": ["a", "b"], "completion_ids": [[1], [2]]}
NONE = [None, None]


class Strange:
    """A number whose conversion raises an unusual error."""

    def __float__(self) -> float:
        raise RuntimeError("no number")


@contextmanager
def serve(replies: list[tuple[int, bytes]], release: threading.Event) -> Iterator[str]:
    """A server that sends the replies in order; a status of 0 sends one byte and then waits."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            status, body = replies.pop(0)
            self.send_response(status or 200)
            if status == 302:
                self.send_header("Location", "/elsewhere")
            self.end_headers()
            if status:
                self.wfile.write(body)
            else:
                self.wfile.write(body[:1])
                release.wait(30)

        def log_message(self, *_: Any) -> None:
            """Write nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/score"
    finally:
        release.set()
        server.shutdown()
        server.server_close()


def test_servers(caplog: pytest.LogCaptureFixture) -> None:
    """Errors of a server give no rewards; its next good reply counts again."""
    good = json.dumps({"rewards": [1, 0.5]}).encode()
    steps: list[tuple[list[tuple[int, bytes]], list[float | None]]] = [
        ([(200, good)], [1.0, 0.5]),
        ([(500, b"oops")] * 3, NONE),  # three attempts
        ([(503, b""), (200, good)], [1.0, 0.5]),
        ([(404, b"{}")] * 3, NONE),
        ([(200, b"<html>")], NONE),
        ([(200, b"")], NONE),
        ([(200, b"[1, 0.5]")], NONE),
        ([(200, b'{"reward": [1, 0.5]}')], NONE),
        ([(200, b'{"rewards": null}')], NONE),
        ([(200, b'{"rewards": 3}')], NONE),
        ([(200, b'{"rewards": "12"}')], NONE),
        ([(200, b'{"rewards": {"a": 1, "b": 2}}')], NONE),
        ([(200, b'{"rewards": [1]}')], NONE),
        ([(200, b'{"rewards": [1, 2, 3]}')], NONE),
        ([(200, b'{"rewards": [[1], null]}')], NONE),
        ([(200, b'{"rewards": [NaN, 2]}')], [None, 2.0]),
        ([(200, b'{"rewards": [Infinity, "2"]}')], NONE),
        ([(200, b'{"rewards": [1e999, ' + b"1" + b"0" * 400 + b"]}")], NONE),
        ([(200, '{"rewards": [1, 0.5]}'.encode("utf-16"))], [1.0, 0.5]),
        ([(0, good)], NONE),
        ([(200, good)], [1.0, 0.5]),
    ]
    replies: list[tuple[int, bytes]] = []
    with serve(replies, threading.Event()) as address:
        rewards = open_rewards([address], timeout_s=30)
        try:
            for given, wanted in steps:
                replies[:] = given
                rewards._timeout_s = 0.5 if given[0][0] == 0 else 30
                assert list(rewards.score(BATCH).values()) == [wanted], given
                assert not replies
        finally:
            rewards.close()
    assert list(rewards.failures.values()) == [len(steps) - 4]
    assert "ran longer than 0.5 seconds" in caplog.text
    assert "HTTPError 500" in caplog.text


def test_a_server_that_is_not_there() -> None:
    with serve([], threading.Event()) as address:
        pass
    rewards = open_rewards([address], timeout_s=30)
    try:
        assert list(rewards.score(BATCH).values()) == [NONE]
    finally:
        rewards.close()


VALUES: dict[str, tuple[Any, list[float | None]]] = {
    "a huge integer": ([10**400, 1], [None, 1.0]),
    "a negative huge integer": ([1, -(10**400)], [1.0, None]),
    "booleans": ([True, False], [1.0, 0.0]),
    "scalars": ([torch.tensor(2.0), torch.tensor([3])], [2.0, 3.0]),
    "a tensor": (torch.tensor([0.5, float("nan")]), [0.5, None]),
    "a tensor per answer": ([torch.ones(2), 1.0], [None, 1.0]),
    "a complex number": ([1j, 1.0], [None, 1.0]),
    "an object": ([Strange(), 1.0], [None, 1.0]),
    "text and bytes": (["1", b"2"], NONE),
    "a generator": ((n for n in (1, 2)), [1.0, 2.0]),
    "a dict": ({"a": 1, "b": 2}, NONE),
    "a number": (3.0, NONE),
    "too many": ([1.0] * 3, NONE),
}


@pytest.mark.parametrize("name", VALUES)
def test_values(name: str) -> None:
    """Values that are not finite numbers leave their own answer without a reward."""
    value, wanted = VALUES[name]

    async def later(**_: Any) -> Any:
        return value

    rewards = open_rewards([later], timeout_s=5)
    assert rewards.score(BATCH) == {"later": wanted}
    assert rewards.failures["later"] == (None in wanted)


FILE = """
import asyncio, sys

class Strange:
    def __float__(self):
        raise RuntimeError("no number")

def huge(completions, **kwargs):
    return [10**400, 1]

def digits(completions, **kwargs):
    return [10**5000, 1]

def strange(completions, **kwargs):
    return [[1, 2], Strange()]

async def hangs(completions, **kwargs):
    await asyncio.sleep(100)

async def raises(completions, **kwargs):
    raise asyncio.CancelledError("x")

def deep(completions, **kwargs):
    return deep(completions)

def circular(completions, log_extra, **kwargs):
    entry = []
    entry.append(entry)
    log_extra("x", [entry, 1])
    return [1, 2]

def output(completions, **kwargs):
    print("x" * 3_000_000)
    sys.__stdout__.write('{"rewards": [9, 9]}\\n')
    sys.__stdout__.flush()
    return [1, 2]
"""


def test_functions_in_processes(tmp_path: Path) -> None:
    """Whatever a function of a file does, the next function and the next call have rewards."""
    (tmp_path / "hostile.py").write_text(FILE)
    names = {"huge": [None, 1.0], "output": [1.0, 2.0], "strange": NONE}
    names |= dict.fromkeys(("digits", "raises", "deep", "circular", "hangs"), NONE)
    rewards = open_rewards([f"{tmp_path / 'hostile.py'}:{name}" for name in names], timeout_s=60)
    try:
        sources = dict(rewards._sources)
        for name, wanted in names.items():
            if sources[name]._process is None:  # type: ignore[attr-defined]
                sources[name]._start(60)  # type: ignore[attr-defined]
            rewards._timeout_s = 0.3 if name == "hangs" else 60
            assert rewards._score(name, BATCH, 2)[0] == wanted, name
            assert rewards.failures[name] == (None in wanted)
    finally:
        rewards.close()
