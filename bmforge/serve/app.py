"""Builds the server as an ASGI application (`create_app`)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response

from bmforge import __version__
from bmforge.errors import ConfigError
from bmforge.infer import Engine, GenerationConfig
from bmforge.infer.engine.runtime_adapters import load_adapter_
from bmforge.infer.generation_defaults import read_generation_defaults
from bmforge.logging import get_logger
from bmforge.serve import (
    adapters,
    encoding,
    health_routes,
    messages,
    page_routes,
    responses,
    routes,
    scores,
    transcriptions,
)
from bmforge.serve.adapter_registry import LoadAdapter
from bmforge.serve.api_description import describe_api
from bmforge.serve.auth import ApiKeys, KeysFile
from bmforge.serve.errors import RequestError, error_response, explain_types
from bmforge.serve.gate import Gate
from bmforge.serve.idle_unloading import AnyEngine, IdleUnloadingEngine
from bmforge.serve.serving import Served, Serving
from bmforge.serve.settings import ServeConfig

__all__ = ["create_app"]

_LOOK_S = 1.0
_SHOWN_CHARS = 200  # of an unknown path, in an error message


def create_app(
    engine: AnyEngine,
    config: ServeConfig | None = None,
    *,
    directory: Path | None = None,
    keys: ApiKeys | None = None,
    embedder: Engine | None = None,
    deltas: Mapping[str, str] | None = None,
    admin: ApiKeys | None = None,
    load_adapter: LoadAdapter = load_adapter_,
) -> FastAPI:
    """Return an ASGI application that serves an engine.

    The application has no connection deadlines; `serve` adds deadlines.

    Args:
        engine: engine, which the caller closes.
        config: limits.
        directory: directory of the model, for its name and chat template.
        keys: API keys; None to accept requests only from this machine.
        embedder: engine of a second model for embeddings, named `ServeConfig.embedding_name`.
        deltas: dict from adapter name in requests to adapter name in the model.
        admin: key that permits loading and removing adapters, see `ServeConfig`.
        load_adapter: function that loads an adapter at run time.
    """
    config = config or ServeConfig()
    name = config.name or (directory.resolve().name if directory else None) or "model"
    _check(engine, config, embedder, admin)
    second = None
    if embedder is not None:
        name_of_second = config.embedding_name or "embedding"
        second = Served(name_of_second, embedder, Served.encoding_abilities(embedder))
    main = Served.of(name, engine)
    all_keys = (keys or ApiKeys(), admin or ApiKeys())
    serving = Serving(main, config, *all_keys, directory, second, deltas or {}, load_adapter)

    @asynccontextmanager
    async def live(_: FastAPI) -> AsyncIterator[None]:
        works = (_let_sleep(engine), _reread_keys(serving))
        tasks = [asyncio.create_task(work) for work in works]
        yield
        for task in tasks:
            task.cancel()
        serving.admission.is_closing = True
        serving.live.cancel_all()

    # The pages of docs_url would load scripts from other hosts; the target of a redirect would be
    # taken from the Host header; FastAPI's route of the schema would block the event loop.
    pages: dict[str, Any] = {"docs_url": None, "redoc_url": None, "redirect_slashes": False}
    pages["openapi_url"] = None
    app = FastAPI(title="bmforge", version=__version__, lifespan=live, **pages)
    app.state.serving = serving
    description = cache(partial(describe_api, app, bool(serving.keys), config.root_path))
    app.openapi = description  # type: ignore[method-assign]
    apis = (routes, responses, messages, encoding, scores, transcriptions)
    parts = (*apis, adapters, health_routes, page_routes)
    for part in parts:
        app.include_router(part.router)
    app.add_middleware(Gate, serving=serving)
    app.add_exception_handler(RequestError, _tell_refusal)
    app.add_exception_handler(RequestValidationError, _respond_to_invalid_body)
    app.add_exception_handler(HTTPException, _respond_to_http_error)
    return app


def _check(
    engine: AnyEngine, config: ServeConfig, embedder: Engine | None, admin: ApiKeys | None
) -> None:
    """Raise `ConfigError` for options that have no effect or that the engine cannot support."""
    if embedder is None and config.embedding_name is not None:
        raise ConfigError(
            f"embedding_name={config.embedding_name!r} has no effect without an embedding "
            "model. Pass an embedding model (--embedding-model), or leave embedding_name out."
        )
    if config.access.allowed_media_domains and not engine.model.takes_images:
        raise ConfigError(
            f"allowed_media_domains={list(config.access.allowed_media_domains)} has no effect, "
            "because the model supports only text. Leave the option out."
        )
    _check_defaults(engine.model)
    if not config.access.allow_runtime_lora_updating:
        return
    if not admin:
        raise ConfigError(
            "allow_runtime_lora_updating needs an admin key. Pass create_app(..., "
            "admin=ApiKeys([KEY]))."
        )
    if isinstance(engine, IdleUnloadingEngine):
        raise ConfigError(
            "allow_runtime_lora_updating cannot be used with unloading of idle models, which "
            "would lose the loaded adapters. Leave one of them out."
        )
    if not engine.model.traits.can_generate:
        raise ConfigError(
            "allow_runtime_lora_updating needs a model that generates text. Use such a model, or "
            "leave the option out."
        )


def _check_defaults(model: Any) -> None:
    """Check the model's generation_config.json, which requests use for fields that are not given.

    Raises:
        ConfigError: a value is invalid or unsupported.
    """
    if model.traits.can_generate and model.config.head != "speech_to_text":
        GenerationConfig(do_sample=True).with_defaults(read_generation_defaults(model.config))


async def _let_sleep(engine: AnyEngine) -> None:
    """Periodically unload the engine if it is idle."""
    while isinstance(engine, IdleUnloadingEngine):
        await asyncio.sleep(_LOOK_S)
        try:
            await run_in_threadpool(engine.unload_if_idle)
        except Exception as error:  # the next iteration tries again
            get_logger().error("engine: the idle model could not be unloaded: %r", error)


async def _reread_keys(serving: Serving) -> None:
    """Reload the API keys whenever the keys file changes."""
    file = KeysFile(serving.config, os.environ)
    while serving.config.access.keys_file is not None:
        await asyncio.sleep(_LOOK_S)
        serving.keys = file.reread() or serving.keys


async def _tell_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error, request.scope)


async def _respond_to_invalid_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(explain_types(error), request.scope)


async def _respond_to_http_error(request: Request, error: Exception) -> Response:
    """Respond to errors of the web framework, such as an unknown path, in OpenAI's format."""
    assert isinstance(error, HTTPException)
    path, message = repr(request.scope["path"][:_SHOWN_CHARS]), str(error.detail)
    if error.status_code == 404:
        message = (
            f"unknown path: path={path}. The API is under {request.scope.get('root_path', '')}/v1; "
            "the base_url of Anthropic's client has no /v1."
        )
    elif error.status_code == 405:
        allowed = Headers(error.headers).get("allow")
        message = (
            f"{request.method} is not allowed for path={path} (allowed: {allowed}). Use {allowed}."
        )
    return error_response(
        RequestError(message, status=error.status_code, headers=error.headers), request.scope
    )
