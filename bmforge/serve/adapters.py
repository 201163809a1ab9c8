"""Routes to load and remove adapters at run time, in vLLM's format."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from bmforge.serve.http_json import StrictRoute
from bmforge.serve.message_types import Strict
from bmforge.serve.serving import serving_of

__all__ = ["LoadAdapterRequest", "UnloadAdapterRequest", "router"]

router = APIRouter(route_class=StrictRoute)


class LoadAdapterRequest(Strict):
    """Request to load an adapter."""

    lora_name: str = Field(min_length=1, max_length=256, pattern=r"^\S(.*\S)?$")
    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: Literal[False] | None = None


class UnloadAdapterRequest(Strict):
    """Request to remove an adapter."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_int_id: None = None


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(body: LoadAdapterRequest, request: Request) -> Response:
    """Load an adapter; requires the admin key."""
    serving = serving_of(request)
    await serving.adapters.load(
        body.lora_name, Path(body.lora_path), lambda: [model.name for model in serving.models]
    )
    return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} added successfully.")


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(body: UnloadAdapterRequest, request: Request) -> Response:
    """Remove an adapter for new requests; requires the admin key."""
    await serving_of(request).adapters.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} removed successfully.")
