"""robots.txt, directives, sitemaps and retries: the rules of RFC 9309 and of Google's parser."""

from __future__ import annotations

import gzip
import http.server
import itertools
import random
import threading
from typing import ClassVar

import pytest

from bmforge.data.collect import CollectConfig, collect
from bmforge.data.collect.fetch import Response
from bmforge.data.collect.robots import parse_robots
from bmforge.data.collect.run import clean_url, find_directive
from bmforge.data.collect.sitemaps import find_addresses
from bmforge.errors import ConfigError

# robots.txt, agent, path, allowed. RFC 9309 sections 2.2 and 5, and what Google's parser accepts.
ROBOTS = [
    ("user-agent: FooBot\ndisallow: /\n", "FooBot", "/x/y", False),
    ("foo: FooBot\nbar: /\n", "FooBot", "/x/y", True),
    ("user-agent FooBot\ndisallow /\n", "FooBot", "/x/y", False),  # without colons
    ("USER-AGENT: FooBot\nALLOW: /x/\nDISALLOW: /\n", "foobot", "/x/y", True),
    ("user-agent: FOO BAR\nallow: /x/\ndisallow: /\n", "foo", "/a", False),
    ("user-agent: FOO/1.0\ndisallow: /\n", "Foo", "/a", False),
    ("user-agent: bmforge/2.1 (+http://x)\ndisallow: /\n", "bmforge", "/a", False),
    ("user-agent: bmforgebot\ndisallow: /\n", "bmforge", "/a", True),
    ("user-agent: *\ndisallow: /\nuser-agent: FooBot\nallow: /\n", "FooBot", "/a", True),
    ("user-agent: *\ndisallow: /\nuser-agent: FooBot\n", "FooBot", "/a", True),
    ("user-agent: * baz\ndisallow: /\n", "FooBot", "/a", False),
    ("disallow: /\nuser-agent: FooBot\nallow: /b\n", "FooBot", "/a", True),  # outside a group
    # groups of one agent are one; other fields do not end the list of agents
    ("user-agent: a\ndisallow: /1\nuser-agent: b\nuser-agent: a\ndisallow: /2\n", "a", "/2", False),
    ("user-agent: a\ndisallow: /1\nuser-agent: b\nuser-agent: a\ndisallow: /2\n", "b", "/1", True),
    ("user-agent: a\nsitemap: x\nuser-agent: b\ndisallow: /\n", "a", "/x", False),
    ("user-agent: a\ncrawl-delay: 5\nuser-agent: b\ndisallow: /\n", "a", "/x", False),
    ("user-agent: a\nunknown: 5\nuser-agent: b\ndisallow: /\n", "a", "/x", False),
    # the longest pattern decides, of equals the one that allows
    ("user-agent: f\ndisallow: /x/page.html\nallow: /x/\n", "f", "/x/page.html", False),
    ("user-agent: f\nallow: /x/page.html\ndisallow: /x/\n", "f", "/x/page.html", True),
    ("user-agent: f\ndisallow: \nallow: \n", "f", "/x", True),
    ("user-agent: f\ndisallow: /\nallow: /\n", "f", "/x", True),
    ("user-agent: f\ndisallow: /x\nallow: /x/\n", "f", "/x", False),
    ("user-agent: f\nallow: /page\ndisallow: /*.html\n", "f", "/page.html", False),
    ("user-agent: f\nallow: /x/page.\ndisallow: /*.html\n", "f", "/x/page.html", True),
    ("user-agent: f\ndisallow: /foo*quz\n", "f", "/foo/bar/quz", False),
    ("user-agent: f\ndisallow: /foo/*$\n", "f", "/foo/x", False),
    ("user-agent: f\ndisallow: /*.php$\n", "f", "/a.php?x", True),
    ("user-agent: f\ndisallow: /*.php$\n", "f", "/a.php", False),
    ("user-agent: f\ndisallow: /a$\n", "f", "/a$b", True),
    ("user-agent: f\ndisallow: /x/y\n", "f", "/X/y", True),  # paths have a case
    # escapes
    ("user-agent: f\ndisallow: /ツ\n", "f", "/%E3%83%84", False),
    ("user-agent: f\ndisallow: /%E3%83%84\n", "f", "/ツ", False),
    ("user-agent: f\ndisallow: /foo/bar?baz=http%3A%2F%2Ff\n", "f", "/foo/bar?baz=http://f", False),
    ("user-agent: f\ndisallow: /file-with-a-%2A.html\n", "f", "/file-with-a-*.html", False),
    ("user-agent: f\ndisallow: /file-with-a-%2A.html\n", "f", "/file-with-a-b.html", True),
    ("user-agent: f\ndisallow: /foo-%24\n", "f", "/foo-$x", False),
    ("user-agent: f\ndisallow: /foo-%24\n", "f", "/foo-", True),
    # forms of lines
    ("\ufeffuser-agent: f\ndisallow: /\n", "f", "/x", False),
    ("user-agent: f\rdisallow: /\r", "f", "/x", False),
    ("user-agent: f\r\ndisallow: /\r\n", "f", "/x", False),
    ("user-agent: f # a comment\ndisallow: / # all\n", "f", "/x", False),
    ("  user-agent \t: f\n\tdisallow\t:  /x  \n", "f", "/x", False),
    ("user-agent: f\ndisallow: /a\u2028b\n", "f", "/a", True),
    *(
        (f"user-agent: f\n{typo}: /\n", "f", "/x", False)
        for typo in ("dissallow", "dissalow", "disalow", "diasllow", "disallaw")
    ),
    *((f"{typo}: f\ndisallow: /\n", "f", "/x", False) for typo in ("useragent", "user agent")),
    ("user-agent: f\ndisallow: /\n", "f", "/robots.txt", True),
]


