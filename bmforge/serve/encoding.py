"""Embeddings and CPM-Bee's documents: what an engine does whole, not token by token."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response
from torch import Tensor

from bmforge.errors import BmforgeError, ConfigError, DataError, ShapeError
from bmforge.infer.engine.encode import encode_text
from bmforge.serve.errors import RequestError, overloaded
from bmforge.serve.limits import check_at_most
from bmforge.serve.live import GoneError, unless_gone
from bmforge.serve.openai_types import DocumentsRequest, EmbeddingRequest
from bmforge.serve.routes import GONE, StrictRoute, check_engine
from bmforge.serve.serving import Serving, client_of, serving_of
from bmforge.serve.writing import check_size, longest_prompt, row_tokens

__all__ = ["router"]

router = APIRouter(route_class=StrictRoute)
_RETRY_S = 2.0
# Answers of documents are as long as this where nothing is said; see `fill_documents`.
_ANSWER_TOKENS = 100


async def _have_done(
    serving: Serving, request: Request, engine: Any, submit: Callable[[], Future[Any]]
) -> Any:
    """Have an engine do something beside what it writes, unless the client goes.

    Args:
        serving: whose limits hold.
        request: of the client.
        engine: that does it.
        submit: asks for it.

    Raises:
        RequestError: it refuses what was given, takes too long, or stops.
        GoneError: the client has gone; nothing more is done for it.
    """
    try:
        future = await run_in_threadpool(submit)
    except BmforgeError as error:
        await check_engine(serving, engine)
        raise RequestError(str(error), code="invalid_value") from error
    with serving.live.ending(future):
        try:
            return await unless_gone(request.receive, _result(future), future.cancel)
        except GoneError:
            serving.metrics.note_left()
            raise
        except TimeoutError as error:
            took = f"it takes longer than {serving.config.request_s:g} s, or others do before it"
            raise overloaded(took, _RETRY_S) from error
        except _StoppedError as error:
            raise overloaded("the server is stopping", serving.config.grace_s) from error
        except (ConfigError, DataError, ShapeError) as error:
            raise RequestError(str(error), code="invalid_value") from error
        except BmforgeError as error:
            raise RequestError(
                f"the engine cannot go on ({type(error).__name__})",
                status=503,
                code="engine_failed",
            ) from error


class _StoppedError(Exception):
    """What was waited for was cancelled, and not by who waits."""


async def _result(future: Future[Any]) -> Any:
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise _StoppedError from None


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """Return an embedding of every text: the mean of its last states, of length 1."""
    serving = serving_of(request)
    served, inputs = serving.find(body.model, "embeddings"), body.inputs
    engine, config = served.engine, serving.config
    check_at_most("input", len(inputs), config.max_inputs, "texts")
    check_size((text for text in inputs if isinstance(text, str)), engine, config, "input")
    hidden = engine.model.config.hidden_size
    if body.dimensions not in (None, hidden):
        raise RequestError(
            f"dimensions={body.dimensions}: this model's embeddings have {hidden}", "dimensions"
        )
    # The engine computes many short texts in one batch, so a text is less work than a request.
    work = -(-len(inputs) // config.max_prompts)
    with serving.admission.enter(client_of(request), work):
        rows = await serving.tokenize(partial(_spell_inputs, engine, inputs))
        most = longest_prompt(engine, config)
        for ids in rows:
            if len(ids) > most:
                raise RequestError(
                    f"a text has {len(ids)} tokens, and at most {most} are read here",
                    "input",
                    code="context_length_exceeded",
                )
        told = {"delta": served.delta, "deadline_s": config.request_s}
        submit = partial(engine.submit_embed, rows, **told)
        try:
            found = await _have_done(serving, request, engine, submit)
        except GoneError:
            return Response(status_code=GONE)
    data = [
        {"object": "embedding", "index": index, "embedding": _spell(row, body.encoding_format)}
        for index, row in enumerate(found.float().cpu())
    ]
    tokens = sum(map(len, rows))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return JSONResponse({"object": "list", "data": data, "model": served.name, "usage": usage})


def _spell_inputs(engine: Any, inputs: list[str | list[int]]) -> list[list[int]]:
    """Return the ids of every text, with the marks that the family reads."""
    return [
        encode_text(engine.model, one, engine.tokenizer) if isinstance(one, str) else one
        for one in inputs
    ]


def _spell(row: Tensor, form: str | None) -> Any:
    """Return numbers, or as text the bytes of little-endian floats of 32 bits."""
    if form == "base64":
        return base64.b64encode(row.numpy().astype("<f4").tobytes()).decode()
    return row.tolist()


@router.post("/v1/documents")
async def documents(body: DocumentsRequest, request: Request) -> Response:
    """Fill documents: what stands under ``<ans>`` is written."""
    serving = serving_of(request)
    served, config = serving.find(body.model, "documents"), serving.config
    check_at_most("documents", len(body.documents), config.max_prompts, "documents")
    check_at_most("examples", len(body.examples or ()), config.max_prompts, "documents")
    options = _read_options(body, serving)
    with serving.admission.enter(client_of(request), len(body.documents)):
        told = {"delta": served.delta, "deadline_s": config.request_s, **options}
        submit = partial(served.engine.submit_documents, body.documents, **told)
        try:
            filled = await _have_done(serving, request, served.engine, submit)
        except GoneError:
            return Response(status_code=GONE)
    return JSONResponse({"object": "list", "data": filled, "model": served.name})


def _read_options(body: DocumentsRequest, serving: Serving) -> dict[str, Any]:
    """Return what `fill_documents` is told, but what is left to it."""
    config, engine = serving.config, serving.engine
    options: dict[str, Any] = {
        "examples": body.examples or (),
        "max_length": longest_prompt(engine, config),
    }
    drawn = ("temperature", "top_p", "top_k", "seed")
    given = {name: getattr(body, name) for name in drawn if getattr(body, name) is not None}
    if given and given.get("temperature") != 0:
        options |= {"do_sample": True, **given}
    for name, value in (
        ("num_beams", body.num_beams),
        ("repetition_penalty", body.repetition_penalty),
    ):
        if value is not None:
            options[name] = value
    most = min(config.max_new_tokens or row_tokens(engine), row_tokens(engine))
    if body.max_tokens is not None and body.max_tokens > most:
        raise RequestError(
            f"max_tokens={body.max_tokens}: at most {most} are written here", "max_tokens"
        )
    return options | {"max_new_tokens": body.max_tokens or min(_ANSWER_TOKENS, most)}
