"""Collecting from servers of this machine: what may be asked, in what order, and what is kept."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.robotparser import RobotFileParser

import pytest

from bmforge.cli import main
from bmforge.data.collect import CollectConfig, collect
from bmforge.data.collect import archive as archive_module
from bmforge.data.collect.fetch import PrivateAddressError, find_address
from bmforge.data.collect.robots import parse_robots
from bmforge.data.collect.run import clean_url
from bmforge.data.collect.sitemaps import find_addresses
from bmforge.data.sources.document import Document
from bmforge.data.sources.files import read_records
from bmforge.data.sources.record import ReadOptions
from bmforge.errors import ConfigError, DataError

Answer = tuple[int, dict[str, str], bytes]


class Site:
    """A server of this machine: its pages, and what it was asked."""

    def __init__(self) -> None:
        self.pages: dict[str, Answer] = {"/robots.txt": (404, {}, b"")}
        self.asked: list[tuple[str, dict[str, str]]] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.asked.append((self.path, {k.lower(): v for k, v in self.headers.items()}))
                status, headers, body = site.pages.get(self.path, (404, {}, b"none"))
                etag = headers.get("ETag")
                if etag and self.headers.get("If-None-Match") == etag:
                    status, body = 304, b""
                self.send_response(status)
                length = headers.get("Content-Length", str(len(body)))
                for name, value in {"Content-Length": length, **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def url(self, path: str) -> str:
        return f"http://{self.host}{path}"

    def text(self, path: str, text: str, **headers: str) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        kind = {"Content-Type": "text/plain; charset=utf-8"}
        self.pages[path] = (200, {**kind, **named}, text.encode())

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.server.shutdown()
    made.server.server_close()


class Clock:
    """Time that passes when somebody waits."""

    def __init__(self) -> None:
        self.now, self.waits = 0.0, list[float]()

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


def run(
    site: Site, out: Path, *paths: str, clock: Clock | None = None, **changes: Any
) -> Counter[str]:
    """Collect from the site; return how many addresses came to what."""
    clock = clock or Clock()
    config = replace(CollectConfig(private_hosts=(site.host,)), **changes)
    urls = [site.url(path) for path in paths]
    return collect(urls, out, config, clock=clock, wait=clock.wait).outcomes


def texts(out: Path) -> dict[str, str]:
    """Return what the house's reader finds in the archive."""
    pytest.importorskip("fastwarc")
    found = [record.parse() for record in read_records(out / "pages.warc.gz", ReadOptions())]
    return {one.url: one.text for one in found if isinstance(one, Document)}


def lines(out: Path) -> dict[str, dict[str, Any]]:
    found = (json.loads(line) for line in (out / "collected.jsonl").open(encoding="utf-8"))
    return {line["url"]: line for line in found}


def test_pages_come_into_an_archive_that_others_read(site: Site, tmp_path: Path) -> None:
    fastwarc = pytest.importorskip("fastwarc.warc")
    site.text("/a", "the first page")
    site.text("/b?q=1", "春眠不觉晓")
    assert run(site, tmp_path, "/a", "/b?q=1", "/a#part") == {"kept": 2}
    assert site.paths() == ["/robots.txt", "/a", "/b?q=1"]
    assert "bmforge" in site.asked[0][1]["user-agent"]
    assert texts(tmp_path) == {site.url("/a"): "the first page", site.url("/b?q=1"): "春眠不觉晓"}
    for parse_http, verify in ((False, "verify_block_digest"), (True, "verify_payload_digest")):
        with (tmp_path / "pages.warc.gz").open("rb") as file:
            records = fastwarc.ArchiveIterator(file, parse_http=parse_http)
            assert [getattr(record, verify)() for record in records] == [True, True]


def test_robots_decide(site: Site, tmp_path: Path) -> None:
    rules = b"User-agent: *\nDisallow: /private\nAllow: /private/open\nCrawl-delay: 7\n"
    site.pages["/robots.txt"] = (200, {}, rules)
    for path in ("/a", "/private/x", "/private/open"):
        site.text(path, f"page {path}")
    clock = Clock()
    assert run(site, tmp_path, "/a", "/private/x", "/private/open", clock=clock) == {
        "kept": 2,
        "robots": 1,
    }
    assert "/private/x" not in site.paths()
    assert clock.waits[-1] == pytest.approx(7)


@pytest.mark.parametrize("status", [500, 503, 301])
def test_rules_that_cannot_be_had_mean_no(site: Site, tmp_path: Path, status: int) -> None:
    site.pages["/robots.txt"] = (status, {}, b"")
    site.text("/a", "a page")
    assert run(site, tmp_path, "/a", "/b") == {"failed": 2}
    assert set(site.paths()) == {"/robots.txt"}
    assert len(site.asked) <= 3
    assert "no page of the host is fetched" in lines(tmp_path)[site.url("/a")]["error"]


