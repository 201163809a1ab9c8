"""Sends one HTTP request to a checked IP address, with limits on time and size."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

__all__ = ["FetchError", "PrivateAddressError", "Response", "fetch", "find_address"]

_CHUNK_BYTES = 1 << 16
# Removed, since the body is stored without its transfer coding.
_OF_THE_WAY = ("transfer-encoding", "content-length", "connection")


class FetchError(Exception):
    """Raised if a request has no usable response; the message contains the reason."""


class PrivateAddressError(FetchError):
    """Raised if a host resolves to an IP address that is not public."""


@dataclass(frozen=True)
class Response:
    """HTTP response of a server.

    Attributes:
        head: status line and headers, as written to an archive.
        headers: dict from lower-case header name to value.
    """

    status: int
    head: bytes
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


def find_address(host: str, port: int, is_private_allowed: bool) -> str:
    """Resolve a host to the IP address to connect to.

    Raises:
        PrivateAddressError: one of the host's addresses is private, loopback or reserved.
        FetchError: the name does not resolve.
    """
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise FetchError(
            f"the host name {host} cannot be resolved ({error}). Check its spelling, and the "
            "network."
        ) from error
    addresses = [str(info[4][0]) for info in infos]
    for address in addresses:
        if not is_private_allowed and not _is_public(address):
            raise PrivateAddressError(
                f"{host} resolves to {address}, which is not a public address. To allow "
                "the address, add the host to private_hosts (--private-hosts)."
            )
    return addresses[0]


def _is_public(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    inner = getattr(parsed, "ipv4_mapped", None) or getattr(parsed, "sixtofour", None)
    return parsed.is_global and not parsed.is_multicast and (inner is None or inner.is_global)


class _Pinned(http.client.HTTPConnection):
    """HTTP connection to the checked IP address, even if the host name now resolves to a different
    one.
    """

    address = ""

    def connect(self) -> None:
        self.sock = socket.create_connection((self.address, self.port), self.timeout)


class _PinnedTls(http.client.HTTPSConnection):
    """HTTPS connection to the checked IP address; the certificate must match the host name."""

    address = ""

    def connect(self) -> None:
        plain = socket.create_connection((self.address, self.port), self.timeout)
        context = ssl.create_default_context()
        self.sock = context.wrap_socket(plain, server_hostname=self.host)


def fetch(
    url: str,
    headers: Mapping[str, str],
    *,
    is_private_allowed: bool,
    most_bytes: int,
    seconds: float,
) -> Response:
    """Send a GET request; redirects are not followed.

    Args:
        url: URL to request.
        headers: request headers.
        is_private_allowed: allow private addresses.
        most_bytes: largest size of the body; a larger one is an error.
        seconds: timeout of the whole request, even if the response trickles in.

    Raises:
        PrivateAddressError: see `find_address`.
        FetchError: there is no response, or it is not HTTP, too large, or too slow.
    """
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    host, path = parts.hostname or "", parts.path or "/"
    make: type[_Pinned | _PinnedTls] = _PinnedTls if secure else _Pinned
    connection = make(host, port, timeout=seconds)
    connection.address = find_address(host, port, is_private_allowed)
    watch = _Deadline(connection, seconds)
    try:
        connection.connect()
        with watch:
            target = f"{path}?{parts.query}" if parts.query else path
            connection.request("GET", target, headers=headers)
            answer = connection.getresponse()
            body = _read(answer, most_bytes)
    except (OSError, http.client.HTTPException, ValueError) as error:
        watch.check(url)
        raise FetchError(
            f"{url} cannot be fetched ({type(error).__name__}: {error}). Check the address, and "
            "the network."
        ) from error
    finally:
        connection.close()
    watch.check(url)
    if answer.length:
        raise FetchError(
            f"the download of {url} ended early: {answer.length} bytes are missing. Run the "
            "command again."
        )
    kept_headers = [
        header for header in answer.getheaders() if header[0].lower() not in _OF_THE_WAY
    ]
    lines = [f"HTTP/1.1 {answer.status} {answer.reason}"]
    lines += [f"{name}: {value}" for name, value in (*kept_headers, ("Content-Length", len(body)))]
    head = "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n"
    return Response(answer.status, head, body, _join_headers(answer.getheaders()))


def _join_headers(pairs: list[tuple[str, str]]) -> dict[str, str]:
    """Return a dict from lower-case header name to value; repeated headers are joined by commas."""
    joined: dict[str, str] = {}
    for name, value in pairs:
        name = name.lower()
        joined[name] = f"{joined[name]}, {value}" if name in joined else value
    return joined


class _Deadline:
    """Timer that closes a connection after a timeout."""

    def __init__(self, connection: http.client.HTTPConnection, seconds: float) -> None:
        self._connection, self._seconds, self._is_over = connection, seconds, False
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def _end(self) -> None:
        self._is_over = True
        if self._connection.sock is not None:
            with suppress(OSError):  # the connection may be closed already
                self._connection.sock.shutdown(socket.SHUT_RDWR)

    def check(self, url: str) -> None:
        """Raise `FetchError` if the timeout has passed."""
        if self._is_over:
            raise FetchError(
                f"the download of {url} was stopped after {self._seconds:g} s. Raise the time "
                "limit (--page-seconds)."
            )

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *exc: object) -> None:
        self._timer.cancel()


def _read(answer: http.client.HTTPResponse, most_bytes: int) -> bytes:
    parts, size = [], 0
    while chunk := answer.read1(_CHUNK_BYTES):
        parts.append(chunk)
        size += len(chunk)
        if size > most_bytes:
            raise ValueError(f"the page is larger than {most_bytes} bytes")
    return b"".join(parts)