@pytest.mark.parametrize(("text", "agent", "path", "allowed"), ROBOTS)
def test_robots(text, agent, path, allowed):
    assert parse_robots(text, agent).allows(path) == allowed


def fits_plainly(rule: str, path: str) -> bool:
    """Match a pattern by trying every split: slow and plain."""
    if rule == "$" or not rule:
        return not rule or not path
    if rule[0] == "*":
        return any(fits_plainly(rule[1:], path[at:]) for at in range(len(path) + 1))
    return bool(path) and path[0] == rule[0] and fits_plainly(rule[1:], path[1:])


@pytest.mark.parametrize("seed", range(20))
def test_patterns_match_as_a_plain_search_says(seed):
    draw = random.Random(seed)
    for _ in range(100):
        rules = [
            (
                draw.choice(("allow", "disallow")),
                "/" + "".join(draw.choices("ab*", k=draw.randrange(5))),
            )
            for _ in range(3)
        ]
        rules = [(kind, rule + draw.choice(("", "$"))) for kind, rule in rules]
        path = "/" + "".join(draw.choices("ab", k=draw.randrange(6)))
        text = "user-agent: f\n" + "".join(f"{kind}: {rule}\n" for kind, rule in rules)
        fitting = [(len(rule), kind == "allow") for kind, rule in rules if fits_plainly(rule, path)]
        assert parse_robots(text, "f").allows(path) == (max(fitting)[1] if fitting else True)


FORBIDDEN = ("noai", "noimageai", "NoAI", "notrain", "no-ai", "noarchive", "noindex, noai", "noml")
USAGE = ("train-ai=n", "ai-train=no", "search=yes, ai-train=no", "train-ai = n")


def response(headers: list[tuple[str, str]] = (), body: str = "<p>text") -> Response:
    joined: dict[str, str] = {}
    for name, value in headers:
        joined[name] = f"{joined[name]}, {value}" if name in joined else value
    return Response(200, b"", body.encode(), joined)


@pytest.mark.parametrize("said", FORBIDDEN)
def test_directives_in_headers_and_meta_tags(said):
    assert find_directive(response([("x-robots-tag", said)]))
    assert find_directive(response([("x-robots-tag", "noodp"), ("x-robots-tag", f"bot: {said}")]))
    for name, quote in itertools.product(("robots", "bmforge", "ROBOTS"), ('"', "'")):
        for pair in ((f"name={quote}{name}{quote}", f"content={quote}{said}{quote}"),):
            assert find_directive(response(body=f"<head><meta {' '.join(pair)}>"))
            assert find_directive(response(body=f"<head><meta {' '.join(pair[::-1])} />"))


