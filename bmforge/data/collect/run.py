"""Crawls given pages, sitemaps and feeds, within a set of allowed hosts and a budget.

Requests are sequential, with the delay of each host. robots.txt is obeyed; if it cannot be fetched,
no page of the host is requested. A page with a directive against AI use is not archived.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin, urlsplit, urlunsplit

from bmforge.data.collect.archive import Archive
from bmforge.data.collect.fetch import FetchError, PrivateAddressError, Response, fetch
from bmforge.data.collect.robots import MOST_BYTES, Robots, parse_robots
from bmforge.data.collect.sitemaps import find_addresses
from bmforge.errors import ConfigError
from bmforge.files import check_place
from bmforge.logging import ProgressBar
from bmforge.settings import CollectConfig

__all__ = ["AGENT", "CollectReport", "clean_url", "collect"]

AGENT = "bmforge"  # the token that a robots.txt names
_TRIES = 3
_MOST_REDIRECTS = 5
_LONGEST_WAIT_S = 120.0  # pages of a host that requests a longer delay are skipped
_LATER = (429, 500, 502, 503, 504)  # temporary errors: retried now, and by the next run
_FORBIDDING = re.compile(r"\b(?:no-?(?:image)?-?ai|no-?train(?:ing)?|no-?ml|noarchive)\b", re.I)
_NO_TRAINING = re.compile(r"\b(?:ai-train|train-ai)\s*=\s*(?:no?|false)\b", re.I)
_META = re.compile(rb"<meta\b[^>]{0,4000}>", re.IGNORECASE)
_META_ROBOTS = re.compile(
    rb"""(?:name|http-equiv)\s*=\s*["']?\s*"""
    rb"""(?:robots|x-robots-tag|bmforge|ai|tdm-reservation|content-usage|content-signal)\b""",
    re.IGNORECASE,
)
_META_CONTENT = re.compile(rb"""content\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""", re.IGNORECASE)
_HEAD_BYTES = 1 << 20
_HOST = re.compile(r"[\w.-]+|[0-9a-f:.]+", re.ASCII)


@dataclass
class CollectReport:
    """Result of a crawl: number of URLs per outcome, requests, and bytes."""

    out_dir: Path
    outcomes: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    body_bytes: int = 0


@dataclass
class _Host:
    """State of one host: robots.txt rules, reason for refusal, next request time, queued URLs."""

    robots: Robots | None = None
    refused: str = ""
    next_s: float = 0.0
    waiting: deque[tuple[str, int]] = field(default_factory=deque)


