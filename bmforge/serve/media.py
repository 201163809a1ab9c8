"""Downloads images by URL for requests, from domains in the operator's allowlist.

A client that chooses URLs could make the server read internal services (server-side
request forgery). So only listed hosts are contacted, and the connection uses the address that was
checked: a second DNS query could return another address.
"""

from __future__ import annotations

import base64
import http.client
import ipaddress
import re
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from typing import Any
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from anyio import CapacityLimiter, to_thread

from bmforge import __version__
from bmforge.errors import DataError
from bmforge.serve.errors import RequestError
from bmforge.serve.message_types import ImagePart, Message
from bmforge.serve.openai_types import ChatRequest
from bmforge.serve.settings import ServeConfig, split_domain

__all__ = ["MediaFetcher", "fetch_images"]

_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 3
_CHUNK_BYTES = 1 << 16
_THREADS = 8
# URL parsers disagree on these characters, so that a check could see another host than the client.
_AMBIGUOUS = re.compile(r"[\x00-\x20\x7f\\]")
# IPv6 networks whose addresses contain an IPv4 address: NAT64, 6to4 and Teredo.
_TRANSLATED = [ipaddress.ip_network(net) for net in ("64:ff9b::/32", "2002::/16", "2001::/32")]
_ADVICE = "Send the image as a data URI."


class MediaFetcher:
    """Fetches images by HTTP and HTTPS from allowed domains.

    Args:
        config: configuration with the domains and limits.
    """

    def __init__(self, config: ServeConfig) -> None:
        domains = config.access.allowed_media_domains
        self._allowed = [split_domain(domain) for domain in domains]
        self._most_bytes, self._seconds = config.limits.max_media_bytes, config.timeouts.media_s
        self.limiter = CapacityLimiter(_THREADS)

    def __bool__(self) -> bool:
        """Whether any domain is allowed."""
        return bool(self._allowed)

    def fetch_all(self, fields: Mapping[str, str]) -> dict[str, str]:
        """Fetch the images of a request; return a dict from URL to data URI.

        The size and time limits apply to all images together.

        Args:
            fields: dict from URL to the request field that contains it, for error messages.

        Raises:
            RequestError: a URL is not allowed, a limit is exceeded, or a response is not an image.
        """
        deadline, left, images = time.monotonic() + self._seconds, self._most_bytes, {}
        for url, field in fields.items():
            try:
                kind, data = self._fetch(url, deadline, left)
            except DataError as error:
                raise RequestError(f"{field}: {error}", field, code="invalid_value") from error
            left -= len(data)
            images[url] = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        return images

    def _fetch(self, url: str, deadline: float, most: int) -> tuple[str, bytes]:
        """Return the media type and the bytes of an image, following redirects."""
        for _ in range(_MOST_REDIRECTS + 1):
            target = self._check_url(url)
            address = _find_address(str(target.hostname), _port_of(target))
            try:
                with closing(_Connection(target, address, deadline)) as connection:
                    response = connection.ask(target)
                    if response.status not in _REDIRECTS:
                        return _read_image(response, most)
                    url = urljoin(url, response.getheader("location") or "")
            except DataError:
                raise
            except (OSError, http.client.HTTPException, ValueError) as error:
                if time.monotonic() >= deadline:
                    raise DataError(
                        f"the images were not received within {self._seconds:g} s. {_ADVICE}"
                    ) from error
                raise DataError(
                    f"the image cannot be fetched ({type(error).__name__}). {_ADVICE}"
                ) from error
        raise DataError(f"the image's URL has more than {_MOST_REDIRECTS} redirects. {_ADVICE}")

    def _check_url(self, url: str) -> SplitResult:
        """Split a URL; raise `DataError` if it is malformed or its host is not allowed."""
        malformed = DataError(
            "the image's URL is not valid (needed: https://host/path, without a user name). "
            f"{_ADVICE}"
        )
        if _AMBIGUOUS.search(url):
            raise malformed
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").encode("idna").decode(), _port_of(parts)
        except (KeyError, ValueError):
            raise malformed from None
        if not host or parts.username is not None or parts.password is not None:
            raise malformed
        for allowed_host, allowed_port in self._allowed:
            ports = _PORTS.values() if allowed_port is None else (allowed_port,)
            if host.rstrip(".") == allowed_host and port in ports:
                return parts
        raise DataError(
            f"this server does not fetch images from {host[:80]!r}, port {port}. {_ADVICE} The "
            "operator allows domains with --allowed-media-domains."
        )


