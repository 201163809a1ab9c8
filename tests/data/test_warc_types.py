"""WARC records as different programs write them: read, dropped with a reason, or named."""

from __future__ import annotations

import base64
import gzip
import hashlib
import random
from pathlib import Path

import pytest

from bmforge.data.clean.drop import Drop
from bmforge.data.sources.document import Document
from bmforge.data.sources.files import parse_record, read_records
from bmforge.data.sources.record import ReadOptions
from bmforge.errors import DataError

SENTENCE = "The ferry number {} leaves at six in the morning and comes back late at night."
HTTP = "application/http; msgtype=response"
PAGE = "<html><body><p>{}</p></body></html>"


def record(kind: str, content_type: str | None, block: bytes, extra: str = "") -> bytes:
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: http://X.org/Aa\r\n{extra}"
    head += f"Content-Type: {content_type}\r\n" if content_type is not None else ""
    return f"{head}Content-Length: {len(block)}\r\n\r\n".encode() + block + b"\r\n\r\n"


def response(text: str, status: str = "HTTP/1.1 200 OK", end: str = "\r\n") -> bytes:
    head = end.join((status, "Content-Type: text/html; charset=utf-8", "Server: x", "", ""))
    return f"{head}{PAGE.format(text)}".encode()


def outcomes(path: Path) -> list[str]:
    """Return for each record the text, the name of the rule that drops it, or "error"."""
    results = []
    for entry in read_records(path, ReadOptions()):
        try:
            parsed = parse_record(entry)
        except DataError:
            results.append("error")
            continue
        results.append(parsed.rule if isinstance(parsed, Drop) else parsed.text)
        assert not isinstance(parsed, Document) or parsed.url in ("http://X.org/Aa", "")
    return results


TYPES = [HTTP, "application/http", "Application/HTTP;msgtype=response", "message/http", "", None]
TYPES += ['application/http ; MsgType="Response"', "application/http;\r\n msgtype=response"]
TYPES += ["application/octet-stream", "text/html"]


@pytest.mark.parametrize("content_type", TYPES)
@pytest.mark.parametrize("kind", ["response", "Response"])
@pytest.mark.parametrize("end", ["\r\n", "\n"])
def test_a_response_is_read_whatever_its_stated_type(
    tmp_path: Path, content_type: str | None, kind: str, end: str
) -> None:
    """The block says that it is an HTTP response; servers may end header lines with LF alone."""
    text = SENTENCE.format(1)
    (tmp_path / "a.warc").write_bytes(record(kind, content_type, response(text, end=end)))
    assert outcomes(tmp_path / "a.warc") == [text]


def test_a_block_digest_is_verified_for_each_form(tmp_path: Path) -> None:
    block = response(SENTENCE.format(1), end="\n")
    digest = base64.b32encode(hashlib.sha1(block).digest()).decode()
    extra = f"WARC-Block-Digest: sha1:{digest}\r\n"
    damaged = block.replace(b"ferry", b"wherr")
    (tmp_path / "a.warc").write_bytes(
        record("response", HTTP, block, extra) + record("response", HTTP, damaged, extra)
    )
    assert outcomes(tmp_path / "a.warc") == [SENTENCE.format(1), "error"]


def draw_record(draw: random.Random, number: int) -> tuple[bytes, list[str]]:
    """Return a record, and its expected outcome ([] for records that describe others)."""
    text = SENTENCE.format(number)
    plain = text.encode()
    choices = (
        (record("response", draw.choice(TYPES), response(text)), [text]),
        (record("response", HTTP, response(text, "HTTP/1.1 404 Not Found")), ["http_status"]),
        (record("response", HTTP, b"HTTP/1.1 204 No Content\r\n\r\n"), ["http_status"]),
        (record("response", HTTP, b""), ["http_status"]),
        (record("response", HTTP, b"HTTP/1.1 200 OK\r\n\r\n" + plain), ["content_type"]),
        (record("response", "image/png", b"\x89PNG"), ["content_type"]),
        (record("resource", "text/html", PAGE.format(text).encode()), [text]),
        (record("resource", "text/plain; charset=utf-8", plain), [text]),
        (record("resource", HTTP, response(text)), [text]),
        (record("resource", None, plain), ["content_type"]),
        (record("conversion", "text/plain", plain), [text]),
        (record("conversion", None, plain), [text]),
        (record("conversion", "text/plain", b"HTTP/1.1 is a protocol. " + plain), None),
        (record(draw.choice(("request", "metadata", "warcinfo")), HTTP, b"GET / HTTP/1.1"), []),
        (record("revisit", HTTP, b"HTTP/1.1 200 OK\r\n\r\n"), []),
        (record("unknown", HTTP, response(text)), ["warc_type"]),
    )
    raw, expected = draw.choice(choices)
    return raw, [f"HTTP/1.1 is a protocol. {text}"] if expected is None else expected


@pytest.mark.parametrize("packing", ["plain", "each", "whole", "groups"])
@pytest.mark.parametrize("seed", range(8))
def test_every_record_is_read_dropped_or_named(tmp_path: Path, seed: int, packing: str) -> None:
    draw = random.Random(seed)
    drawn = [draw_record(draw, number) for number in range(40)]
    raws = [raw for raw, _ in drawn]
    path = tmp_path / ("a.warc" if packing == "plain" else "a.warc.gz")
    groups = {"plain": [raws], "each": [[raw] for raw in raws], "whole": [raws]}
    groups["groups"] = [raws[start : start + 7] for start in range(0, 40, 7)]
    members = [b"".join(group) for group in groups[packing]]
    path.write_bytes(b"".join(members if packing == "plain" else map(gzip.compress, members)))
    assert outcomes(path) == [outcome for _, expected in drawn for outcome in expected]


@pytest.mark.parametrize("seed", range(4))
def test_arc_pages_are_read_dropped_or_named(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    out, expected = b"filedesc:a.arc 0.0.0.0 20240501000000 text/plain 3\n1 0\n", []
    for number in range(20):
        text = SENTENCE.format(number)
        body, outcome = draw.choice(
            (
                (response(text), text),
                (response(text, end="\n"), text),
                (response(text, "HTTP/1.0 302 Found"), "http_status"),
                (PAGE.format(text).encode(), text),
                (b"\x89PNG", "content_type"),
            )
        )
        kind = "image/png" if outcome == "content_type" else "text/html"
        out += f"http://X.org/Aa 1.2.3.4 20240501000000 {kind} {len(body)}\n".encode() + body
        out += b"\n"
        expected.append(outcome)
    (tmp_path / "a.arc").write_bytes(out)
    assert outcomes(tmp_path / "a.arc") == expected
