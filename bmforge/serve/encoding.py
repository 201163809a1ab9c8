"""Embeddings and CPM-Bee's documents: what an engine does at once, not token by token."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response
from torch import Tensor

from bmforge.errors import BmforgeError
from bmforge.serve.errors import RequestError
from bmforge.serve.limits import check_at_most
from bmforge.serve.openai_types import DocumentsRequest, EmbeddingRequest
from bmforge.serve.routes import StrictRoute
from bmforge.serve.serving import Serving, key_of, serving_of

__all__ = ["router"]

T = TypeVar("T")
router = APIRouter(route_class=StrictRoute)


async def _between_steps(serving: Serving, engine: Any, work: Callable[[], T]) -> T:
    """Have the engine do something whole, between two steps of what it writes.

    Raises:
        RequestError: it refuses what was given.
    """
    async with serving.turn:  # threads are few, and those who wait need none
        try:
            return await run_in_threadpool(engine.call, work)
        except BmforgeError as error:
            raise RequestError(str(error), code="invalid_value") from error


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """Return an embedding of every text: the mean of its last states, of length 1."""
    serving = serving_of(request)
    served, inputs = serving.find(body.model, "embeddings"), body.inputs
    engine = served.engine
    check_at_most("input", len(inputs), serving.config.max_prompts, "texts")
    hidden = engine.model.config.hidden_size
    if body.dimensions not in (None, hidden):
        raise RequestError(
            f"dimensions={body.dimensions}: this model's embeddings have {hidden}", "dimensions"
        )

    def work() -> tuple[Tensor, int]:
        rows = [
            engine.embed(one if isinstance(one, str) else torch.tensor([one])) for one in inputs
        ]
        lengths = [
            len(engine.tokenizer.encode(one)) if isinstance(one, str) else len(one)
            for one in inputs
        ]
        return torch.cat(rows), sum(lengths)

    with serving.admission.enter(key_of(request)):
        found, tokens = await _between_steps(serving, engine, work)
    data = [
        {"object": "embedding", "index": index, "embedding": _spell(row, body.encoding_format)}
        for index, row in enumerate(found.float().cpu())
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return JSONResponse({"object": "list", "data": data, "model": served.name, "usage": usage})


def _spell(row: Tensor, form: str | None) -> Any:
    """Return numbers, or as text the bytes of little-endian floats of 32 bits."""
    if form == "base64":
        return base64.b64encode(row.numpy().astype("<f4").tobytes()).decode()
    return row.tolist()


@router.post("/v1/documents")
async def documents(body: DocumentsRequest, request: Request) -> Response:
    """Fill documents: what stands under ``<ans>`` is written."""
    serving = serving_of(request)
    engine = serving.find(body.model, "documents").engine
    check_at_most("documents", len(body.documents), serving.config.max_prompts, "documents")
    check_at_most("examples", len(body.examples or ()), serving.config.max_prompts, "documents")
    options = _read_options(body, serving)

    def work() -> Any:
        return engine.fill_documents(body.documents, **options)

    with serving.admission.enter(key_of(request)):
        filled = await _between_steps(serving, engine, work)
    return JSONResponse({"object": "list", "data": filled, "model": serving.name})


def _read_options(body: DocumentsRequest, serving: Serving) -> dict[str, Any]:
    """Return what `fill_documents` is told, but what is left to it."""
    options: dict[str, Any] = {"examples": body.examples or ()}
    drawn = ("temperature", "top_p", "top_k", "seed")
    given = {name: getattr(body, name) for name in drawn if getattr(body, name) is not None}
    if given and given.get("temperature") != 0:
        options |= {"do_sample": True, **given}
    for name, value in (
        ("num_beams", body.num_beams),
        ("repetition_penalty", body.repetition_penalty),
        ("max_new_tokens", body.max_tokens),
    ):
        if value is not None:
            options[name] = value
    most = serving.config.max_new_tokens
    if most is not None and options.get("max_new_tokens", 1) > most:
        raise RequestError(
            f"max_tokens={body.max_tokens}: at most {most} are written here", "max_tokens"
        )
    return options
