"""Server state that all routes share."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from starlette.requests import Request as HTTPRequest

from bmforge.errors import ConfigError
from bmforge.infer.engine.runtime_adapters import load_adapter_
from bmforge.infer.engine.text_pairs import is_cross_encoder
from bmforge.licenses import UNKNOWN
from bmforge.provenance import Provenance
from bmforge.serve.adapter_registry import AdapterRegistry, LoadAdapter
from bmforge.serve.auth import ApiKeys
from bmforge.serve.body_budget import BodyBudget
from bmforge.serve.conversation import Prompter
from bmforge.serve.errors import RequestError
from bmforge.serve.limits import Admission
from bmforge.serve.live_requests import LiveRequest, LiveRequests
from bmforge.serve.media import MediaFetcher
from bmforge.serve.metrics import Metrics
from bmforge.serve.rules import RuleChecker
from bmforge.serve.settings import ServeConfig

__all__ = ["Served", "Serving", "client_of", "key_of", "serving_of"]

T = TypeVar("T")
_TOKENIZING_THREADS = 2
_BODIES = 4  # number of bodies of the maximum size that can be received at the same time


@dataclass(frozen=True)
class Served:
    """Model or adapter that requests select by name.

    Args:
        name: name in requests.
        engine: an `Engine` or an `IdleUnloadingEngine`.
        abilities: kinds of requests that the model supports: "chat", "completions", "documents",
            "embeddings", "pairs" (scores of text pairs by a cross-encoder), "transcriptions".
        delta: adapter of the engine's model; None for the base model.
    """

    name: str
    engine: Any
    abilities: tuple[str, ...]
    delta: str | None = None

    @property
    def licenses(self) -> dict[str, Any]:
        """Licenses of the model ("unknown" if not stated), and of its base model and data."""
        provenance = getattr(self.engine.model, "provenance", Provenance())
        made_of = [{"kind": p.kind, "name": p.name, "license": p.license} for p in provenance.parts]
        return {"license": provenance.license or UNKNOWN, "made_of": made_of}

    @classmethod
    def of(cls, name: str, engine: Any) -> Served:
        """Create a `Served` object for an engine's model, with all abilities of the model."""
        traits = engine.model.traits
        if traits.objective == "documents" and traits.can_generate:
            return cls(name, engine, ("documents",))
        if traits.has_audio:
            return cls(name, engine, ("transcriptions",))
        writes = ("chat", "completions") if traits.can_generate else ()
        encodes = () if traits.has_images else cls.encoding_abilities(engine)
        return cls(name, engine, (*writes, *encodes))

    @staticmethod
    def encoding_abilities(engine: Any) -> tuple[str, ...]:
        """Return "embeddings", and "pairs" if the engine's model is a cross-encoder."""
        return ("embeddings", "pairs") if is_cross_encoder(engine.model) else ("embeddings",)


