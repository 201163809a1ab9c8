"""Routes for tokenization, text similarity, and document ranking."""

from __future__ import annotations

import secrets
import time
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import JSONResponse, Response

from bmforge.infer.engine.text_pairs import encode_pairs, pair_task
from bmforge.serve.chat_requests import read_prompt
from bmforge.serve.encoding import encode_inputs, finish_task
from bmforge.serve.engine_options import check_size, longest_prompt, row_tokens
from bmforge.serve.errors import RequestError
from bmforge.serve.http_json import GONE, StrictRoute
from bmforge.serve.limits import check_at_most
from bmforge.serve.live_requests import GoneError
from bmforge.serve.message_types import Message, Strict, Tool
from bmforge.serve.neutral_fields import RERANK_FIELDS, SCORE_FIELDS, TOKENIZE_FIELDS
from bmforge.serve.openai_types import ChatRequest, Ids, Texts, make_chat
from bmforge.serve.serving import Serving, serving_of

__all__ = ["router"]

router = APIRouter(route_class=StrictRoute)
# Fields of /tokenize that apply only to conversations.
_OF_CHATS = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
_SIDES = (
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
)


class TokenizeRequest(Strict):
    """Request for the token ids of a text or of a conversation."""

    neutral_fields = TOKENIZE_FIELDS
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _fits(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError(
                "exactly one of prompt and messages is required. Send one, and leave the other out."
            )
        used = [name for name in _OF_CHATS if getattr(self, name) is not None]
        if self.messages is None and used:
            raise ValueError(
                f"{used[0]} has no effect on a prompt. Send messages, or leave {used[0]} out."
            )
        if self.messages is not None and self.add_special_tokens:
            raise ValueError(
                "add_special_tokens has no effect on messages, because the chat template adds the "
                "special tokens. Leave it out."
            )
        return self

    def as_chat(self, model: str) -> ChatRequest:
        """Convert the conversation to a chat request, to tokenize its prompt."""
        fields = self.model_dump(include={"messages", *_OF_CHATS}, exclude_none=True)
        if self.tools:  # so that tools are part of the prompt with every template
            fields["tool_choice"] = "auto"
        return make_chat({"model": model, **fields})


class DetokenizeRequest(Strict):
    """Request for the text of token ids."""

    model: str | None = None
    tokens: Ids = Field(min_length=1)


class ScoreRequest(Strict):
    """Request for the similarity of text pairs: one text with several others, or pair by pair.

    vLLM has four names for the two sides of the pairs.
    """

    neutral_fields = SCORE_FIELDS
    model: str
    text_1: str | Texts | None = None
    text_2: str | Texts | None = None
    queries: str | Texts | None = None
    documents: str | Texts | None = None
    items: str | Texts | None = None
    data_1: str | Texts | None = None
    data_2: str | Texts | None = None
    user: str | None = None

    @model_validator(mode="after")
    def _fits(self) -> ScoreRequest:
        used = {name for pair in _SIDES for name in pair if getattr(self, name) is not None}
        if used not in [set(pair) for pair in _SIDES]:
            allowed = ", or ".join(" and ".join(pair) for pair in _SIDES)
            raise ValueError(f"two texts or lists of texts are required. Send {allowed}.")
        return self

    @property
    def sides(self) -> tuple[str, str]:
        """Names of the two fields that contain the texts."""
        return next(pair for pair in _SIDES if getattr(self, pair[1]) is not None)


class RankedText(Strict):
    """Document to rank."""

    text: str


class RerankRequest(Strict):
    """Request to sort documents by their similarity to a query."""

    neutral_fields = RERANK_FIELDS
    model: str
    query: str = Field(min_length=1)
    documents: str | Annotated[list[str | RankedText], Field(fail_fast=True, min_length=1)]
    top_n: int | None = Field(None, ge=0)  # 0: all, as in vLLM
    return_documents: bool = True
    user: str | None = None

    @property
    def texts(self) -> list[str]:
        """Texts of the documents."""
        documents = [self.documents] if isinstance(self.documents, str) else self.documents
        return [doc if isinstance(doc, str) else doc.text for doc in documents]


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Return the token ids of a text or of a conversation."""
    serving = serving_of(request)
    tokenizer = serving.engine.tokenizer
    name = serving.name if body.model is None else body.model
    serving.find(name)
    if body.messages is not None:
        ids = (await read_prompt(body.as_chat(name), request)).ids
    else:
        text = body.prompt or ""
        check_size([text], serving.engine, serving.config.limits, "prompt")
        is_plain = body.add_special_tokens is False
        encode = tokenizer.encode if is_plain else tokenizer.encode_prompt
        ids = await serving.tokenize(partial(encode, text))
    result: dict[str, Any] = {"count": len(ids), "max_model_len": row_tokens(serving.engine)}
    texts = [tokenizer.decode([id]) for id in ids] if body.return_token_strs else None
    return JSONResponse({**result, "tokens": ids, "token_strs": texts})


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Return the text of token ids."""
    serving = serving_of(request)
    serving.find(serving.name if body.model is None else body.model)
    engine = serving.engine
    check_at_most("tokens", len(body.tokens), longest_prompt(engine, serving.config.limits), "ids")
    unknown = [id for id in body.tokens if id >= len(engine.tokenizer)]
    if unknown:
        raise RequestError(
            f"tokens contains {unknown[0]}, which is not a token id of this model. Send ids "
            "from /tokenize.",
            "tokens",
        )
    return JSONResponse({"prompt": await serving.tokenize(partial(engine.tokenizer.decode,
                                                                  body.tokens))})  # fmt: skip


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """Return the special tokens and the chat template, named as in tokenizer_config.json."""
    serving = serving_of(request)
    tokenizer, template = serving.engine.tokenizer, serving.prompter.template
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id}
    info: dict[str, Any] = {
        f"{role}_token": None if id is None else tokenizer.decode([id]) for role, id in ids.items()
    }
    source = None if template is None else template.source
    length = row_tokens(serving.engine)
    return JSONResponse({**info, "chat_template": source, "model_max_length": length})


