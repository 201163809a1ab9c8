"""Request types of ``/v1/responses``, OpenAI's newer interface, converted to chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from bmforge.serve.errors import RequestError
from bmforge.serve.message_types import SentBack, Strict
from bmforge.serve.neutral_fields import RESPONSES_FIELDS
from bmforge.serve.openai_types import ChatRequest, Effort, VLLMSampling, make_chat

__all__ = ["InputTokensRequest", "ResponsesRequest", "responses_chat"]

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(SentBack):
    """Text in a message or in a tool's output."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"]
    text: str = ""
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None  # ignored
    parsed: Any = None  # added by OpenAI's client, which parses the text


class InputImage(SentBack):
    """Image of a message as a data URI; it is always processed in full detail."""

    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "high"] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None  # ignored


Texts = str | Annotated[list[InputText], Field(fail_fast=True)]
Part = Annotated[InputText | InputImage, Field(discriminator="type")]
Content = str | Annotated[list[Part], Field(fail_fast=True)]


class InputMessage(SentBack):
    """One message of the conversation so far."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: str | None = None
    status: Status | None = None
    phase: str | None = None


class InputCall(SentBack):
    """Tool call of the assistant."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None
    parsed_arguments: Any = None  # added by OpenAI's client, which parses the arguments


class InputResult(SentBack):
    """Result of a tool call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Texts
    id: str | None = None
    status: Status | None = None


class InputReasoning(SentBack):
    """Reasoning of the assistant, copied from an earlier response."""

    type: Literal["reasoning"]
    summary: list[InputText] = Field(default_factory=list)
    content: list[InputText] | None = None
    id: str | None = None
    status: Status | None = None
    encrypted_content: None = None


Item = InputMessage | InputCall | InputResult | InputReasoning


class FunctionTool(Strict):
    """Definition of a function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: None = None
    allowed_callers: None = None
    output_schema: None = None


class NamedTool(Strict):
    """Tool choice that requires a call of one function."""

    type: Literal["function"]
    name: str


class AllowedFunctions(Strict):
    """Choice that restricts a request to some of its tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True)] = Field(min_length=1)


Choice = Annotated[NamedTool | AllowedFunctions, Field(discriminator="type")]


class TextFormat(Strict):
    """Required format of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Strict):
    """Options of the generated text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Strict):
    """Options of the model's reasoning."""

    effort: Effort | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesStreamOptions(Strict):
    """Options of streaming."""

    include_obfuscation: bool | None = None


class InputTokensRequest(Strict):
    """Request to count the tokens of a conversation."""

    neutral_fields = RESPONSES_FIELDS
    foreign_fields: ClassVar[Mapping[str, str]] = {
        "messages": "input, or /v1/chat/completions",
        "max_completion_tokens": "max_output_tokens",
    }
    model: str
    input: str | Annotated[list[Item], Field(fail_fast=True)]
    instructions: str | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None


class ResponsesRequest(InputTokensRequest, VLLMSampling):
    """Request for a response."""

    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    # Accepted and ignored, because nothing is stored.
    store: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    request_id: str | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None


def responses_chat(body: InputTokensRequest) -> ChatRequest:
    """Convert a responses request to a chat request.

    Raises:
        RequestError: the input is empty, or a field is invalid or not supported.
    """
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    items = [InputMessage(role="user", content=body.input)] if isinstance(body.input, str) else None
    for item in items or body.input:
        assert not isinstance(item, str)
        _add(messages, item)
    if not messages or not body.input:
        raise RequestError(
            "input is empty (needed: a non-empty string, or a list of at least one item). Send "
            "an input.",
            "input",
        )
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "tools": _tools(body),
        "tool_choice": _choice(body),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _format(body),
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
    }
    if isinstance(body, ResponsesRequest):
        fields |= {
            "max_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "stream": body.stream,
            **body.model_dump(include=set(VLLMSampling.model_fields), by_alias=True),
        }
    return make_chat({name: value for name, value in fields.items() if value is not None})


def _add(messages: list[dict[str, Any]], item: Item) -> None:
    """Append an item to the conversation; items of one assistant turn share a message."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if isinstance(item, InputResult):
        text = _text(item.output)
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
    elif isinstance(item, InputCall):
        function = {"name": item.name, "arguments": item.arguments}
        if last is None:
            last = {"role": "assistant", "content": ""}
            messages.append(last)
        call = {"id": item.call_id, "type": "function", "function": function}
        last.setdefault("tool_calls", []).append(call)
    elif isinstance(item, InputReasoning):
        text = "".join(part.text for part in item.content or item.summary)
        messages.append({"role": "assistant", "content": "", "reasoning_content": text})
    elif last is not None and last["content"] == "" and item.role == "assistant":
        last["content"] = _content(item.content)  # the message already has the turn's reasoning
    else:
        messages.append({"role": item.role, "content": _content(item.content)})


def _content(content: Content) -> str | list[dict[str, Any]]:
    """Return the content as a string, or as the parts of a chat message if it has images."""
    if isinstance(content, str) or not any(isinstance(part, InputImage) for part in content):
        return _text(content)
    return [
        {"type": "image_url", "image_url": {"url": part.image_url}}
        if isinstance(part, InputImage)
        else {"type": "text", "text": _text([part])}
        for part in content
    ]


def _text(content: str | Sequence[InputText | InputImage]) -> str:
    if isinstance(content, str):
        return content
    texts = (part for part in content if isinstance(part, InputText))
    return "".join(part.text or part.refusal or "" for part in texts)


def _tools(body: InputTokensRequest) -> list[dict[str, Any]] | None:
    tools = [tool.model_dump(exclude_none=True, exclude={"type"}) for tool in body.tools or ()]
    return [{"type": "function", "function": tool} for tool in tools] or None


def _choice(body: InputTokensRequest) -> Any:
    choice = body.tool_choice
    if isinstance(choice, NamedTool):
        return _named(choice)
    if isinstance(choice, AllowedFunctions):
        allowed = {"mode": choice.mode, "tools": [_named(tool) for tool in choice.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice if body.tools else None


def _named(tool: NamedTool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.name}}


def _format(body: InputTokensRequest) -> dict[str, Any] | None:
    form = None if body.text is None else body.text.format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "json_object"}
    schema = {"name": form.name or "answer", "schema": form.schema_ or {}}
    return {"type": "json_schema", "json_schema": schema}