async def fetch_images(body: ChatRequest, fetcher: MediaFetcher) -> ChatRequest:
    """Return a request in which the images at allowed URLs are data URIs.

    Without allowed domains, the request is returned unchanged, and its URLs are refused later.

    Raises:
        RequestError: an image cannot be fetched.
    """
    fields = {
        url: f"messages.{number}.content"
        for number, message in enumerate(body.messages)
        for url in message.images
        if url.lower().startswith(("http:", "https:"))
    }
    if not (fetcher and fields):
        return body
    data = await to_thread.run_sync(fetcher.fetch_all, fields, limiter=fetcher.limiter)
    messages = [_with_images(message, data) for message in body.messages]
    return body.model_copy(update={"messages": messages})


def _with_images(message: Message, data: dict[str, str]) -> Message:
    """Return a message whose image URLs are replaced by those in `data`."""
    if not isinstance(message.content, list):
        return message
    parts: list[Any] = []
    for part in message.content:
        if isinstance(part, ImagePart):
            url = data.get(part.image_url.url, part.image_url.url)
            part = part.model_copy(
                update={"image_url": part.image_url.model_copy(update={"url": url})}
            )
        parts.append(part)
    return message.model_copy(update={"content": parts})


class _Connection(http.client.HTTPConnection):
    """HTTP connection to a checked address, which is shut down at a deadline.

    Socket timeouts limit only each read, so a server could send one byte at a time for hours.
    """

    def __init__(self, target: SplitResult, address: str, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        super().__init__(str(target.hostname), _port_of(target), timeout=left)
        self.default_port = _PORTS[target.scheme]
        self._address, self._is_secure = address, target.scheme == "https"
        self._left_s = left

    def connect(self) -> None:
        """Connect to the checked address; the certificate must be that of the host name."""
        self.sock = socket.create_connection((self._address, self.port), self.timeout)
        if self._is_secure:
            self.sock = ssl.create_default_context().wrap_socket(
                self.sock, server_hostname=self.host, do_handshake_on_connect=False
            )
        self._timer = threading.Timer(self._left_s, self._shut_down)
        self._timer.daemon = True
        self._timer.start()
        if isinstance(self.sock, ssl.SSLSocket):
            self.sock.do_handshake()

    def ask(self, target: SplitResult) -> http.client.HTTPResponse:
        """Send a GET request without cookies or credentials; return the response."""
        path = quote(target.path or "/", safe="/%:@!$&'()*+,;=~")
        query = quote(target.query, safe="/%:@!$&'()*+,;=~?")
        headers = {"Accept": "image/*", "User-Agent": f"bmforge/{__version__}"}
        self.request("GET", f"{path}?{query}" if query else path, headers=headers)
        return self.getresponse()

    def close(self) -> None:
        """Close the connection and stop the timer."""
        timer = getattr(self, "_timer", None)
        if timer is not None:
            timer.cancel()
        super().close()

    def _shut_down(self) -> None:
        # The base class's method: that of SSLSocket would also change the state that another
        # thread is reading.
        with suppress(OSError):
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


def _port_of(parts: SplitResult) -> int:
    return _PORTS[parts.scheme] if parts.port is None else parts.port


def _find_address(host: str, port: int) -> str:
    """Return the address of a host; names must have public addresses only.

    An address that is itself in the list of allowed domains may be private.
    """
    with suppress(ValueError):
        return str(ipaddress.ip_address(host))
    try:
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise DataError(
            f"the address of the host {host[:80]!r} cannot be found. {_ADVICE}"
        ) from error
    addresses = [str(entry[4][0]).partition("%")[0] for entry in entries]
    if not all(map(_is_public, addresses)):
        raise DataError(
            f"the host {host[:80]!r} has an address that is not public. {_ADVICE} The operator "
            "can allow the address itself with --allowed-media-domains."
        )
    return addresses[0]


def _is_public(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    is_translated = parsed.version == 6 and any(parsed in network for network in _TRANSLATED)
    return parsed.is_global and not parsed.is_multicast and not is_translated


def _read_image(response: http.client.HTTPResponse, most: int) -> tuple[str, bytes]:
    """Return the media type and the body of a response."""
    kind = (response.getheader("content-type") or "").partition(";")[0].strip().lower()
    if response.status != 200:
        raise DataError(
            f"the host of the image answered with the HTTP status {response.status}. {_ADVICE}"
        )
    if not re.fullmatch(r"image/[a-z0-9.+-]+", kind):
        raise DataError(f"the image's URL does not return the content type image/*. {_ADVICE}")
    if (response.getheader("content-encoding") or "identity").lower() != "identity":
        raise DataError(
            "the host of the image answered with a content encoding, which is not supported. "
            f"{_ADVICE}"
        )
    too_large = DataError(
        f"the images of the request have more bytes than --max-media-bytes allows ({most} bytes "
        "remain for this image). Send smaller images."
    )
    if response.length is not None and response.length > most:
        raise too_large
    data = bytearray()
    while chunk := response.read1(_CHUNK_BYTES):
        data += chunk
        if len(data) > most:
            raise too_large
    return kind, bytes(data)
