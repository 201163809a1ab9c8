"""Routes for models, health, metrics and the OpenAPI schema."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from bmforge.serve.serving import Served, serving_of

__all__ = ["router"]

router = APIRouter()


def _describe(served: Served, began: int) -> dict[str, object]:
    return {
        "id": served.name,
        "object": "model",
        "created": began,
        "owned_by": "bmforge",
        "abilities": served.abilities,
        "max_model_len": served.engine.config.tokens_of(served.engine.model),
        **served.licenses,
    }


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """List the available models."""
    serving = serving_of(request)
    data = [_describe(served, serving.began) for served in serving.models]
    return JSONResponse({"object": "list", "data": data})


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> Response:
    """Describe one model."""
    serving = serving_of(request)
    return JSONResponse(_describe(serving.find(name), serving.began))


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> Response:
    """Respond with status 200 if the server runs and its engine works."""
    is_well = serving_of(request).failure is None
    return JSONResponse({"status": "ok" if is_well else "failed"}, 200 if is_well else 503)


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def ready(request: Request) -> Response:
    """Respond with status 200 if new requests are accepted."""
    is_ready = serving_of(request).is_ready
    return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return the metrics for Prometheus."""
    serving = serving_of(request)
    status = await run_in_threadpool(serving.engine.requests_status)
    content, kind = serving.metrics.write(status, serving.admission.count)
    return Response(content, media_type=kind)


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> Response:
    """Return the OpenAPI schema, which takes half a second to build for the first request."""
    return JSONResponse(await run_in_threadpool(request.app.openapi))
