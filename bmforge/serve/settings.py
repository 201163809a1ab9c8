"""Address, options and limits of a server, in a module without heavy imports."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from bmforge.config import GROUP, accept_ungrouped, ungrouped_values
from bmforge.errors import ConfigError

__all__ = [
    "ADMIN_VARIABLE",
    "AccessConfig",
    "BodyLimits",
    "ConversationConfig",
    "KEYS_VARIABLE",
    "LoadLimits",
    "MAX_HEAD_BYTES",
    "RequestLimits",
    "SchemaLimits",
    "ServeConfig",
    "TimeoutConfig",
    "is_loopback",
    "split_domain",
]

ToolCallParser = Literal[
    "deepseek_v3", "glm45", "hermes", "llama3_json", "minicpm", "mistral", "qwen3_coder"
]
KEYS_VARIABLE = "BMFORGE_API_KEYS"
ADMIN_VARIABLE = "BMFORGE_ADMIN_KEY"
MAX_HEAD_BYTES = 16 << 10
_HOST = re.compile(r"[a-z0-9:._-]+")


@dataclass(frozen=True, kw_only=True)
class AccessConfig:
    """Options for access control.

    Args:
        keys_file: file with one API key per line; the environment variable BMFORGE_API_KEYS can
            hold further keys, separated by commas (if None: only the keys in the environment
            variable).
        allow_no_key: serve all clients without an API key.
        allow_hosts: host names, in addition to localhost, that are accepted in the Host header of
            requests without an API key.
        allowed_origins: origins of web pages that may send requests (CORS), such as
            https://chat.example.org; * allows all origins and requires API keys.
        allow_runtime_lora_updating: allow clients with the admin key (environment variable
            BMFORGE_ADMIN_KEY) to load and unload adapters with /v1/load_lora_adapter and
            /v1/unload_lora_adapter.
        allowed_media_domains: hosts from which the server fetches images by URL, such as
            upload.wikimedia.org or 10.0.0.5:8080. A host without a port allows ports 80 and 443; a
            host name must resolve to public addresses (if empty: no images are fetched).
    """

    keys_file: Path | None = None
    allow_no_key: bool = False
    allow_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allow_runtime_lora_updating: bool = False
    allowed_media_domains: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ConversationConfig:
    """Options for chat templates, tool calls and reasoning.

    Args:
        tool_call_parser: format in which the model writes tool calls (if None: detected from the
            chat template).
        split_reasoning: return the reasoning of thinking models in the field reasoning_content
            instead of in the text.
        parse_special: encode names of special tokens in messages, such as <|im_end|>, as special
            tokens instead of as text. Clients can then forge turns, so enable it only for trusted
            clients.
        template_s: time limit in seconds for rendering the chat template.
    """

    tool_call_parser: ToolCallParser | None = None
    split_reasoning: bool = True
    parse_special: bool = False
    template_s: float = 2.0


@dataclass(frozen=True, kw_only=True)
class TimeoutConfig:
    """Time limits of requests and connections.

    Args:
        grace_s: time in seconds that running requests have to finish when the server stops.
        receive_s: time limit in seconds for receiving a request.
        idle_s: time in seconds after which an idle connection is closed.
        send_s: time in seconds after which a client that does not read its answer is disconnected.
        request_s: time limit in seconds for a request; the answer is cut off when it is reached.
        media_s: time limit in seconds for fetching the images of a request by URL.
    """

    grace_s: float = 20.0
    receive_s: float = 20.0
    idle_s: float = 15.0
    send_s: float = 30.0
    request_s: float = 600.0
    media_s: float = 10.0


@dataclass(frozen=True, kw_only=True)
class BodyLimits:
    """Limits on the bodies of requests.

    Args:
        max_body_bytes: maximum size of a request body in bytes.
        max_json_depth: maximum nesting depth of the JSON in a request body.
        max_json_values: maximum number of JSON values in a request body.
        max_json_keys: maximum number of JSON object keys in a request body.
    """

    max_body_bytes: int = 2 << 20
    max_json_depth: int = 64
    max_json_values: int = 200_000
    max_json_keys: int = 10_000


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Limits on the contents of a request.

    Args:
        max_prompt_tokens: maximum length of a prompt in tokens (if None: the context length of the
            server).
        max_new_tokens: maximum length of an answer in tokens (if None: the context length of the
            server).
        max_choices: maximum number of answers per prompt (the field n of a request).
        max_prompts: maximum number of prompts, or of documents to rerank, per request.
        max_inputs: maximum number of texts per embeddings request.
        max_stops: maximum number of stop strings per request.
        max_stop_chars: maximum length of a stop string in characters.
        max_logit_bias: maximum number of tokens in the field logit_bias of a request.
        max_logprobs: maximum value of the field top_logprobs of a request.
        max_tools: maximum number of tools per request.
        max_images: maximum number of images per request; max_body_bytes also limits the total size
            of embedded images.
        max_image_pixels: maximum number of pixels (width x height) of an image.
        max_media_bytes: maximum total size in bytes of the images that a request refers to by URL.
    """

    max_prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    max_choices: int = 8
    max_prompts: int = 64
    max_inputs: int = 2048
    max_stops: int = 8
    max_stop_chars: int = 256
    max_logit_bias: int = 1024
    max_logprobs: int = 20
    max_tools: int = 64
    max_images: int = 8
    max_image_pixels: int = 1 << 24
    max_media_bytes: int = 8 << 20


