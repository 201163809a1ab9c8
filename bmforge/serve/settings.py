"""Where a server listens, and what it lets one client ask of it. Nothing heavy is imported here."""

from __future__ import annotations

import dataclasses
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from bmforge.errors import ConfigError

__all__ = ["KEYS_VARIABLE", "ServeConfig", "is_loopback"]

KEYS_VARIABLE = "BMFORGE_API_KEYS"


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """How a server listens, and its limits.

    Args:
        host: address to listen at; any but this machine's own needs keys, or `allow_no_key`.
        port: 0 takes a free one, which the log names.
        name: of the model in requests; None takes that of its directory.
        embedding_name: of a second model, that embeds; None is "embedding".
        keys_file: a file with one key a line. Keys are read from the variable BMFORGE_API_KEYS as
            well, divided by commas.
        allow_no_key: let everybody who reaches the address ask.
        allow_hosts: names besides this machine's own by which the server may be called without a
            key.
        grace_s: running requests get so long when the server is told to stop.
        receive_s: a request's head and body must be there within so many seconds.
        idle_s: a connection without a request is closed after so many seconds.
        send_s: a client that takes nothing for so many seconds is left.
        request_s: longest time of one request; what was written until then is its answer.
        max_body_bytes: of a request.
        max_json_depth: of objects and lists in a request.
        max_json_values: of values in a request.
        max_json_keys: of names of fields in a request.
        max_prompt_tokens: None takes what the engine was planned for.
        max_new_tokens: longest answer. None takes what the engine was planned for.
        max_choices: answers to one prompt (`n`).
        max_prompts: prompts or documents in one request.
        max_inputs: texts in one request for embeddings.
        max_stops: stop texts.
        max_stop_chars: of one stop text.
        max_logit_bias: tokens with a bias.
        max_logprobs: likeliest tokens that are told for each token.
        max_tools: of one request.
        max_schema_bytes: of a schema, regular expression or grammar.
        max_schema_depth: of a schema.
        schema_cpu_s: processor time in which a schema must compile.
        schema_memory_bytes: memory in which it must.
        schema_s: time in which it must, waiting for others included.
        template_s: time in which the chat template must write a conversation.
        max_connections: open at once.
        max_requests: running and waiting at once; more are told to come again.
        max_requests_per_key: of these by one key; without keys by one address.
        max_rate_per_min: requests of one key, or address, in a minute.
        max_unread_bytes: text that was written and not taken; a request is cancelled at more.
        log_requests: one line for every request: its path, status and time.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    embedding_name: str | None = None
    keys_file: Path | None = None
    allow_no_key: bool = False
    allow_hosts: tuple[str, ...] = ()
    grace_s: float = 20.0
    receive_s: float = 20.0
    idle_s: float = 15.0
    send_s: float = 30.0
    request_s: float = 600.0
    max_body_bytes: int = 2 << 20
    max_json_depth: int = 64
    max_json_values: int = 200_000
    max_json_keys: int = 10_000
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
    max_schema_bytes: int = 64 << 10
    max_schema_depth: int = 24
    schema_cpu_s: int = 2
    schema_memory_bytes: int = 512 << 20
    schema_s: float = 6.0
    template_s: float = 2.0
    max_connections: int = 512
    max_requests: int = 128
    max_requests_per_key: int = 64
    max_rate_per_min: int = 6000
    max_unread_bytes: int = 1 << 20
    log_requests: bool = True

    def __post_init__(self) -> None:
        """Raise `ConfigError` with every field that is out of range or without effect."""
        problems = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if field.name in ("port", "grace_s"):
                fits, needed = value >= 0, "at least 0"
            elif isinstance(value, int):
                fits, needed = value >= 1, "at least 1"
            else:
                fits, needed = value > 0, "above 0"
            if not (fits and value < float("inf")):
                problems.append(f"{field.name}={value} must be {needed}, and finite")
        if self.port > 65535:
            problems.append(f"port={self.port} must be at most 65535")
        if not self.host:
            problems.append("host is empty; 0.0.0.0 and :: are all addresses")
        if self.name is not None and not self.name.strip():
            problems.append(f"name={self.name!r} must be a name, or None")
        if self.max_requests_per_key > self.max_requests:
            problems.append(
                f"max_requests_per_key={self.max_requests_per_key} has no effect above "
                f"max_requests={self.max_requests}"
            )
        if self.allow_no_key and self.keys_file is not None:
            problems.append("allow_no_key and keys_file contradict each other: leave one out")
        if problems:
            raise ConfigError(f"ServeConfig: {'; '.join(problems)}.")


def is_loopback(name: str) -> bool:
    """Tell whether a host's name or address is this machine's own."""
    bare = name.strip("[]").rstrip(".").lower()
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return bare == "localhost"