@pytest.mark.parametrize("said", USAGE)
def test_preferences_against_training(said):
    for name in ("content-usage", "content-signal"):
        assert find_directive(response([(name, said)]))
        assert parse_robots(f"user-agent: *\n{name}: {said}\nallow: /\n", "bmforge").no_training
    assert not find_directive(response([("content-signal", "ai-train=yes, search=no")]))
    assert find_directive(response([("tdm-reservation", "1")]))
    assert not find_directive(response([("tdm-reservation", "0"), ("x-robots-tag", "index")]))
    assert not find_directive(response(body='<meta name="description" content="noai">'))


SITEMAP = (
    '<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9" '
    'xmlns:image="http://www.google.com/schemas/sitemap-image/1.1"><url><loc> http://h/1 </loc>'
    "<image:image><image:loc>http://h/a.jpg</image:loc></image:image></url></urlset>"
)


def test_sitemaps_packed_as_text_and_with_images():
    assert find_addresses(SITEMAP.encode()) == ["http://h/1"]
    assert find_addresses(gzip.compress(SITEMAP.encode())) == ["http://h/1"]
    assert find_addresses(b"http://h/1\r\nhttps://h/2\n", "text/plain") == [
        "http://h/1",
        "https://h/2",
    ]
    assert find_addresses(gzip.compress(b"http://h/1\n")) == ["http://h/1"]
    assert find_addresses(b"See http://h/1 for more.", "text/plain") is None
    assert find_addresses(gzip.compress(b"a" * (60 << 20))) is None


class Server(http.server.BaseHTTPRequestHandler):
    """Answers with the status that a test sets for a path."""

    status: ClassVar[dict[str, list[int]]] = {}
    robots_tags: tuple[str, ...] = ()

    def log_message(self, *_: object) -> None:
        """Write nothing."""

    def do_GET(self) -> None:
        """Answer."""
        left = self.status.get(self.path, [200])
        status = left.pop(0) if len(left) > 1 else left[0]
        body = b"" if self.path == "/robots.txt" else b"<p>page"
        self.send_response(status)
        for tag in self.robots_tags:
            self.send_header("X-Robots-Tag", tag)
        self.send_header("Retry-After", "0")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def host():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()
    Server.status, Server.robots_tags = {}, ()


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_passing_failure_is_asked_again_by_the_next_run(host, tmp_path, status):
    config = CollectConfig(private_hosts=(host,), delay_s=0.001)
    urls = [f"http://{host}/a", f"http://{host}/b"]
    Server.status = {"/a": [status], "/b": [status, 200]}
    first = collect(urls, tmp_path / "out", config, wait=lambda seconds: None)
    assert dict(first.outcomes) == {"status": 1, "kept": 1}  # /b answered at the second try
    Server.status = {}
    second = collect(urls, tmp_path / "out", config, wait=lambda seconds: None)
    assert dict(second.outcomes) == {"kept": 1, "known": 1}
    assert second.requests == 2  # robots.txt and the page that lacked


def test_all_headers_of_one_name_count(host, tmp_path):
    Server.robots_tags = ("noai", "all")
    config = CollectConfig(private_hosts=(host,), delay_s=0.001)
    report = collect([f"http://{host}/a"], tmp_path / "out", config, wait=lambda seconds: None)
    assert dict(report.outcomes) == {"directive": 1}


@pytest.mark.parametrize(
    "url",
    [
        "http://exa mple.org/",
        "http://a\tb/",
        "ftp://h/",
        "http:///x",
        "http://h:x/",
        "http://a_b c/",
    ],
)
def test_an_address_that_is_none_is_one_sentence(url):
    with pytest.raises(ConfigError, match="is not"):
        clean_url(url.replace("\t", "%"))
