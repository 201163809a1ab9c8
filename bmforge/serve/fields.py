"""Table of request fields: supported, ignored, or accepted only with a neutral value.

`dev/serve_fields.py` writes the table into the documentation; a test compares the table with the
server.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import BaseModel

from bmforge.serve.adapters import LoadAdapterRequest, UnloadAdapterRequest
from bmforge.serve.messages_types import CountRequest, MessagesRequest
from bmforge.serve.openai_types import (
    ChatRequest,
    CompletionRequest,
    DocumentsRequest,
    EmbeddingRequest,
)
from bmforge.serve.responses_types import InputTokensRequest, ResponsesRequest
from bmforge.serve.scores import DetokenizeRequest, RerankRequest, ScoreRequest, TokenizeRequest

__all__ = ["ENDPOINTS", "Treatment", "treatment_of"]

Treatment = Literal["supported", "no effect", "neutral value only"]

ENDPOINTS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/responses/input_tokens": InputTokensRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/documents": DocumentsRequest,
    "/v1/score": ScoreRequest,
    "/v1/rerank": RerankRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/load_lora_adapter": LoadAdapterRequest,
    "/v1/unload_lora_adapter": UnloadAdapterRequest,
}

# Fields that cannot change a response: identifiers, and hints for storage, caches and padding.
_NO_EFFECT = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prompt_cache_options", "prediction", "cache_control", "include",
    "request_id", "session_id", "cache_prompt",
})  # fmt: skip


# Fields that must have the model's own value: the width of its embeddings.
_MODEL_VALUE = frozenset({("/v1/embeddings", "dimensions")})


def treatment_of(endpoint: str, field: str) -> Treatment:
    """Return "supported", "neutral value only" or "no effect" for a field of an endpoint.

    Unknown fields are rejected with status 400.
    """
    if field in _NO_EFFECT:
        return "no effect"
    values = _allowed(ENDPOINTS[endpoint].model_fields[field].annotation)
    is_neutral = values is not None and len(values - {None}) <= 1
    if is_neutral or (endpoint, field) in _MODEL_VALUE:
        return "neutral value only"
    return "supported"


def _allowed(annotation: Any) -> set[Any] | None:
    """Return the allowed values of a type if they are a few constants; otherwise None."""
    if annotation is type(None):
        return {None}
    if getattr(annotation, "__origin__", None) is Literal:
        return set(get_args(annotation))
    parts = [_allowed(part) for part in get_args(annotation)]
    if not parts or any(part is None for part in parts) or hasattr(annotation, "__metadata__"):
        return None
    if getattr(annotation, "__origin__", None) in (list, dict):
        return None
    return set().union(*(part for part in parts if part is not None))
