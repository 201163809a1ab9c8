"""Endpoints without streaming: embeddings and CPM-Bee documents."""

from __future__ import annotations

import asyncio
import base64
import json
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
from bmforge.serve.engine_options import check_size, longest_prompt, row_tokens
from bmforge.serve.errors import RequestError, overload_error
from bmforge.serve.http_json import GONE, StrictRoute
from bmforge.serve.limits import check_at_most
from bmforge.serve.live_requests import GoneError, unless_gone
from bmforge.serve.openai_types import DocumentsRequest, EmbeddingRequest
from bmforge.serve.request_runner import check_engine
from bmforge.serve.serving import Serving, serving_of

__all__ = ["encode_inputs", "finish_task", "router"]

router = APIRouter(route_class=StrictRoute)
_RETRY_S = 2.0
# Default maximum length of a document's answers; see `fill_documents`.
_ANSWER_TOKENS = 100


async def finish_task(
    serving: Serving, request: Request, engine: Any, submit: Callable[[], Future[Any]]
) -> Any:
    """Wait for an engine task; cancel the task if the client disconnects.

    Args:
        serving: server state.
        request: HTTP request.
        engine: engine that runs the task.
        submit: function that submits the task.

    Raises:
        RequestError: the input is invalid, the time limit is exceeded, or the server is stopping.
        GoneError: the client has disconnected; the task is cancelled.
    """
    try:
        future = await run_in_threadpool(submit)
    except BmforgeError as error:
        await check_engine(engine)
        raise RequestError(str(error), code="invalid_value") from error
    with serving.live.ending(future):
        try:
            return await unless_gone(request.receive, _result(future), future.cancel)
        except GoneError:
            serving.metrics.note_left()
            raise
        except TimeoutError as error:
            reason = (
                f"the request was not finished within {serving.config.timeouts.request_s:g} s, "
                "including the time in the queue. Send less input, or retry later."
            )
            raise overload_error(reason, _RETRY_S) from error
        except _StoppedError as error:
            raise overload_error(
                "the server is stopping.", serving.config.timeouts.grace_s
            ) from error
        except (ConfigError, DataError, ShapeError) as error:
            raise RequestError(str(error), code="invalid_value") from error
        except BmforgeError as error:
            raise RequestError(
                f"the engine has failed ({type(error).__name__}). The server's log has the "
                "details.",
                status=503,
                code="engine_failed",
            ) from error


class _StoppedError(Exception):
    """Raised if the engine cancelled a task."""


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
    """Return the embedding of each text: the normalized mean of its last hidden states."""
    serving = serving_of(request)
    served, inputs = serving.find(body.model, "embeddings"), body.inputs
    engine, config, limits = served.engine, serving.config, serving.config.limits
    check_at_most("input", len(inputs), limits.max_inputs, "texts")
    check_size((text for text in inputs if isinstance(text, str)), engine, limits, "input")
    hidden = engine.model.config.hidden_size
    if body.dimensions not in (None, hidden):
        raise RequestError(
            (
                f"dimensions={body.dimensions} is not supported, because the embeddings of this "
                f"model have {hidden} dimensions. Leave dimensions out."
            ),
            "dimensions",
        )
    # The engine computes many short texts in one batch, so that a text needs less work than a
    # request.
    work = -(-len(inputs) // limits.max_prompts)
    with serving.admit(request, served, work):
        rows = await serving.tokenize(partial(encode_inputs, engine, inputs))
        most = longest_prompt(engine, limits)
        for ids in rows:
            if len(ids) > most:
                raise RequestError(
                    f"a text has {len(ids)} tokens, but this server accepts at most {most}. "
                    "Shorten the text.",
                    "input",
                    code="context_length_exceeded",
                )
        options = {"delta": served.delta, "deadline_s": config.timeouts.request_s}
        submit = partial(engine.submit_embed, rows, **options)
        try:
            embeddings_ = await finish_task(serving, request, engine, submit)
        except GoneError:
            return Response(status_code=GONE)
    tokens = sum(map(len, rows))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    head = {"object": "list", "model": served.name, "usage": usage}
    write = partial(_write_response, head, embeddings_, body.encoding_format)
    return Response(await run_in_threadpool(write), media_type="application/json")


def _write_response(head: dict[str, Any], embeddings: Tensor, form: str | None) -> bytes:
    """Return the response's body.

    The rows are converted one by one, in a thread: the JSON encoder holds Python's global lock
    until it has encoded a value.
    """
    rows = [
        json.dumps({"object": "embedding", "index": index, "embedding": _spell(row, form)})
        for index, row in enumerate(embeddings.float().cpu())
    ]
    return f'{json.dumps(head)[:-1]}, "data": [{", ".join(rows)}]}}'.encode()


def encode_inputs(engine: Any, inputs: list[str | list[int]]) -> list[list[int]]:
    """Tokenize the input texts, with the special tokens of the model family."""
    return [
        encode_text(engine.model, text, engine.tokenizer) if isinstance(text, str) else text
        for text in inputs
    ]


def _spell(row: Tensor, form: str | None) -> Any:
    """Encode an embedding as a list, or as base64 of little-endian float32."""
    if form == "base64":
        return base64.b64encode(row.numpy().astype("<f4").tobytes()).decode()
    return row.tolist()


@router.post("/v1/documents")
async def documents(body: DocumentsRequest, request: Request) -> Response:
    """Generate the answers under ``<ans>`` in CPM-Bee documents."""
    serving = serving_of(request)
    served, config = serving.find(body.model, "documents"), serving.config
    check_at_most("documents", len(body.documents), config.limits.max_prompts, "documents")
    check_at_most("examples", len(body.examples or ()), config.limits.max_prompts, "documents")
    options = _read_options(body, serving)
    with serving.admit(request, served, len(body.documents)):
        all_options = {"delta": served.delta, "deadline_s": config.timeouts.request_s, **options}
        submit = partial(served.engine.submit_documents, body.documents, **all_options)
        try:
            filled = await finish_task(serving, request, served.engine, submit)
        except GoneError:
            return Response(status_code=GONE)
    return JSONResponse({"object": "list", "data": filled, "model": served.name})


def _read_options(body: DocumentsRequest, serving: Serving) -> dict[str, Any]:
    """Return a dict with the arguments of `fill_documents` that the request sets."""
    config, engine = serving.config, serving.engine
    options: dict[str, Any] = {
        "examples": body.examples or (),
        "max_length": longest_prompt(engine, config.limits),
    }
    sampling = ("temperature", "top_p", "top_k", "seed")
    values = {name: getattr(body, name) for name in sampling if getattr(body, name) is not None}
    if values and values.get("temperature") != 0:
        options |= {"do_sample": True, **values}
    for name, value in (
        ("num_beams", body.num_beams),
        ("repetition_penalty", body.repetition_penalty),
    ):
        if value is not None:
            options[name] = value
    most = min(config.limits.max_new_tokens or row_tokens(engine), row_tokens(engine))
    if body.max_tokens is not None and body.max_tokens > most:
        raise RequestError(
            f"max_tokens={body.max_tokens} is too large: this server generates at most {most} "
            "tokens. Reduce max_tokens.",
            "max_tokens",
        )
    return options | {"max_new_tokens": body.max_tokens or min(_ANSWER_TOKENS, most)}
