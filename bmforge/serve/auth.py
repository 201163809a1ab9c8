"""Authentication by API keys; without keys, only this machine has access."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import os
import re
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from bmforge.errors import BmforgeError, ConfigError
from bmforge.files import read_bytes
from bmforge.logging import get_logger
from bmforge.serve.errors import RequestError
from bmforge.serve.settings import ADMIN_VARIABLE, KEYS_VARIABLE, ServeConfig, is_loopback

__all__ = [
    "ApiKeys",
    "KeysFile",
    "check_origin",
    "is_allowed_origin",
    "load_admin_key",
    "load_keys",
]

_KEY = re.compile(r"[!-~]{16,512}")
_READING = ("GET", "HEAD")


class ApiKeys:
    """API keys of a server, stored as digests.

    Args:
        texts: the keys.

    Raises:
        ConfigError: a key is too short, or has characters other than visible ASCII.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        keys = list(texts)
        invalid = [number for number, text in enumerate(keys, 1) if not _KEY.fullmatch(text)]
        if invalid:
            raise ConfigError(
                f"key {invalid[0]} of {len(keys)} is not valid (needed: 16 to 512 visible ASCII "
                "characters without spaces). Create one with `openssl rand -hex 24`."
            )
        self._digests = [_digest(text) for text in keys]

    def __len__(self) -> int:
        return len(self._digests)

    def find(self, authorization: str | None) -> str:
        """Return the name of the API key in an Authorization header, which identifies the client.

        Programs send ``Bearer KEY``; a browser sends the key as a Basic password.

        Raises:
            RequestError: the key is missing or unknown (status 401).
        """
        candidate = _digest(_read_header(authorization or ""))
        name = ""
        for digest in self._digests:  # compare with all keys, so that timing reveals nothing
            if hmac.compare_digest(digest, candidate):
                name = digest.hex()
        if not name:
            headers = {"www-authenticate": 'Basic realm="bmforge: any name, the key as password"'}
            raise RequestError(
                "the request has no valid API key. Send the header Authorization: Bearer KEY, or "
                "x-api-key: KEY, which Anthropic's client sends.",
                status=401,
                code="invalid_api_key",
                headers=headers,
            )
        return name


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()


def _read_header(value: str) -> str:
    """Extract the key from an Authorization header; return "" if there is no key."""
    scheme, _, credentials = value.partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(credentials.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError, ValueError):
            return ""
    return ""


def load_keys(config: ServeConfig, environment: Mapping[str, str]) -> ApiKeys:
    """Read the API keys from the keys file and the environment.

    Raises:
        ConfigError: the server would accept requests from other machines without a key, or
            `allow_no_key` is set together with keys.
        DataError: the file cannot be read.
    """
    texts = [text.strip() for text in environment.get(KEYS_VARIABLE, "").split(",")]
    access, file = config.access, config.access.keys_file
    if file is not None:
        lines = read_bytes(file, "a file with one key a line").decode("utf-8-sig", "replace")
        stripped = [line.strip() for line in lines.splitlines()]
        texts += [line for line in stripped if not line.startswith("#")]
        if os.name == "posix" and file.stat().st_mode & 0o077:
            get_logger().warning(
                "other users can read keys_file=%s; restrict it with `chmod 600`", file
            )
    keys = ApiKeys(text for text in texts if text)
    if file is not None and not keys:
        raise ConfigError(f"keys_file={str(file)!r} contains no key. Write one key per line.")
    if keys and access.allow_no_key:
        raise ConfigError(
            f"allow_no_key cannot be used with keys in {KEYS_VARIABLE}. Leave one of them out."
        )
    if keys and access.allow_hosts:
        raise ConfigError(
            f"allow_hosts={list(access.allow_hosts)} has no effect with keys. Leave it out."
        )
    if not keys and "*" in access.allowed_origins:
        raise ConfigError(
            "allowed_origins=* without API keys lets every web page send requests. Set keys, "
            "or list the allowed origins."
        )
    is_local = config.uds is not None or is_loopback(config.host)
    if not keys and not is_local and not access.allow_no_key:
        raise ConfigError(
            f"host={config.host!r} without API keys lets other machines send requests. Set "
            f"keys_file=FILE or {KEYS_VARIABLE}, listen at 127.0.0.1, or set allow_no_key if "
            "every machine that reaches the address may use the server."
        )
    return keys


