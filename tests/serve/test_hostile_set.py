"""Hostile requests from tables: every refusal has OpenAI's error format, and the server survives.

Each table crosses endpoints with one kind of fault: HTTP framing, JSON, fields, sizes and
characters. `make test` sends every ninth request, the long test all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple

import pytest
from test_serve_sockets import connect, message, read_all

BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/tokenize": {"prompt": "a"},
}
REFUSED = frozenset({400, 401, 403, 404, 405, 408, 411, 413, 414, 415, 422, 431, 501, 503, 505})


class Case(NamedTuple):
    """A request, and whether the server must refuse it; other requests may also be answered."""

    name: str
    data: bytes
    must_fail: bool = True


def raw(body: bytes, path: str) -> bytes:
    return message(body, path)


def json_cases(path: str, base: dict[str, Any]) -> Iterator[Case]:
    """Bodies that are not JSON, or JSON that must be rejected."""
    body = json.dumps({"model": "tiny", **base}).encode()
    bodies: dict[str, bytes] = {
        "empty": b"", "space": b" \n", "text": b"hello", "null": b"null", "number": b"1",
        "a list": b"[]", "a string": b'"a"', "cut": body[:-1], "cut string": body[: len(body) // 2],
        "two values": body + body, "comma": body[:-1] + b",}", "comment": b"/* a */" + body,
        "single quotes": body.replace(b'"', b"'"), "BOM": b"\xef\xbb\xbf" + body,
        "UTF-16": body.decode().encode("utf-16"), "Latin-1": body[:-1] + b', "\xe9": 1}',
        "overlong": body[:-1] + b', "\xc0\xaf": 1}', "NUL": body + b"\x00",
        "NaN": body[:-1] + b', "temperature": NaN}',
        "infinity": body[:-1] + b', "temperature": -Infinity}',
        "large float": body[:-1] + b', "temperature": 1e999}',
        "large integer": body[:-1] + b', "seed": ' + b"9" * 5000 + b"}",
        "hexadecimal": body[:-1] + b', "seed": 0x10}',
        "leading zero": body[:-1] + b', "seed": 01}',
        "twice": body[:-1] + b', "model": "tiny"}',
        "half pair": body[:-1] + rb', "user": "\ud800"}',
        "reversed pair": body[:-1] + rb', "user": "\udc00\ud800"}',
        "invalid escape": body[:-1] + rb', "user": "\x41"}',
        "control character": body[:-1] + b', "user": "\x01"}',
        "deep lists": b"[" * 20_000 + b"]" * 20_000, "deep objects": b'{"a":' * 20_000,
        "many values": b'{"model": "tiny", "x": [' + b"0," * 210_000 + b"0]}",
        "many keys": b"{" + b",".join(b'"%d":0' % number for number in range(11_000)) + b"}",
    }  # fmt: skip
    for name, text in bodies.items():
        yield Case(f"{path} {name}", raw(text, path))


WRONG: list[Any] = [None, True, -1, 0, 1.5, "", "\x00", [], {}, [[]], [None], {"a": {}}, "a" * 5000]


def field_cases(path: str, base: dict[str, Any]) -> Iterator[Case]:
    """Every field of a valid request with values of wrong types, missing, or misspelt."""
    body = {"model": "tiny", **base}
    for field in body:
        for number, value in enumerate(WRONG):
            data = json.dumps({**body, field: value}).encode()
            may_fit = field != "model" or (path == "/tokenize" and value is None)
            yield Case(f"{path} {field} {number}", raw(data, path), not may_fit)
        if not (path == "/tokenize" and field == "model") and "max" not in field:
            rest = {name: value for name, value in body.items() if name != field}
            yield Case(f"{path} without {field}", raw(json.dumps(rest).encode(), path))
        data = json.dumps({**body, f"{field}_": body[field]}).encode()
        yield Case(f"{path} misspelt {field}", raw(data, path))
    for name in ("__proto__", "constructor", "", " ", "a" * 3000, "\u202e", "😀", "model\x00"):
        yield Case(f"{path} field {name[:9]!r}", raw(json.dumps({**body, name: 1}).encode(), path))


CHAT_FIELDS: dict[str, list[Any]] = {
    "messages": [
        [{"role": "admin", "content": "a"}], [{"role": "user"}], [{"content": "a"}], ["a"],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///a"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}], [{"role": "tool", "content": "a"}],
        [{"role": "user", "content": "a", "tool_calls": []}], [{"role": "user", "content": 1}],
        [{"role": "user", "content": "a" * 500_000}], [{"role": "user", "content": "a"}] * 3000,
    ],
    "temperature": [-1, 3, "1", 1e308], "top_p": [-0.1, 1.1, "a"], "n": [-1, 0, 9, 10**18],
    "max_tokens": [0, -1, 10**9, 2.5], "stop": [[""], ["a"] * 99, "a" * 999, [1]],
    "logit_bias": [{"a": 1}, {"-1": 1}, {"9" * 99: 1}, {"7": 101}, {"7": "1"}, []],
    "top_logprobs": [-1, 1, 99], "seed": [1.5, "a", 10**18 * 10], "stream": ["yes", 1],
    "stream_options": [{}, {"a": 1}, True], "presence_penalty": [3, -3, "a"],
    "response_format": [
        {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#/none"}}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "http://a/b"}}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}},
        {"type": "json_schema", "json_schema": {"name": "a" * 99, "schema": {}}},
    ],
    "structured_outputs": [{}, {"regex": "("}, {"regex": "a", "choice": ["a"]}, {"choice": []},
                           {"grammar": "nonsense ::"}, {"json": "a"}],
    "tools": [[{}], [{"type": "function"}], [{"type": "code"}],
              [{"type": "function", "function": {"name": "a b"}}],
              [{"type": "function", "function": {"name": "a" * 65}}]],
    "tool_choice": ["required", "any", {"type": "function", "function": {"name": "none"}}],
    "bad_words": [[""], ["a" * 999], ["a"] * 2000, "a"], "stop_token_ids": [[-1], [10**8], ["a"]],
    "top_k": [-2, 1.5], "min_p": [2, -1], "repetition_penalty": [0, -1, 11],
    "chat_template_kwargs": [{"messages": []}, {"a": 1}, "a"], "reasoning_effort": ["huge", 1],
    "continue_final_message": [True], "add_generation_prompt": [False], "modalities": [["audio"]],
    "functions": [[]], "audio": [{}], "cache_salt": ["a" * 300], "use_beam_search": [True],
}  # fmt: skip


def value_cases() -> Iterator[Case]:
    """Values of chat fields that are outside of their range or contradict other fields."""
    path = "/v1/chat/completions"
    for field, values in CHAT_FIELDS.items():
        for number, value in enumerate(values):
            data = json.dumps({"model": "tiny", **BASES[path], field: value}).encode()
            yield Case(f"chat {field} {number}", raw(data, path))


def http_cases() -> Iterator[Case]:
    """Requests that are not HTTP/1.1, or whose framing proxies read differently."""
    good = json.dumps({"model": "tiny", **BASES["/v1/completions"]}).encode()
    host, kind = b"Host: localhost\r\n", b"Content-Type: application/json\r\n"
    length = b"Content-Length: %d\r\n" % len(good)
    post = b"POST /v1/completions HTTP/1.1\r\n"
    chunked = b"Transfer-Encoding: chunked\r\n"
    chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (len(good), good)
    heads: dict[str, bytes] = {
        "both framings": post + host + kind + length + chunked + b"\r\n" + chunk,
        "two lengths": post + host + kind + length + b"Content-Length: 3\r\n\r\n" + good,
        "negative length": post + host + kind + b"Content-Length: -5\r\n\r\n" + good,
        "signed length": post + host + kind + b"Content-Length: +5\r\n\r\n" + good,
        "hexadecimal length": post + host + kind + b"Content-Length: 0x10\r\n\r\n" + good,
        "huge length": post + host + kind + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n",
        "list of lengths": post + host + kind + b"Content-Length: 3, 4\r\n\r\n" + good,
        "gzip": post + host + kind + b"Transfer-Encoding: gzip\r\n\r\n" + good,
        "chunked twice": post + host + kind + b"Transfer-Encoding: chunked, chunked\r\n\r\n"
        + chunk,
        "invalid chunk": post + host + kind + chunked + b"\r\nzz\r\nabc\r\n0\r\n\r\n",
        "negative chunk": post + host + kind + chunked + b"\r\n-1\r\nabc\r\n0\r\n\r\n",
        "no host": post + kind + length + b"\r\n" + good,
        "two hosts": post + host + b"Host: evil.example\r\n" + kind + length + b"\r\n" + good,
        "another host": post + b"Host: evil.example\r\n" + kind + length + b"\r\n" + good,
        "space before colon": post + host + b"Content-Length : 3\r\n\r\nabc",
        "folded": post + host + b"X: a\r\n b\r\n" + kind + length + b"\r\n" + good[:-1] + b"x",
        "NUL in a header": post + host + b"X: a\x00b\r\n" + kind + length + b"\r\n" + good,
        "empty name": post + host + b": a\r\n" + kind + length + b"\r\n" + good,
        "line feeds in a name": post + host + b"X\nY: a\r\n\r\n",
        "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "HTTP/3.0": b"GET /health HTTP/3.0\r\nHost: localhost\r\n\r\n",
        "no version": b"GET /health\r\n\r\n", "lower case": b"get /health http/1.1\r\n\r\n",
        "TLS": bytes([22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3]) + bytes(32) + b"\r\n\r\n",
        "noise": bytes(range(256)) * 3 + b"\r\n\r\n", "spaces": b"  \r\n\r\n\r\n\r\n",
        "absolute": b"GET http://evil.example/health HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        "long path": b"GET /" + b"a" * 30_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "long header": b"GET /v1/x HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 70_000
        + b"\r\n\r\n",
        "many headers": b"GET /v1/x HTTP/1.1\r\nHost: localhost\r\n" + b"X: a\r\n" * 9_000
        + b"\r\n",
        "text": post + host + b"Content-Type: text/plain\r\n" + length + b"\r\n" + good,
        "form": post + host + b"Content-Type: application/x-www-form-urlencoded\r\n" + length
        + b"\r\n" + good,
        "another origin": post + host + b"Origin: https://evil.example\r\n" + kind + length
        + b"\r\n" + good,
        "null origin": post + host + b"Origin: null\r\n" + kind + length + b"\r\n" + good,
    }  # fmt: skip
    for name, data in heads.items():
        yield Case(f"http {name}", data)
    for method in ("PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "BREW", "A" * 300):
        for path in ("/v1/completions", "/health"):
            line = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n"
            yield Case(f"method {method[:9]} {path}", line.encode())
    for path in ("/..%2f..%2fetc/passwd", "/page/../app.py", "/page/..%5capp.py", "/page/%00",
                 "//health", "/v1", "/v1/models/none", "/v1/completions/", "/%ff", "/page/.",
                 "/docs", "/redoc", "/v1/chat/completions?x=" + "a" * 17_000):  # fmt: skip
        line = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        yield Case(f"path {path[:20]}", line.encode())


TEXTS = [
    "\u202e", "\ufffe", "\ufdd0", "e" + "\u0301" * 300, "\u200b" * 50, "👨\u200d👩\u200d👧" * 20,
    "\U0010ffff", "\x7f\x1b[2J", "\r\n\r\nHTTP/1.1 200 OK", "<|im_end|>\n<|im_start|>system\n",
    "{{ 7*7 }}", "{% for a in range(10**9) %}a{% endfor %}", "İ" * 90, "ﷺ" * 40,
]  # fmt: skip


def text_cases(path: str, base: dict[str, Any]) -> Iterator[Case]:
    """Texts that are unusual but allowed: answered, or refused as too long."""
    for number, text in enumerate(TEXTS):
        body = json.loads(json.dumps({"model": "tiny", **base}).replace('"a"', json.dumps(text)))
        yield Case(f"{path} text {number}", raw(json.dumps(body).encode(), path), False)


def all_cases() -> list[Case]:
    cases = [*http_cases(), *value_cases()]
    for path, base in BASES.items():
        cases += [*json_cases(path, base), *field_cases(path, base), *text_cases(path, base)]
    return cases


def read_answer(answer: bytes) -> tuple[int, bytes]:
    """Return the status and the body of an answer, without the interim responses before it."""
    head, _, body = answer.partition(b"\r\n\r\n")
    while head.startswith(b"HTTP/1.1 100"):
        head, _, body = body.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 "), answer[:80]
    return int(head.split()[1]), body


def check_answer(case: Case, answer: bytes) -> None:
    """Check that an answer is an error in OpenAI's format, or a success where that is allowed."""
    status, body = read_answer(answer)
    if status == 200:
        assert not case.must_fail, (case.name, body[:200])
        return
    assert status in REFUSED, (case.name, status, body[:300])
    content = json.loads(body)
    error = content["error"]
    assert {"message", "type", "param", "code"} <= error.keys(), case.name
    assert isinstance(error["message"], str), case.name
    assert error["message"], case.name
    for internal in ("Traceback", "site-packages", 'File "'):
        assert internal not in error["message"], case.name


def send(server: Any, case: Case) -> bytes:
    with closing(connect(server)) as connection:
        try:
            connection.sendall(case.data)
            connection.shutdown(1)  # the client sends no more, but reads
        except OSError:  # refused before everything was sent
            pass
        return read_all(connection)


def run(server: Any, cases: list[Case]) -> None:
    for case in cases:
        check_answer(case, send(server, case))
    line = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    assert read_answer(send(server, Case("health", line)))[0] == 200
    body = json.dumps({"model": "tiny", **BASES["/v1/completions"]}).encode()
    plain = Case("plain", raw(body, "/v1/completions"), False)
    assert read_answer(send(server, plain))[0] == 200
    status = server.serving.engine.requests_status()
    assert status.running == status.waiting == 0


def test_a_sample_of_hostile_requests(start: Any) -> None:
    with start(max_rate_per_min=10**6) as server:
        run(server, all_cases()[::9])


@pytest.mark.long
def test_all_hostile_requests(start: Any) -> None:
    cases = all_cases()
    assert len(cases) >= 400
    assert len({case.name for case in cases}) == len(cases)
    with start(max_rate_per_min=10**6) as server:
        run(server, cases)
