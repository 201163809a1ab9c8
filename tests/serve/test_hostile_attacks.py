"""Attacks on HTTP framing, JSON and constraints; each is refused, or answered as what it is."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from test_hostile_set import BASES, Case, raw, read_answer, run, send
from test_serve_sockets import connect, read_all

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
BODY = json.dumps({"model": "tiny", **BASES[PATH]}).encode()
POST = f"POST {PATH} HTTP/1.1\r\n".encode()
HOST, KIND = b"Host: localhost\r\n", b"Content-Type: application/json\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
SMUGGLED = b"GET /v1/smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%s\r\n%s\r\n" % (len(data), extension, data)


END = b"0\r\n\r\n"
GOOD = chunk(BODY) + END


def framing_cases() -> Iterator[Case]:
    """Bodies whose end two HTTP parsers may see at different places."""
    head = POST + HOST + KIND
    framings: dict[str, tuple[bytes, bool]] = {
        "xchunked": (head + b"Transfer-Encoding: xchunked\r\n\r\n" + GOOD, True),
        "space before the colon": (head + b"Transfer-Encoding : chunked\r\n\r\n" + GOOD, True),
        "vertical tab": (head + b"Transfer-Encoding: \x0bchunked\r\n\r\n" + GOOD, True),
        "identity after chunked": (head + CHUNKED + b"Transfer-Encoding: identity\r\n\r\n" + GOOD,
                                   True),
        "chunked, identity": (head + b"Transfer-Encoding: chunked, identity\r\n\r\n" + GOOD, True),
        "quoted": (head + b'Transfer-Encoding: "chunked"\r\n\r\n' + GOOD, True),
        "both, TE first": (head + CHUNKED + LENGTH + b"\r\n" + GOOD, True),
        "both, with a request in the body": (head + LENGTH + CHUNKED + b"\r\n" + END + SMUGGLED,
                                             True),
        "folded TE": (head + b"Transfer-Encoding:\r\n chunked\r\n\r\n" + GOOD, False),
        "length with a space": (head + b"Content-Length: 1 0\r\n\r\n" + BODY, True),
        "length with an underscore": (head + b"Content-Length: 1_0\r\n\r\n" + BODY, True),
        "length in Arabic digits": (head + "Content-Length: ٣\r\n\r\n".encode() + BODY, True),
        "length as a float": (head + b"Content-Length: 3.0\r\n\r\n" + BODY, True),
        "empty length": (head + b"Content-Length:\r\n\r\n" + BODY, True),
        "three lengths": (head + LENGTH + LENGTH + b"Content-Length: 4\r\n\r\n" + BODY, True),
        "carriage return in a header": (head + b"X: a\rY: b\r\n" + LENGTH + b"\r\n" + BODY, True),
        "request line after a blank": (b" " + head + LENGTH + b"\r\n" + BODY, True),
        "chunk of 17 digits": (head + CHUNKED + b"\r\n" + b"1" * 17 + b"\r\n" + GOOD, True),
        "chunk of 21 digits": (head + CHUNKED + b"\r\n" + b"f" * 21 + b"\r\n" + GOOD, True),
        "chunk with a sign": (head + CHUNKED + b"\r\n+" + GOOD, True),
        "chunk as 0x": (head + CHUNKED + b"\r\n0x" + GOOD, True),
        "chunk with an underscore": (head + CHUNKED + b"\r\n1_0\r\n" + GOOD, True),
        "longer than its chunk": (head + CHUNKED + b"\r\n" + chunk(BODY)[:-2] + b"xx\r\n" + END,
                                  True),
        "extension": (head + CHUNKED + b"\r\n" + chunk(BODY, b";a=b") + END, False),
        "extension with quotes": (head + CHUNKED + b"\r\n" + chunk(BODY, b';a="b;c"') + END, False),
        "extension of 60 KB": (head + CHUNKED + b"\r\n" + chunk(BODY, b";a=" + b"b" * 60_000) + END,
                               False),
        "extension with a line feed": (head + CHUNKED + b"\r\n" + chunk(BODY, b";a\nb") + END,
                                       True),
        "trailer": (head + CHUNKED + b"Trailer: X\r\n\r\n" + chunk(BODY) + b"0\r\nX: a\r\n\r\n",
                    False),
        "trailer with a length": (head + CHUNKED + b"\r\n" + chunk(BODY)
                                  + b"0\r\nContent-Length: 3\r\n\r\n", False),
        "trailers of 70 KB": (head + CHUNKED + b"\r\n" + chunk(BODY) + b"0\r\nX: "
                              + b"a" * 70_000 + b"\r\n\r\n", False),
        "malformed trailer": (head + CHUNKED + b"\r\n" + chunk(BODY) + b"0\r\n: a\r\n\r\n", True),
        "no last chunk": (head + CHUNKED + b"\r\n" + chunk(BODY), True),
        "one byte per chunk": (head + CHUNKED + b"\r\n"
                               + b"".join(chunk(BODY[n : n + 1]) for n in range(len(BODY))) + END,
                               False),
        "3 MB in chunks": (head + CHUNKED + b"\r\n" + chunk(b" " * 60_000) * 50 + GOOD, True),
    }  # fmt: skip
    for name, (data, must_fail) in framings.items():
        yield Case(f"framing {name}", data, must_fail)


def head_cases() -> Iterator[Case]:
    """Upgrades, expectations and heads of unusual sizes."""
    end = b"Connection: close\r\n\r\n"
    upgrade = b"Connection: Upgrade\r\nUpgrade: "
    key = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    get = b"GET /health HTTP/1.1\r\n" + HOST
    heads: dict[str, tuple[bytes, bool]] = {
        "websocket": (b"GET /v1/x HTTP/1.1\r\n" + HOST + upgrade + b"websocket\r\n" + key + b"\r\n",
                      True),
        "websocket to a route": (b"GET " + PATH.encode() + b" HTTP/1.1\r\n" + HOST + upgrade
                                 + b"websocket\r\n" + key + b"\r\n", True),
        "h2c": (get + upgrade + b"h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\r\n", False),
        "unknown expectation": (POST + HOST + KIND + b"Expect: 200-maybe\r\n" + LENGTH + b"\r\n"
                                + BODY, False),
        "long name": (get + b"X" * 15_000 + b": a\r\n" + end, False),
        "longer name": (get + b"X" * 17_000 + b": a\r\n" + end, True),
        "endless name": (get + b"X" * 200_000, True),
        "many empty headers": (get + b"".join(b"X%d:\r\n" % n for n in range(1000)) + end, False),
        "name of other bytes": (get + b"X\xff\xfe: a\r\n" + end, True),
        "value of other bytes": (get + b"X: \xff\xfe\r\n" + end, False),
        "proxy headers": (get + b"X-Forwarded-For: 127.0.0.1\r\nX-Forwarded-Host: evil.example\r\n"
                          b"Forwarded: for=evil\r\n" + end, False),
        "override of the method": (get + b"X-HTTP-Method-Override: DELETE\r\n" + end, False),
        "asterisk": (b"OPTIONS * HTTP/1.1\r\n" + HOST + end, True),
        "authority": (b"CONNECT evil.example:443 HTTP/1.1\r\n" + HOST + end, True),
    }  # fmt: skip
    for name, (data, must_fail) in heads.items():
        yield Case(f"head {name}", data, must_fail)


def json_cases() -> Iterator[Case]:
    """Numbers, keys and characters that JSON parsers read differently, deep inside a body."""
    for path, base in ((CHAT, BASES[CHAT]), ("/v1/messages", BASES["/v1/messages"])):
        body = json.dumps({"model": "tiny", **base}).encode()[:-1]
        parts: dict[str, bytes] = {
            "NaN in metadata": b'"metadata": {"a": NaN}', "infinity": b'"top_p": Infinity',
            "NaN in a list": b'"stop": [NaN]', "large exponent": b'"top_p": 1e99999',
            "lone surrogate as a key": rb'"metadata": {"\ud800": "a"}',
            "lone surrogate deep inside": rb'"metadata": {"a": "\udfff"}',
            "surrogates apart": rb'"metadata": {"a": "\ud83d \ude00"}',
            "duplicate deep inside": b'"metadata": {"a": "b", "a": "c"}',
            "duplicate by an escape": rb'"mod\u0065l": "other"',
            "key of a prototype": b'"metadata": {"__proto__": {"a": 1}, "__proto__": 1}',
        }  # fmt: skip
        for name, part in parts.items():
            yield Case(f"{path} {name}", raw(body + b", " + part + b"}", path))


def nested(depth: int, key: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        inner = {"a": schema} if key == "properties" else schema
        schema = {key: [inner] if key in ("anyOf", "allOf") else inner}
    return schema


REGEXES = {
    "nested quantifiers": "(a+)+$", "same alternatives": "(a|a|a|a)*b", "dots": "(.*a){25}",
    "repetitions": "((a{0,99}){0,99}){0,99}", "one large repetition": "a{0,1000000000}",
    "back reference": r"(a)\1", "look-ahead": "(?=a+)+b", "flag": "(?R)",
    "conditional": "(a)?(?(1)b|c)", "unfinished": "[a-", "many groups": "(" * 900 + "a" + ")" * 900,
    "classes": r"[\x{0}-\x{10ffff}]{0,5000}", "empty": "", "atomic": "(?>a+)b", "NUL": "\x00",
}  # fmt: skip


def constraint_cases() -> Iterator[Case]:
    """Schemas and regular expressions that are expensive, and counts that multiply the work."""
    fields: dict[str, dict[str, Any]] = {
        f"schema with {key}": {"guided_json": nested(30, key)}
        for key in ("properties", "items", "anyOf", "allOf", "not", "additionalProperties")
    }
    wide = {"anyOf": [{"const": "a" * n} for n in range(400)]}
    fields |= {
        "large schema": {"guided_json": wide}, "n": {"n": 10**9}, "best_of": {"best_of": 10**9},
        "n times prompts": {"n": 8, "prompt": ["a"] * 64}, "logprobs": {"logprobs": 10**6},
        "prompt_logprobs": {"prompt_logprobs": 10**6}, "n below zero": {"n": -(2**63)},
        "many choices": {"guided_choice": ["a" * 400] * 400},
        "minItems": {"guided_json": {"type": "array", "minItems": 10**9, "items": {"const": "a"}}},
        "maxLength": {"guided_json": {"type": "string", "maxLength": 10**12}},
        "multipleOf": {"guided_json": {"type": "number", "multipleOf": 1e-300}},
    }  # fmt: skip
    must_fail = {"n", "best_of", "n times prompts", "logprobs", "prompt_logprobs", "n below zero"}
    for name, more in fields.items():
        data = json.dumps({"model": "tiny", **BASES[PATH], **more}).encode()
        yield Case(f"constraint {name}", raw(data, PATH), name in must_fail)
    for name, regex in REGEXES.items():
        data = json.dumps({"model": "tiny", **BASES[PATH], "guided_regex": regex}).encode()
        unsupported = name in ("back reference", "conditional", "unfinished", "empty")
        yield Case(f"regex {name}", raw(data, PATH), unsupported)


def all_attacks() -> list[Case]:
    return [*framing_cases(), *head_cases(), *json_cases(), *constraint_cases()]


def test_a_sample_of_attacks(start: Any) -> None:
    with start(max_rate_per_min=10**6) as server:
        run(server, all_attacks()[::9])


@pytest.mark.long
def test_all_attacks(start: Any) -> None:
    """Each ends within 20 s, and requests of another client are answered beside it."""
    cases = all_attacks()
    assert len(cases) >= 60
    assert len({case.name for case in cases}) == len(cases)
    with start(max_rate_per_min=10**6) as server:
        for case in cases:
            begin = time.monotonic()
            run(server, [case])
            assert time.monotonic() - begin < 20, case.name


def test_a_request_in_a_refused_body_is_not_answered(start: Any) -> None:
    """After a refusal for its framing the connection is closed, and what follows is not read."""
    attacks = [case for case in framing_cases() if case.must_fail]
    with start(max_rate_per_min=10**6) as server:
        for case in attacks[::4]:
            answer = send(server, Case(case.name, case.data + SMUGGLED))
            statuses = re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)
            assert len([s for s in statuses if s != b"100"]) == 1, case.name


@pytest.mark.parametrize(
    "data",
    [
        POST + HOST + KIND + LENGTH + b"\r\n" + BODY[:9],
        POST + HOST + KIND + CHUNKED + b"\r\n" + chunk(BODY),
        POST + HOST,
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + POST,
    ],
)
def test_a_request_that_ends_too_early_is_told_so(start: Any, data: bytes) -> None:
    with start() as server, closing(connect(server)) as connection:
        connection.sendall(data)
        connection.shutdown(1)
        answer = read_all(connection)
        begin = answer.rpartition(b"HTTP/1.1 ")[2]
        assert begin.startswith(b"400 ")
        assert b"the request is incomplete" in begin
        assert answer.count(b" 200 OK") == data.count(b"/health")


def test_chunks_in_http_1_0_are_refused(start: Any) -> None:
    """HTTP/1.0 has no chunks, so proxies may see another end of the body (RFC 9112, 6.1)."""
    data = POST.replace(b"1.1", b"1.0") + HOST + KIND + CHUNKED + b"\r\n" + GOOD
    with start() as server, closing(connect(server)) as connection:
        connection.sendall(data + SMUGGLED)
        answer = read_all(connection)
        assert answer.count(b"HTTP/1.1 ") == 1
        assert read_answer(answer)[0] == 400


@pytest.mark.parametrize(
    ("more", "size", "continues", "status"),
    [("", len(BODY), True, 200), ("", 10**9, False, 413), ("Origin: http://a\r\n", 9, False, 403)],
)
def test_expectations_are_answered_before_the_body(
    start: Any, more: str, size: int, continues: bool, status: int
) -> None:
    """A body that would be refused is not asked for."""
    head = POST + HOST + KIND + more.encode() + b"Expect: 100-continue\r\nConnection: close\r\n"
    with start() as server, closing(connect(server)) as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % size)
        begin = connection.recv(65536)
        assert begin.startswith(b"HTTP/1.1 100") == continues
        if continues:
            connection.sendall(BODY)
        assert read_answer(begin + read_all(connection))[0] == status


def test_bodies_that_arrive_too_slowly_are_cut_off(start: Any) -> None:
    """Also in chunks of one byte, and when each byte comes in time."""
    with start(receive_s=0.5) as server:
        for head, pieces in (
            (LENGTH, [BODY[n : n + 1] for n in range(len(BODY))]),
            (CHUNKED, [chunk(BODY[n : n + 1]) for n in range(len(BODY))]),
        ):
            with closing(connect(server)) as connection:
                connection.sendall(POST + HOST + KIND + head + b"\r\n")
                begin = time.monotonic()
                try:
                    for piece in pieces:
                        connection.sendall(piece)
                        time.sleep(0.05)
                except OSError:
                    pass
                assert b"408" in (read_all(connection) or b"408")[:20]
                assert time.monotonic() - begin < 10
