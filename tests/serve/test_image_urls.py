"""Images that messages name by URL: fetched from allowed domains only, within limits."""

from __future__ import annotations

import base64
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_image_requests import directory, part, said, uri, vision  # noqa: F401
from vision_models import make_image

from bmforge.errors import ConfigError
from bmforge.infer import Engine
from bmforge.serve import media
from bmforge.serve.errors import RequestError
from bmforge.serve.media import MediaFetcher
from bmforge.serve.settings import ServeConfig

PIXELS = b"\x89PNG not decoded here"
Answer = Callable[[BaseHTTPRequestHandler], None]


class Site(ThreadingHTTPServer):
    """A web server on this machine; its pages are functions."""

    def __init__(self, pages: dict[str, Answer]) -> None:
        self.seen: list[tuple[str, dict[str, str]]] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                site.seen.append((self.path, dict(self.headers)))
                pages.get(self.path.partition("?")[0], send(404, "text/plain", b"none"))(self)

            def log_message(self, *_: Any) -> None:
                return

        super().__init__(("127.0.0.1", 0), Handler)
        self.domain = f"127.0.0.1:{self.server_address[1]}"
        self.url = f"http://{self.domain}"


def send(status: int, kind: str, data: bytes, **headers: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(data)

    return answer


def endless(handler: BaseHTTPRequestHandler) -> None:
    """An image without a length that does not end."""
    handler.send_response(200)
    handler.send_header("Content-Type", "image/png")
    handler.end_headers()
    try:
        while True:
            handler.wfile.write(bytes(1 << 14))
    except OSError:
        handler.close_connection = True


def slow(handler: BaseHTTPRequestHandler) -> None:
    """Headers that arrive byte by byte, faster than any timeout of a single read."""
    try:
        for byte in b"HTTP/1.1 200 OK\r\nX: " + b"a" * 2000:
            handler.wfile.write(bytes([byte]))
            time.sleep(0.05)
    except OSError:
        handler.close_connection = True


@contextmanager
def site(pages: dict[str, Answer]) -> Iterator[Site]:
    with Site(pages) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def fetcher(domain: str, **limits: Any) -> MediaFetcher:
    return MediaFetcher(ServeConfig(allowed_media_domains=(domain,), **limits))


def fetch(domain: str, url: str, **limits: Any) -> str:
    """Return the data URI of an image."""
    return fetcher(domain, **limits).fetch_all({url: "messages.0.content"})[url]


def refusal(domain: str, url: str, **limits: Any) -> str:
    with pytest.raises(RequestError) as caught:
        fetch(domain, url, **limits)
    assert caught.value.status_code == 400
    return str(caught.value)


def test_answers_are_those_of_the_same_images_as_data(
    start: Any,
    vision: Engine,  # noqa: F811
    directory: Path,  # noqa: F811
) -> None:
    """All three interfaces read an image from an allowed URL, and refuse other URLs by name."""
    picture = make_image(40, 30, 1)
    data = uri(picture)
    page = send(200, "image/png; q=1", base64.b64decode(data.partition(",")[2]))
    with (
        site({"/a%20b.png": page}) as web,
        start(other=vision, place=directory, allowed_media_domains=(web.domain,)) as server,
    ):

        def post(path: str, **body: Any) -> httpx.Response:
            body |= {"model": server.serving.name, "temperature": 0}
            return httpx.post(f"{server.url}{path}", json=body, timeout=60)

        def chat(url: str) -> httpx.Response:
            return post("/v1/chat/completions", messages=said("a", part(url)), max_tokens=8)

        link = f"{web.url}/a b.png?size=1&x=%20".replace("a b", "a%20b")
        want, got = chat(data).json(), chat(link).json()
        assert got["choices"] == want["choices"]
        assert got["usage"]["prompt_tokens"] == want["usage"]["prompt_tokens"]
        assert web.seen[0][0] == "/a%20b.png?size=1&x=%20"
        assert not {"Authorization", "Cookie", "Referer"} & web.seen[0][1].keys()
        text = want["choices"][0]["message"]["content"]
        item = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": link}]
        answer = post(
            "/v1/responses", input=[{"role": "user", "content": item}], max_output_tokens=8
        )
        assert [p["text"] for o in answer.json()["output"] for p in o["content"]] == [text]
        block = [{"type": "text", "text": "a"},
                 {"type": "image", "source": {"type": "url", "url": link}}]  # fmt: skip
        message = post("/v1/messages", messages=[{"role": "user", "content": block}], max_tokens=8)
        assert [b["text"] for b in message.json()["content"]] == [text]

        error = chat("http://127.0.0.1:1/a.png").json()["error"]
        assert error["param"] == "messages.0.content"
        assert "--allowed-media-domains" in error["message"]


def test_models_of_text_have_no_domains(start: Any) -> None:
    with (
        pytest.raises(ConfigError, match=r"allowed_media_domains.*supports only text"),
        start(allowed_media_domains=("a.example",)),
    ):
        pass


def test_what_a_site_may_answer() -> None:
    pages = {
        "/image": send(200, "image/png", PIXELS),
        "/text": send(200, "text/html", b"<img>"),
        "/gzip": send(200, "image/png", PIXELS, Content_Encoding="gzip"),
        "/large": send(200, "image/png", bytes(3000)),
        "/endless": endless,
        "/moved": send(302, "text/plain", b"", Location="/image?again"),
        "/loop": send(302, "text/plain", b"", Location="/loop"),
        "/away": send(301, "text/plain", b"", Location="http://169.254.169.254/latest"),
        "/file": send(307, "text/plain", b"", Location="file:///etc/passwd"),
    }
    with site(pages) as web:
        assert fetch(web.domain, f"{web.url}/moved").startswith("data:image/png;base64,iVBOR")
        for path, problem in {
            "/text": "image/*", "/gzip": "encoding", "/none": "status 404", "/loop": "3 redirects",
            "/away": "'169.254.169.254'", "/file": "not valid", "/large": "--max-media-bytes",
            "/endless": "--max-media-bytes",
        }.items():  # fmt: skip
            assert problem in refusal(web.domain, web.url + path, max_media_bytes=2000), path
        urls = {f"{web.url}/image?{number}": "messages.0.content" for number in range(3)}
        assert len(fetcher(web.domain).fetch_all(urls)) == 3
        with pytest.raises(RequestError, match="max-media-bytes"):
            fetcher(web.domain, max_media_bytes=2 * len(PIXELS)).fetch_all(urls)


def test_a_slow_site_ends_at_the_time_limit() -> None:
    with site({"/slow": slow}) as web:
        begin = time.monotonic()
        assert "within 0.5 s" in refusal(web.domain, f"{web.url}/slow", media_s=0.5)
        assert time.monotonic() - begin < 10


@pytest.mark.parametrize(
    "url",
    [
        "http://evil.example/a.png", "http://allowed.example.evil.example/a", "ftp://allowed.example/a",
        "http://allowed.example:22/a", "http://user@allowed.example/a", "http:///a", "http:a",
        "http://allowed.example\\@evil.example/a", "http://evil.example#@allowed.example/a",
        "http://allowed.example/a b", "http://allowed.example/\r\nX: 1", "http://allowed.example:x/",
        "http://[::1/a", "http://2130706433/a", "https://allowed.example:0/a", "http://\u2100/a",
    ],
)  # fmt: skip
def test_urls_that_are_refused_without_a_connection(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*_: Any, **__: Any) -> Any:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    refusal("allowed.example", url)


ADDRESSES = [
    "127.0.0.1", "10.0.0.1", "169.254.169.254", "192.168.1.1", "100.64.0.1", "0.0.0.0", "::1",
    "fe80::1%eth0", "fd00::1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::", "224.0.0.1",
]  # fmt: skip


@pytest.mark.parametrize("address", ADDRESSES)
def test_names_with_private_addresses_are_refused(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One private address among public ones suffices; the name server may be the attacker's."""
    entries = [(0, 0, 0, "", ("93.184.215.14", 80)), (0, 0, 0, "", (address, 80))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: entries)
    assert "not public" in refusal("allowed.example", "http://allowed.example/a.png")


def test_the_checked_address_is_the_one_that_is_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host is looked up once, so that a second answer of the name server has no effect."""
    looked_up: list[str] = []
    with site({"/a.png": send(200, "image/png", PIXELS)}) as web:
        port = web.server_address[1]

        def look_up(host: str, *_: Any, **__: Any) -> Any:
            looked_up.append(host)
            return [(0, 0, 0, "", ("93.184.215.14", port))]

        def connect(address: tuple[str, int], timeout: float) -> socket.socket:
            assert address == ("93.184.215.14", port)
            connection = socket.socket()
            connection.settimeout(timeout)
            connection.connect(("127.0.0.1", port))
            return connection

        monkeypatch.setattr(media.socket, "getaddrinfo", look_up)
        monkeypatch.setattr(media.socket, "create_connection", connect)
        found = fetch(f"allowed.example:{port}", f"http://Allowed.Example:{port}/a.png")
    assert found.startswith("data:image/png")
    assert looked_up == ["allowed.example"]
    assert web.seen[0][1]["Host"] == f"allowed.example:{port}"


def test_domains_are_checked_at_the_start() -> None:
    for domain in ("", "https://a.example", "a.example/b", "user@a.example", "a:b", "*", "a b"):
        with pytest.raises(ConfigError, match="allowed_media_domains"):
            ServeConfig(allowed_media_domains=(domain,))
    ServeConfig(allowed_media_domains=("upload.wikimedia.org", "10.0.0.5:8080", "[::1]:80"))