RULES = """
User-agent: other
Disallow: /

User-agent: bmforge
User-agent: another
Disallow: /a
Allow: /a/b
Disallow: /*.pdf$
Disallow: /q?*secret=
Sitemap: http://example.org/s.xml
Crawl-delay: x
"""


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/", True),
        ("/a", False),
        ("/a/x", False),
        ("/a/b", True),
        ("/a%2Fb", True),
        ("/x/y.pdf", False),
        ("/x/y.pdf?x", True),
        ("/q?id=1&secret=2", False),
        ("/q?id=1", True),
        ("/robots.txt", True),
    ],
)
def test_patterns_of_robots(path: str, allowed: bool) -> None:
    robots = parse_robots(RULES, "bmforge")
    assert robots.allows(path) is allowed
    assert robots.sitemaps == ("http://example.org/s.xml",)
    assert robots.delay_s is None


@pytest.mark.parametrize("agent", ["bmforge", "other", "nobody"])
def test_plain_rules_are_those_of_another_reader(agent: str) -> None:
    rules = "User-agent: *\nDisallow: /c\n\nUser-agent: bmforge\nDisallow: /a\nDisallow: /b/\n"
    rules += "\nUser-agent: other\nDisallow: /\n"
    other = RobotFileParser()
    other.parse(rules.splitlines())
    for path in ("/", "/a", "/ab", "/b", "/b/c", "/c/d", "/d?x=/a"):
        assert parse_robots(rules, agent).allows(path) == other.can_fetch(agent, path)


def test_hostile_patterns_take_linear_time() -> None:
    robots = parse_robots("User-agent: *\nDisallow: /" + "*a" * 5000 + "b$", "bmforge")
    assert robots.allows("/" + "a" * 20_000)


def test_lists_name_pages_of_allowed_hosts(site: Site, tmp_path: Path) -> None:
    entry = "<url><loc>{}</loc></url>"
    pages = [
        site.url("/a"),
        site.url("/b"),
        "http://elsewhere.example/",
        "ftp://x/",
        site.url("/a"),
    ]
    site.pages["/index.xml"] = (
        200,
        {},
        f"<?xml version='1.0'?><sitemapindex xmlns='http://www.sitemaps.org/schemas/sitemap/0.9'>"
        f"<sitemap><loc>{site.url('/s.xml')}</loc></sitemap></sitemapindex>".encode(),
    )
    named = "".join(map(entry.format, pages))
    site.pages["/s.xml"] = (200, {}, f"<urlset>{named}</urlset>".encode())
    feed = '<feed><entry><link href="/c"/></entry><link rel="self" href="/feed"/></feed>'
    site.pages["/feed"] = (200, {}, feed.encode())
    for path in "abc":
        site.text(f"/{path}", f"page {path}")
    outcomes = run(site, tmp_path, "/index.xml", "/feed")
    assert outcomes == {"kept": 3, "list": 3, "other_host": 1, "no_address": 1}
    assert set(texts(tmp_path)) == {site.url(f"/{path}") for path in "abc"}
    assert find_addresses(b"<!DOCTYPE a [<!ENTITY b 'c'>]><urlset><loc>&b;</loc></urlset>") == []
    assert find_addresses(b"<html><link>x</link></html>") is None
    assert find_addresses(b"<rss><channel><item><link>http://a/</link></item></channel>") == []


def test_redirects_end_and_stay_within_hosts(site: Site, tmp_path: Path) -> None:
    site.pages["/one"] = (301, {"Location": "/two"}, b"")
    site.pages["/two"] = (302, {"Location": "/one"}, b"")
    site.pages["/out"] = (302, {"Location": "http://169.254.169.254/secrets"}, b"")
    for number in range(20):
        site.pages[f"/long{number}"] = (302, {"Location": f"/long{number + 1}"}, b"")
    outcomes = run(site, tmp_path, "/one", "/out", "/long0")
    assert outcomes == {"redirect": 9, "other_host": 1}
    assert len([path for path in site.paths() if path.startswith("/long")]) == 6


def test_private_addresses_are_refused_unless_named(site: Site, tmp_path: Path) -> None:
    site.text("/a", "a page")
    assert run(site, tmp_path, "/a", private_hosts=()) == {"private_address": 1}
    assert site.asked == []
    for host in ("localhost", "10.0.0.1", "::1", "::ffff:127.0.0.1", "169.254.1.1", "224.0.0.1"):
        with pytest.raises(PrivateAddressError, match="private_hosts"):
            find_address(host, 80, False)


