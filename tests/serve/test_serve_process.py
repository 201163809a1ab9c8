"""`bmforge serve` as a process: how it begins, what it logs, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bmforge.cli.main import main

KEY = "the-key-of-the-process"


@contextmanager
def served(model: Path, log: Path, *options: str, **environment: str) -> Iterator[Any]:
    """Start a process; yield it and its port. It is killed where it has not ended."""
    command = [sys.executable, "-m", "bmforge", "serve", str(model), "--port", "0", *options]
    environ = {**os.environ, "PYTHONUNBUFFERED": "1", **environment}
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=out, env=environ, text=True
        )
    try:
        port = None
        assert process.stderr is not None
        for line in process.stderr:  # it ends when the process does
            with log.open("a") as out:
                out.write(line)
            if found := re.search(r"http://[^ ]*:(\d+)/", line):
                port = int(found[1])
                break
        assert port is not None, log.read_text()
        yield process, port
    finally:
        process.kill()
        process.communicate(timeout=30)


def ask(port: int, path: str, body: Any = None, key: str = KEY) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


@pytest.mark.long
def test_a_server_gives_what_runs_its_time_and_ends(model_directory: Path, tmp_path: Path) -> None:
    """Status 0; neither keys nor words in the log; nothing is left behind."""
    log, places = tmp_path / "log", tmp_path / "temporary"
    places.mkdir()
    options = ("--quantize", "int8", "--grace-s", "30", "--name", "small")
    with served(model_directory, log, *options, BMFORGE_API_KEYS=KEY, TMPDIR=str(places)) as found:
        process, port = found
        body = {"model": "small", "prompt": "secret words", "max_tokens": 4}
        assert json.loads(ask(port, "/v1/completions", body))["usage"]["completion_tokens"] <= 4
        assert "bmforge_tokens_total" in ask(port, "/metrics")
        for path in ("/", "/metrics", "/v1/models", "/page/page.js", "/openapi.json"):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                ask(port, path, key="wrong")
        assert json.loads(ask(port, "/health", key="wrong")) == {"status": "ok"}
        slow = {**body, "max_tokens": 600, "stream": True, "temperature": 0}
        slow["logit_bias"] = {"70": 100}
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            data = json.dumps(slow)
            head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
            connection.sendall(head.encode() + data.encode())
            answer = connection.recv(1000)
            process.send_signal(signal.SIGTERM)
            while more := connection.recv(65536):
                answer += more
            assert b"data: [DONE]" in answer
        _, rest = process.communicate(timeout=60)
        assert process.returncode == 0
        said = log.read_text() + rest
        assert KEY not in said
        assert "secret" not in said
        assert "POST /v1/completions 200" in said
        assert rest.rstrip().endswith("stopped")
        assert [*places.iterdir()] == []


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--host", "0.0.0.0"), "host='0.0.0.0' without API keys"),
        (("--port", "{port}"), "is already in use"),
        (("--host", "192.0.2.1", "--allow-no-key"), "cannot listen at"),
        (("--keys-file", "nothing-there"), "cannot read"),
        (("--receive-s", "0"), "must be above 0"),
        (("--max-model-len", "0", "--port", "0"), "context=0"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_cannot_be_served(
    model_directory: Path, options: tuple[str, ...], problem: str, capsys: Any
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        given = [option.format(port=port) for option in options]
        status = main(["serve", str(model_directory), *given])
    assert status == 2
    assert problem in capsys.readouterr().err