@dataclass(frozen=True, kw_only=True)
class SchemaLimits:
    """Limits on constraints on answers: schemas, regular expressions and grammars.

    Args:
        max_schema_bytes: maximum size in bytes of a JSON schema, regular expression or grammar.
        max_schema_depth: maximum nesting depth of a JSON schema.
        schema_cpu_s: limit of the CPU time in seconds for compiling a JSON schema, regular
            expression or grammar.
        schema_memory_bytes: memory limit in bytes for compiling a JSON schema, regular expression
            or grammar.
        schema_s: time limit in seconds for compiling a JSON schema, regular expression or grammar,
            including the time in the queue.
    """

    max_schema_bytes: int = 64 << 10
    max_schema_depth: int = 24
    schema_cpu_s: int = 2
    schema_memory_bytes: int = 512 << 20
    schema_s: float = 6.0


@dataclass(frozen=True, kw_only=True)
class LoadLimits:
    """Limits on concurrent requests and connections.

    Args:
        max_connections: maximum number of open connections.
        max_requests: maximum number of running and waiting requests; further requests are rejected
            with status 503.
        max_requests_per_key: maximum number of running and waiting requests per API key, or per
            client address if no keys are used.
        max_rate_per_min: maximum number of requests per minute for an API key, or for a client
            address if no keys are used.
        max_unread_bytes: maximum amount of generated text, in bytes, that is buffered for a slow
            client; a request that exceeds it is cancelled.
    """

    max_connections: int = 512
    max_requests: int = 128
    max_requests_per_key: int = 64
    max_rate_per_min: int = 6000
    max_unread_bytes: int = 1 << 20