def test_limits_of_size_time_and_budget(site: Site, tmp_path: Path) -> None:
    site.text("/large", "x" * 5000)
    site.text("/cut", "short", Content_Length="900")
    for number in range(9):
        site.text(f"/{number}", f"page {number}")
    limits = {"most_page_bytes": 1000, "page_seconds": 0.5}
    outcomes = run(site, tmp_path / "a", "/large", "/cut", **limits)
    assert outcomes == {"failed": 2}
    errors = {url: line["error"] for url, line in lines(tmp_path / "a").items()}
    assert "larger than 1000 bytes" in errors[site.url("/large")]
    paths = [f"/{number}" for number in range(9)]
    assert run(site, tmp_path / "b", *paths, most_pages=4) == {"kept": 3}  # and robots.txt
    assert run(site, tmp_path / "b", *paths) == {"known": 3, "kept": 6}


def test_a_host_that_is_busy_is_asked_later(site: Site, tmp_path: Path) -> None:
    site.pages["/a"] = (503, {"Retry-After": "30"}, b"")
    clock = Clock()
    assert run(site, tmp_path, "/a", clock=clock) == {"status": 1}
    assert site.paths().count("/a") == 3
    assert clock.waits.count(30.0) == 2
    site.pages["/b"] = (429, {"Retry-After": "86400"}, b"")
    assert run(site, tmp_path, "/b") == {"status": 1}
    assert site.paths().count("/b") == 1


def test_directives_keep_a_page_out(site: Site, tmp_path: Path) -> None:
    site.text("/a", "kept")
    site.text("/b", "no", X_Robots_Tag="noai, noimageai")
    site.text("/c", "no", TDM_Reservation="1")
    site.text("/d", '<meta content="noai" name="robots"><p>no</p>')
    site.text("/e", '<meta name="robots" content="index, follow"><p>yes</p>')
    outcomes = run(site, tmp_path, "/a", "/b", "/c", "/d", "/e")
    assert outcomes == {"kept": 2, "directive": 3}
    assert set(texts(tmp_path)) == {site.url("/a"), site.url("/e")}
    assert lines(tmp_path)[site.url("/c")]["said"] == "TDM-Reservation: 1"


def test_only_what_changed_is_sent_again(site: Site, tmp_path: Path) -> None:
    site.text("/a", "as it was", ETag='"1"')
    site.text("/b", "old", ETag='"1"')
    run(site, tmp_path, "/a", "/b")
    site.text("/b", "new", ETag='"2"')
    assert run(site, tmp_path, "/a", "/b", again=True) == {"unchanged": 1, "kept": 1}
    assert run(site, tmp_path, "/a", "/b", again=True) == {"unchanged": 2}
    assert run(site, tmp_path, "/a", "/b") == {"known": 2}


class Killed(BaseException):
    """Stands for a kill."""


def test_going_on_after_kills(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [f"/{number}" for number in range(6)]
    for path in paths:
        site.text(path, f"page {path} " * 50)
    sync, left = archive_module.os.fsync, [0]

    def fragile(descriptor: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Killed
        sync(descriptor)

    monkeypatch.setattr(archive_module.os, "fsync", fragile)
    kills = 0
    while True:
        left[0] = 2 + kills % 3
        try:
            run(site, tmp_path, *paths)
        except Killed:
            kills += 1
        else:
            break
        assert kills < 50
    assert kills >= 2
    assert texts(tmp_path) == {site.url(path): f"page {path} " * 50 for path in paths}
    (tmp_path / "pages.warc.gz").write_bytes(b"")
    with pytest.raises(DataError, match="truncated or replaced"):
        run(site, tmp_path, *paths)


@pytest.mark.parametrize(
    ("url", "clean"),
    [
        ("HTTP://Example.ORG:80/a b#c", "http://example.org/a%20b"),
        ("https://example.org:8443", "https://example.org:8443/"),
        ("https://example.org/%E6%98%A5?q=春", "https://example.org/%E6%98%A5?q=%E6%98%A5"),
        ("ftp://example.org/", None),
        ("http://user@example.org/", None),
        ("http:///a", None),
        ("http://[::1", None),
        ("example.org", None),
    ],
)
def test_addresses_have_one_form(url: str, clean: str | None) -> None:
    if clean is None:
        with pytest.raises(ConfigError, match="is not"):
            clean_url(url)
    else:
        assert clean_url(url) == clean == clean_url(clean)


def test_the_command(site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site.text("/a", "a page")
    out = str(tmp_path / "out")
    options = ["--out", out, "--private-hosts", site.host, "--delay-s", "0.001"]
    assert main(["data", "collect", site.url("/a"), *options]) == 0
    assert "2 requests" in capsys.readouterr().out
    assert main(["data", "collect", "example.org", "--out", out]) == 2
    assert "is not" in capsys.readouterr().err
    assert main(["data", "collect", site.url("/a"), "--out", out, "--delay-s", "-1"]) == 2
    assert "delay_s=-1" in capsys.readouterr().err