@router.post("/v1/score")
@router.post("/score", include_in_schema=False)
async def score(body: ScoreRequest, request: Request) -> Response:
    """Score text pairs with a cross-encoder, or by the cosine similarity of their embeddings."""
    left, right = body.sides
    first, second = (
        [texts] if isinstance(texts := getattr(body, side), str) else list(texts)
        for side in (left, right)
    )
    if len(first) not in (1, len(second)):
        raise RequestError(
            (
                f"{left} has {len(first)} texts, but {right} has {len(second)} (needed: one "
                f"text in {left}, or as many as in {right}). Send as many texts in both."
            ),
            left,
        )
    result = await _compare(request, body.model, first, second, right)
    if result is None:
        return Response(status_code=GONE)
    scores, tokens = result
    data = [{"index": i, "object": "score", "score": value} for i, value in enumerate(scores)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    head: dict[str, Any] = {"id": f"score-{secrets.token_hex(12)}", "object": "list"}
    head |= {"created": int(time.time()), "model": body.model}
    return JSONResponse({**head, "data": data, "usage": usage})


@router.post("/v1/rerank")
@router.post("/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
async def rerank(body: RerankRequest, request: Request) -> Response:
    """Return the documents sorted by their relevance to a query, scored as in `/v1/score`."""
    texts = body.texts
    result = await _compare(request, body.model, [body.query], texts, "documents")
    if result is None:
        return Response(status_code=GONE)
    scores, tokens = result
    order = sorted(range(len(texts)), key=lambda number: -scores[number])[: body.top_n or None]
    results = []
    for number in order:
        document = {"document": {"text": texts[number]}} if body.return_documents else {}
        results.append({"index": number, "relevance_score": scores[number], **document})
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    head = {"id": f"rerank-{secrets.token_hex(12)}", "model": body.model}
    return JSONResponse({**head, "results": results, "usage": usage})


async def _compare(
    request: Request,
    model: str,
    first: list[str],
    second: list[str],
    field: str,
) -> tuple[list[float], int] | None:
    """Return the scores of text pairs and the number of tokens; None after a disconnect.

    `first` has a single text, which is paired with every text of `second`, or as many as `second`.
    `field` is the request field of `second`, for error messages.
    """
    serving: Serving = serving_of(request)
    served, config = serving.find(model, "embeddings"), serving.config
    texts: list[Any] = [*first, *second]
    engine = served.engine
    check_at_most(field, len(texts), config.limits.max_inputs, "texts")
    if not all(texts):
        raise RequestError(
            f"{field} contains an empty string. Remove the empty string.",
            field,
            code="invalid_value",
        )
    check_size(texts, engine, config.limits, field)
    is_rated = "pairs" in served.abilities
    rows: list[Any]
    with serving.admit(request, served, -(-len(texts) // config.limits.max_prompts)):
        if is_rated:
            firsts = first * len(second) if len(first) == 1 else first
            pairs = list(zip(firsts, second, strict=True))
            rows = await serving.tokenize(
                partial(encode_pairs, engine.model, engine.tokenizer, pairs)
            )
        else:
            rows = await serving.tokenize(partial(encode_inputs, engine, texts))
        lengths = [len(row[0] if is_rated else row) for row in rows]
        _check_lengths(lengths, longest_prompt(engine, config.limits), field)
        options: dict[str, Any] = {"delta": served.delta, "deadline_s": config.timeouts.request_s}
        submit = partial(engine.submit_embed, rows, **options)
        if is_rated:
            submit = partial(engine.submit_task, partial(pair_task, rows, **options))
        try:
            result = await finish_task(serving, request, engine, submit)
        except GoneError:
            return None
    result = result.float().cpu()
    if not is_rated:
        result = (result[: len(first)] * result[len(first) :]).sum(-1)
    return result.tolist(), sum(lengths)


def _check_lengths(lengths: list[int], longest: int, field: str) -> None:
    """Raise `RequestError` for a text with more tokens than the server accepts."""
    if max(lengths) > longest:
        raise RequestError(
            f"a text has {max(lengths)} tokens, but this server accepts at most {longest}. "
            "Shorten the text.",
            field,
            code="context_length_exceeded",
        )