def load_admin_key(config: ServeConfig, environment: Mapping[str, str]) -> ApiKeys:
    """Read the key that permits loading and removing adapters; None if the option is off.

    Raises:
        ConfigError: the option is set but the key is missing, or the key is too short.
    """
    text = environment.get(ADMIN_VARIABLE, "").strip()
    if config.access.allow_runtime_lora_updating and not text:
        raise ConfigError(
            f"allow_runtime_lora_updating needs an admin key. Set {ADMIN_VARIABLE} to a random "
            "string, for example from `openssl rand -hex 24`."
        )
    return ApiKeys([text]) if config.access.allow_runtime_lora_updating else ApiKeys()


class KeysFile:
    """Rereads the API keys when their file changes.

    Args:
        config: settings with the path of the file.
        environment: environment variables with further keys.
    """

    def __init__(self, config: ServeConfig, environment: Mapping[str, str]) -> None:
        self._config, self._environment = config, environment
        self._version = self._read_version()

    def reread(self) -> ApiKeys | None:
        """Return the keys if the file has changed, otherwise None; a damaged file is ignored."""
        version = self._read_version()
        if version == self._version:
            return None
        self._version = version
        try:
            keys = load_keys(self._config, self._environment)
        except BmforgeError as error:
            get_logger().error(
                "keys: the file cannot be read again, so the previous keys remain valid: %s", error
            )
            return None
        get_logger().info("keys: %d keys were read again", len(keys))
        return keys

    def _read_version(self) -> tuple[int, int, int] | None:
        file = self._config.access.keys_file
        try:
            status = None if file is None else file.stat()
        except OSError:
            return None
        return None if status is None else (status.st_mtime_ns, status.st_size, status.st_ino)


def check_origin(
    config: ServeConfig, has_keys: bool, method: str, headers: Mapping[str, str]
) -> None:
    """Reject requests that come from web pages of other sites.

    A foreign page can make a browser send requests (CSRF), and with its own host name that
    resolves to this machine (DNS rebinding) read the responses.

    Raises:
        RequestError: the host name or the origin is not allowed (status 403).
    """
    host = headers.get("host", "")
    if not has_keys and not _is_ours(host, config):
        raise RequestError(
            (
                "without API keys, the server accepts only the host names of its own machine, "
                "such as localhost. Use such a host name, or ask the operator to set "
                "allow_hosts or API keys."
            ),
            status=403,
            code="host_not_allowed",
        )
    if method in _READING:
        return
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if is_allowed_origin(config, origin):
        return
    if site is not None:
        is_own = site in ("same-origin", "none")
    else:
        is_own = origin is None or urlsplit(origin).netloc.lower() == host.lower()
    if not is_own:
        raise RequestError(
            "the request comes from a web page of another site. Ask the operator to add the "
            "origin of that page to allowed_origins.",
            status=403,
            code="origin_not_allowed",
        )


def is_allowed_origin(config: ServeConfig, origin: str | None) -> bool:
    """Return True if pages of an origin may send requests and read the responses."""
    allowed = config.access.allowed_origins
    return origin is not None and ("*" in allowed or origin.lower() in map(str.lower, allowed))


def _is_ours(host: str, config: ServeConfig) -> bool:
    """Return True if a Host header names this machine and cannot come from a foreign page."""
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]/@?#\s]+)(:\d{1,5})?", host)
    if match is None:
        return False
    name = match[1]
    if is_loopback(name) or name.lower() in map(str.lower, config.access.allow_hosts):
        return True
    # Any host name can resolve to this machine, but an IP address is the one that the browser
    # connected to.
    return not is_loopback(config.host) and _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