def collect(
    urls: Sequence[str],
    out_dir: str | os.PathLike[str],
    config: CollectConfig | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> CollectReport:
    """Crawl pages into ``OUT/pages.warc.gz``, or continue an earlier crawl.

    ``OUT/collected.jsonl`` has a line for each URL with its outcome. A recorded URL is requested
    again only if `config` says so; conditional requests then download only changed pages.

    Args:
        urls: URLs of pages, sitemaps and feeds; their hosts, and those of `config`, are allowed.
        out_dir: output directory.
        config: settings (default: `CollectConfig()`).
        clock, wait: functions used instead of `time.monotonic` and `time.sleep` in tests.

    Raises:
        ConfigError: a URL is invalid, or a setting is out of range.
    """
    config = config or CollectConfig()
    _check(config)
    cleaned = [clean_url(url) for url in urls]
    if not cleaned:
        raise ConfigError(
            "urls is empty (needed: at least one URL). Pass the URLs of the pages to collect."
        )
    check_place(Path(out_dir), "out_dir")
    hosts = {urlsplit(url).netloc for url in cleaned} | {host.lower() for host in config.hosts}
    with Archive(Path(out_dir)) as archive, ProgressBar("collect", config.most_pages) as bar:
        work = _Collection(config, archive, hosts, CollectReport(Path(out_dir)), clock, wait)
        for url in cleaned:
            work.add(url, 0)
        while (item := work.next()) is not None and work.has_budget():
            work.take(*item)
            bar.advance()
    return work.report


def _check(config: CollectConfig) -> None:
    for name in ("most_pages", "most_bytes", "most_page_bytes", "delay_s", "page_seconds"):
        value = getattr(config, name)
        if not value > 0:
            raise ConfigError(f"{name}={value} must be above 0.")


def _advise(url: str) -> str:
    if os.path.exists(url):
        return " It is a file or directory; bmforge prepare reads these."
    if re.fullmatch(r"[\w-]+(\.[\w-]+)+(:\d+)?(/.*)?", url):
        return f" Pass https://{url} if this is its address."
    return ""


def clean_url(url: str) -> str:
    """Return a URL in canonical form: no fragment, lower-case host, no default port.

    Raises:
        ConfigError: the URL is not http or https, or contains a user name.
    """
    try:
        parts = urlsplit(url.strip())
        host, port = (parts.hostname or "").lower(), parts.port
        if not host.isascii():
            host = host.encode("idna").decode("ascii")
    except ValueError as error:
        raise ConfigError(f"{url!r} is not a valid URL ({error}). Correct the URL.") from error
    if host and not _HOST.fullmatch(host):
        raise ConfigError(
            f"{url!r} is not a valid URL, because {host!r} is not a host name. Correct the URL."
        )
    if parts.scheme not in ("http", "https") or not host or parts.username is not None:
        raise ConfigError(
            f"{url!r} is not the URL of a page (needed: http://HOST/PATH or https://HOST/PATH, "
            f"without a user name).{_advise(url)}"
        )
    netloc = f"[{host}]" if ":" in host else host
    if port and port != {"http": 80, "https": 443}[parts.scheme]:
        netloc += f":{port}"
    safe = "/%:@!$&'()*+,;=~-._"
    path, query = quote(parts.path or "/", safe), quote(parts.query, safe + "?")
    return urlunsplit((parts.scheme, netloc, path, query, ""))


@dataclass
class _Collection:
    """State of a crawl: queued URLs per host, known URLs, and counts."""

    config: CollectConfig
    archive: Archive
    allowed: set[str]
    report: CollectReport
    clock: Callable[[], float]
    wait: Callable[[float], None]
    hosts: dict[str, _Host] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def add(self, url: str, redirects: int) -> None:
        """Queue a URL if it is new and its host is allowed."""
        if url in self.seen:
            return
        self.seen.add(url)
        parts = urlsplit(url)
        if parts.netloc not in self.allowed:
            self.report.outcomes["other_host"] += 1
            return
        record = self.archive.known.get(url)
        if record is not None and not self.config.again and not _is_temporary(record):
            self.report.outcomes["known"] += 1
            for more in record.get("named", ()):
                self.add_found(more, url, 0)
            return
        key = f"{parts.scheme}://{parts.netloc}"
        self.hosts.setdefault(key, _Host()).waiting.append((url, redirects))

    def add_found(self, address: str, base: str, redirects: int) -> None:
        """Queue a URL that was found in a page or sitemap, resolved against the base URL."""
        try:
            url = clean_url(urljoin(base, address))
        except (ConfigError, ValueError):
            self.report.outcomes["no_address"] += 1
            return
        self.add(url, redirects)

    def has_budget(self) -> bool:
        """Return True if the budget allows another request."""
        config, report = self.config, self.report
        return report.requests < config.most_pages and report.body_bytes < config.most_bytes

    def next(self) -> tuple[str, str, int] | None:
        """Wait for the next available host; return its key, a URL, and the redirect count."""
        ready = [(host.next_s, key) for key, host in self.hosts.items() if host.waiting]
        if not ready:
            return None
        _, key = min(ready)
        self._wait_for(self.hosts[key])
        return (key, *self.hosts[key].waiting.popleft())

    def _wait_for(self, host: _Host) -> None:
        left = host.next_s - self.clock()
        if left > 0:
            self.wait(left)

    def take(self, key: str, url: str, redirects: int) -> None:
        """Request one URL, and record the outcome."""
        host, parts = self.hosts[key], urlsplit(url)
        try:
            host.robots = host.robots or self._ask_robots(key, host)
            if host.robots.no_training:
                self._note(url, "directive", said=f"robots.txt: {host.robots.no_training}")
                return
            if not host.robots.allows(f"{parts.path}?{parts.query}" if parts.query else parts.path):
                self._note(url, "robots")
                return
            response = self._ask(url, host, self._conditions(url), self.config.most_page_bytes)
        except PrivateAddressError as error:
            self._note(url, "private_address", error=str(error))
        except FetchError as error:
            self._note(url, "failed", error=str(error))
        else:
            self._take_response(url, response, redirects)

    def _take_response(self, url: str, response: Response, redirects: int) -> None:
        status, location = response.status, response.headers.get("location", "")
        metadata = {
            "status": status,
            "etag": response.headers.get("etag", ""),
            "modified": response.headers.get("last-modified", ""),
        }
        if status == 304:
            before = self.archive.known.get(url, {})
            self._note(url, "unchanged", **{**metadata, "etag": before.get("etag", "")})
        elif 300 <= status < 400 and location:
            self._note(url, "redirect", status=status, named=[location])
            if redirects < _MOST_REDIRECTS:
                self.add_found(location, url, redirects + 1)
        elif status != 200:
            self._note(url, "status", status=status)
        elif (named := _find_addresses(response)) is not None:
            self._note(url, "list", **metadata, named=named)
            for address in named:
                self.add_found(address, url, 0)
        elif directive := find_directive(response):
            self._note(url, "directive", status=status, said=directive)
        else:
            date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            self.archive.add_page(url, response, date)
            self._note(url, "kept", **metadata, body_bytes=len(response.body))

    def _note(self, url: str, outcome: str, **metadata: object) -> None:
        self.report.outcomes[outcome] += 1
        self.archive.note(url, outcome, **metadata)

    def _conditions(self, url: str) -> dict[str, str]:
        """Return the conditional request headers of a URL, from its recorded ETag and date."""
        previous = self.archive.known.get(url, {})
        named = {
            "If-None-Match": previous.get("etag"),
            "If-Modified-Since": previous.get("modified"),
        }
        return {name: str(value) for name, value in named.items() if value}

    def _ask_robots(self, key: str, host: _Host) -> Robots:
        """Fetch a host's robots.txt; allow all paths if it has none, refuse the host on errors."""
        if host.refused:
            raise FetchError(host.refused)
        try:
            return self._read_robots(key, host)
        except PrivateAddressError:
            raise
        except FetchError as error:
            host.refused = str(error)
            raise

    def _read_robots(self, key: str, host: _Host) -> Robots:
        response = None
        url, redirects = f"{key}/robots.txt", 0
        while redirects <= _MOST_REDIRECTS:
            try:
                response = self._ask(url, host, {}, MOST_BYTES * 100)
            except PrivateAddressError:
                raise
            except FetchError as error:
                raise FetchError(
                    f"robots.txt cannot be read, so no page of the host is fetched: {error}"
                ) from error
            location = response.headers.get("location")
            if not (300 <= response.status < 400 and location):
                break
            # Follow redirects to other public hosts too (RFC 9309, section 2.3.1.2).
            url, redirects = urljoin(url, location), redirects + 1
        assert response is not None
        if response.status >= 500 or 300 <= response.status < 400 or response.status in _LATER:
            raise FetchError(
                "the server answered the request for robots.txt with the status "
                f"{response.status}, so no page of the host is fetched."
            )
        text = response.body[:MOST_BYTES].decode("utf-8", "replace")
        return parse_robots(text if response.status == 200 else "", AGENT)

    def _ask(self, url: str, host: _Host, conditions: dict[str, str], most_bytes: int) -> Response:
        """Send a request, up to three times with increasing delays."""
        headers = {"User-Agent": self.config.agent, "Accept-Encoding": "identity", **conditions}
        is_private_allowed = urlsplit(url).netloc in self.config.private_hosts
        for attempt in range(_TRIES):
            self._wait_for(host)
            delay = max(self.config.delay_s, (host.robots and host.robots.delay_s) or 0.0)
            self.report.requests += 1
            try:
                response = fetch(
                    url,
                    headers,
                    is_private_allowed=is_private_allowed,
                    most_bytes=most_bytes,
                    seconds=self.config.page_seconds,
                )
            except PrivateAddressError:
                raise
            except FetchError:
                host.next_s = self.clock() + delay * 2**attempt
                if attempt + 1 == _TRIES:
                    raise
                continue
            self.report.body_bytes += len(response.body)
            host.next_s = self.clock() + delay
            later = _retry_after(response, delay * 2 ** (attempt + 1))
            if response.status not in _LATER or attempt + 1 == _TRIES or later > _LONGEST_WAIT_S:
                return response
            host.next_s = self.clock() + later
        raise AssertionError("unreachable")


def _is_temporary(record: Mapping[str, Any]) -> bool:
    """Return True if a recorded failure is temporary, so that the URL is requested again."""
    return record["outcome"] == "failed" or record.get("status") in _LATER


def _find_addresses(response: Response) -> list[str] | None:
    """Return the URLs in a sitemap or feed; None if the response is an ordinary page."""
    return find_addresses(response.body, response.headers.get("content-type", "").lower())


def _retry_after(response: Response, otherwise: float) -> float:
    """Return the ``Retry-After`` delay of a response in seconds, or `otherwise` if it has none."""
    value = response.headers.get("retry-after", "")
    if value.isdigit():
        return float(value)
    try:
        return max((parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds(), otherwise)
    except (TypeError, ValueError):
        return otherwise


def find_directive(response: Response) -> str:
    """Return a page's directive against archiving or training, or "" if it has none.

    Checks the headers ``X-Robots-Tag``, ``TDM-Reservation: 1`` (W3C TDMRep), ``Content-Usage`` and
    ``Content-Signal``, and the equivalent meta tags.
    """
    for name in ("X-Robots-Tag", "TDM-Reservation", "Content-Usage", "Content-Signal"):
        value = response.headers.get(name.lower(), "")
        if _disallows_indexing(name.lower(), value):
            return f"{name}: {value}"
    for meta in _META.findall(response.body[:_HEAD_BYTES]):
        named, content = _META_ROBOTS.search(meta), _META_CONTENT.search(meta)
        if named and content:
            content_value = (
                b"".join(part or b"" for part in content.groups()).decode("latin-1").strip()
            )
            if _disallows_indexing(
                "tdm-reservation" if b"tdm-reservation" in meta.lower() else "", content_value
            ):
                return meta.decode("latin-1")
            if (
                re.search(rb"""name\s*=\s*["']?\s*ai\b""", meta, re.I)
                and content_value.lower() == "none"
            ):
                return meta.decode("latin-1")
    return ""


def _disallows_indexing(name: str, value: str) -> bool:
    if name == "tdm-reservation":
        return value.split(",")[0].strip() == "1"
    return bool(_FORBIDDING.search(value) or _NO_TRAINING.search(value))