@dataclass
class Serving:
    """State of a running server.

    Args:
        main: main model.
        config: limits.
        keys: API keys.
        admin: key that permits loading and removing adapters.
        directory: directory of the main model, with its chat template.
        embedder: second model, for embeddings.
        deltas: initial dict from adapter name in requests to adapter name in the main model.
        load_adapter: function that loads an adapter at run time.
    """

    main: Served
    config: ServeConfig
    keys: ApiKeys
    admin: ApiKeys = field(default_factory=ApiKeys)
    directory: Path | None = None
    embedder: Served | None = None
    deltas: Mapping[str, str] = field(default_factory=dict)
    load_adapter: LoadAdapter = load_adapter_
    live: LiveRequests = field(default_factory=LiveRequests)
    metrics: Metrics = field(default_factory=Metrics)
    began: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        """Create the objects that depend on the arguments.

        Raises:
            ConfigError: two models have the same name.
        """
        self.adapters = AdapterRegistry(self.main.engine, self.deltas, self.load_adapter)
        names = [model.name for model in self.models]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(
                f"{twice[0]!r} is the name of more than one model or adapter. Rename one of them."
            )
        has_audio = "transcriptions" in self.main.abilities and self.directory is not None
        self.transcriber = _open_transcriber(self.directory) if has_audio else None
        self.prompter = Prompter(self.main.engine, self.directory, self.config)
        self.rules = RuleChecker(self.config.schema)
        self.media = MediaFetcher(self.config)
        self.admission = Admission(self.config)
        self.bodies = BodyBudget(_BODIES * self.config.body.max_body_bytes)
        # Tokenizing uses a core per thread; more threads would only need more memory.
        self._tokenizing = CapacityLimiter(_TOKENIZING_THREADS)
        # The JSON parser and pydantic hold Python's global lock: a second thread would not increase
        # the speed, but the event loop would wait for both.
        self._parsing = CapacityLimiter(1)

    async def tokenize(self, function: Callable[[], T]) -> T:
        """Run a tokenizer function in a thread pool, to keep the event loop free."""
        return await to_thread.run_sync(function, limiter=self._tokenizing)

    async def parse(self, function: Callable[[], T]) -> T:
        """Run a parser in a thread, one at a time, to keep the event loop free."""
        return await to_thread.run_sync(function, limiter=self._parsing)

    @property
    def engine(self) -> Any:
        """Engine of the main model."""
        return self.main.engine

    @property
    def engines(self) -> list[Any]:
        """Engines of the main model and of the embedding model."""
        return [self.engine, *([] if self.embedder is None else [self.embedder.engine])]

    @property
    def failure(self) -> BaseException | None:
        """Error that ended an engine permanently; None while all engines work."""
        return next((engine.failure for engine in self.engines if engine.failure), None)

    @property
    def is_ready(self) -> bool:
        """True if new requests are admitted and the engines work."""
        is_unloadable = any(getattr(engine, "opening_error", None) for engine in self.engines)
        return self.admission.has_room and self.failure is None and not is_unloadable

    @property
    def name(self) -> str:
        """Name of the main model."""
        return self.main.name

    @property
    def models(self) -> list[Served]:
        """All models: the main model, the main model with each adapter, and the embedding model."""
        main = self.main
        tuned = [
            Served(name, main.engine, main.abilities, delta)
            for name, delta in self.adapters.names.items()
        ]
        return [main, *tuned, *([] if self.embedder is None else [self.embedder])]

    @contextmanager
    def admit(self, request: HTTPRequest, served: Served, count: int = 1) -> Iterator[None]:
        """Context manager that counts a request while it runs, and keeps its adapter attached.

        Args:
            request: HTTP request.
            served: model that the request selects.
            count: number of engine requests, such as prompts.

        Raises:
            RequestError: a limit on requests is exceeded; see `Admission.enter`.
        """
        with (
            self.admission.enter(client_of(request), count),
            self.adapters.use(served.delta),
        ):
            yield

    def end(self, live: LiveRequest) -> None:
        """Unregister a request; a running one is cancelled and releases its memory."""
        self.live.end(live)
        if not live.is_read:  # the engine finishes its current step
            live.when_done(partial(self._note_unread, live))

    def _note_unread(self, live: LiveRequest) -> None:
        """Count the tokens of answers that the client has not read completely."""
        try:
            answers = live.completions()
        except Exception:  # the request failed, and has no completions
            self.metrics.note_left(live.prompt_tokens, live.new_tokens, live.key)
            return
        reason = "cancelled" if self.admission.is_closing else "left"
        self.metrics.note_answers(answers, live.key, reason)

    def find(self, name: str, ability: str | None = None) -> Served:
        """Return the model that a request selects.

        Args:
            name: name in the request.
            ability: required ability, if any.

        Raises:
            RequestError: the model is unknown, or does not have the ability.
        """
        served = next((model for model in self.models if model.name == name), None)
        if served is None:
            names = ", ".join(repr(model.name) for model in self.models)
            raise RequestError(
                f"unknown model {name[:80]!r} (available: {names}).",
                "model",
                status=404,
                code="model_not_found",
            )
        if ability is not None and ability not in served.abilities:
            raise RequestError(
                f"the model {served.name!r} does not support {ability} (supported: "
                f"{', '.join(served.abilities)}). Use another model or another path.",
                "model",
                code="unsupported_model",
            )
        return served


def _open_transcriber(directory: Any) -> Any:
    """Load the processor of a speech model, for which transformers is imported."""
    from bmforge.infer.speech import Transcriber

    return Transcriber(directory)


def serving_of(request: HTTPRequest) -> Serving:
    """Return the server state for a request."""
    serving: Serving = request.app.state.serving
    return serving


def client_of(request: HTTPRequest) -> str:
    """Return the name under which a client's requests are counted: its key, or else its address.

    IPv6 clients are counted by their /64 network, because each has 2^64 addresses.
    """
    host = "" if request.client is None else request.client.host
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return key_of(request) or f"at {host}"
    if address.version == 6:
        mapped = address.ipv4_mapped
        host = str(mapped or ipaddress.ip_network((address, 64), strict=False))
    return key_of(request) or f"at {host}"


def key_of(request: HTTPRequest) -> str:
    """Return the name of a request's API key; "" without keys."""
    name: str = request.scope["state"].get("key", "")
    return name