@accept_ungrouped
@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Address, options and limits of a server.

    The fields of the groups can also be given without the group: `ServeConfig(max_tools=8)`.

    Args:
        host: IP address or host name to listen on; an address other than loopback requires API keys
            or allow_no_key.
        port: TCP port to listen on; 0 selects a free port, which is logged.
        uds: path of a Unix socket to listen on, instead of host and port (if None: host and port).
        ssl_certfile: PEM file with the TLS certificate chain; requires ssl_keyfile (if None: no
            TLS).
        ssl_keyfile: PEM file with the private key of the TLS certificate; requires ssl_certfile.
        root_path: path prefix under which a proxy serves this server, such as /llm (if empty: no
            prefix).
        name: model name in the API (if None: name of the model's directory).
        embedding_name: name of the embedding model in the API (if None: embedding).
        log_requests: log the path, status and duration of every request.
        access: options for access control.
        chat: options for chat templates, tool calls and reasoning.
        timeouts: time limits of requests and connections.
        body: limits on the bodies of requests.
        limits: limits on the contents of a request.
        schema: limits on the schemas, regular expressions and grammars that constrain answers.
        load: limits on concurrent requests and connections.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    root_path: str = ""
    name: str | None = None
    embedding_name: str | None = None
    log_requests: bool = True
    access: AccessConfig = field(default_factory=AccessConfig, metadata=GROUP)
    chat: ConversationConfig = field(default_factory=ConversationConfig, metadata=GROUP)
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig, metadata=GROUP)
    body: BodyLimits = field(default_factory=BodyLimits, metadata=GROUP)
    limits: RequestLimits = field(default_factory=RequestLimits, metadata=GROUP)
    schema: SchemaLimits = field(default_factory=SchemaLimits, metadata=GROUP)
    load: LoadLimits = field(default_factory=LoadLimits, metadata=GROUP)

    def __post_init__(self) -> None:
        """Raise a `ConfigError` that lists all fields out of range or without effect."""
        problems = []
        for name, value in ungrouped_values(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if name in ("port", "grace_s"):
                fits, needed = value >= 0, "at least 0"
            elif isinstance(value, int):
                fits, needed = value >= 1, "at least 1"
            else:
                fits, needed = value > 0, "above 0"
            if not (fits and value < float("inf")):
                problems.append(f"{name}={value} must be {needed}, and finite")
        if self.port > 65535:
            problems.append(f"port={self.port} must be at most 65535")
        if not self.host:
            problems.append("host is empty; use 0.0.0.0 or :: to listen at all addresses")
        if self.name is not None and not self.name.strip():
            problems.append(f"name={self.name!r} must be a non-empty name, or None")
        if self.load.max_requests_per_key > self.load.max_requests:
            problems.append(
                f"max_requests_per_key={self.load.max_requests_per_key} must be at most "
                f"max_requests={self.load.max_requests}"
            )
        if self.access.allow_no_key and self.access.keys_file is not None:
            problems.append("allow_no_key and keys_file cannot be used together")
        problems += self._check_address()
        if problems:
            raise ConfigError(f"{'; '.join(problems)}.")

    def _check_address(self) -> list[str]:
        """Return descriptions of the problems with TLS, socket, path prefix and origins."""
        problems = []
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            problems.append("ssl_certfile and ssl_keyfile must be given together")
        if self.root_path and not (self.root_path.startswith("/") and self.root_path[-1] != "/"):
            problems.append(f"root_path={self.root_path!r} must begin with / and not end with it")
        for origin in self.access.allowed_origins:
            if origin != "*" and not _is_origin(origin):
                problems.append(
                    f"allowed_origins={origin!r} must be an origin, such as "
                    "https://chat.example.org, or *"
                )
        for domain in self.access.allowed_media_domains:
            try:
                split_domain(domain)
            except ValueError:
                problems.append(
                    f"allowed_media_domains={domain!r} must be a host, such as "
                    "upload.wikimedia.org or 10.0.0.5:8080"
                )
        return problems


def _is_origin(text: str) -> bool:
    """Return True if a string is an origin: scheme, host and port, without a path."""
    parts = urlsplit(text)
    return parts.scheme in ("http", "https") and text == f"{parts.scheme}://{parts.netloc}"


def split_domain(text: str) -> tuple[str, int | None]:
    """Split an entry of `allowed_media_domains` into the host and the port (None if missing).

    Raises:
        ValueError: the text is not a host with an optional port.
    """
    parts = urlsplit(f"//{text}")
    host = (parts.hostname or "").encode("idna").decode().rstrip(".")
    if not host or parts.username is not None or text != parts.netloc or not _HOST.fullmatch(host):
        raise ValueError(text)
    return host, parts.port


def is_loopback(name: str) -> bool:
    """Return True if a host name or address is loopback."""
    bare = name.strip("[]").rstrip(".").lower()
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return bare == "localhost"
