"""Request types of ``/v1/messages``, Anthropic's interface, and their conversion to chats."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from bmforge.serve.errors import RequestError
from bmforge.serve.message_types import SentBack, Strict
from bmforge.serve.neutral_fields import MESSAGES_FIELDS, TOOL_FIELDS
from bmforge.serve.openai_types import ChatRequest, make_chat

__all__ = ["CountRequest", "MessagesRequest", "messages_chat"]

CacheControl = dict[str, Any] | None


class TextBlock(SentBack):
    """Text block of a message."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    citations: None = None


class Base64Source(Strict):
    """Data of an image."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class URLSource(Strict):
    """URL of an image, which is fetched if its domain is allowed."""

    type: Literal["url"]
    url: str


class ImageBlock(SentBack):
    """Image in a message of the user."""

    type: Literal["image"]
    source: Annotated[Base64Source | URLSource, Field(discriminator="type")]
    cache_control: CacheControl = None


class ToolUseBlock(SentBack):
    """Tool call of the assistant."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl = None
    caller: dict[str, Any] | None = None


class ToolResultBlock(SentBack):
    """Result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl = None


class ThinkingBlock(SentBack):
    """Reasoning of the assistant, copied from an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


Block = Annotated[
    TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock,
    Field(discriminator="type"),
]


class AnthropicMessage(Strict):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(fail_fast=True)]


class AnthropicTool(Strict):
    """Definition of a function that the model may call."""

    neutral_fields = TOOL_FIELDS
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: CacheControl = None
    strict: bool | None = None


class AnthropicChoice(Strict):
    """Tool choice: whether the model may or must call a tool, and which one."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    """Option that enables or disables reasoning; with "adaptive", the template decides."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Strict):
    """JSON schema of the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """Options of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountRequest(Strict):
    """Request to count the tokens of a conversation."""

    neutral_fields = MESSAGES_FIELDS
    model: str
    messages: Annotated[list[AnthropicMessage], Field(fail_fast=True)] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[AnthropicTool], Field(fail_fast=True)] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # old name of output_config.format
    cache_control: CacheControl = None
    # Conversations are not stored: the client sends all messages.
    thread: None = None


class MessagesRequest(CountRequest):
    """Request to generate a message."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0)
    # Accepted and ignored.
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None


def messages_chat(body: CountRequest) -> ChatRequest:
    """Convert a messages request to a chat request.

    Raises:
        RequestError: a field is invalid or not supported.
    """
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system)})
    for message in body.messages:
        messages += _messages(message)
    fields: dict[str, Any] = {"model": body.model, "messages": messages, **_tools(body)}
    if body.messages[-1].role == "assistant":
        fields["continue_final_message"] = True
    fields |= _thinking(body) | _output(body)
    if isinstance(body, MessagesRequest):
        fields |= {
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "stream": body.stream,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
        }
    return make_chat({name: value for name, value in fields.items() if value is not None})


def _thinking(body: CountRequest) -> dict[str, Any]:
    """Return the chat options that enable, disable and limit the model's reasoning.

    The type "adaptive" keeps the default of the chat template.
    """
    if body.thinking is None:
        return {}
    kind = body.thinking.type
    is_enabled = None if kind == "adaptive" else kind == "enabled"
    return {"enable_thinking": is_enabled, "thinking_token_budget": body.thinking.budget_tokens}


def _output(body: CountRequest) -> dict[str, Any]:
    """Convert the reasoning effort and the answer's format to OpenAI's fields.

    Raises:
        RequestError: both `output_format` and `output_config.format` are set.
    """
    config = body.output_config or OutputConfig()
    if config.format is not None and body.output_format is not None:
        raise RequestError(
            "output_format and output_config.format cannot be used together. Keep one of them.",
                           "output_format")  # fmt: skip
    form = config.format or body.output_format
    fields: dict[str, Any] = {}
    if config.effort is not None:
        fields["reasoning_effort"] = config.effort
    if form is not None:
        schema = {"name": "answer", "schema": form.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _text(content: str | list[TextBlock] | None) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content or ())


def _messages(message: AnthropicMessage) -> list[dict[str, Any]]:
    """Convert a message to OpenAI's format; each tool result becomes a separate message."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    parts: list[dict[str, Any]] = []
    thoughts = []
    calls: list[dict[str, Any]] = []
    converted: list[dict[str, Any]] = []
    for block in message.content:
        if isinstance(block, TextBlock):
            parts.append({"type": "text", "text": block.text})
        elif isinstance(block, ImageBlock):
            parts.append({"type": "image_url", "image_url": {"url": _image_url(block.source)}})
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolResultBlock):
            text = _result_text(block)
            converted.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
        else:
            arguments = json.dumps(block.input, ensure_ascii=False)
            function = {"name": block.name, "arguments": arguments}
            calls.append({"id": block.id, "type": "function", "function": function})
    if parts or calls or not converted:
        has_images = any(part["type"] != "text" for part in parts)
        content = parts if has_images else "\n".join(part["text"] for part in parts)
        own: dict[str, Any] = {"role": message.role, "content": content}
        own |= {"tool_calls": calls} if calls else {}
        own |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
        converted.append(own)
    return converted


def _image_url(source: Base64Source | URLSource) -> str:
    if isinstance(source, URLSource):
        return source.url
    return f"data:{source.media_type};base64,{source.data}"


def _result_text(block: ToolResultBlock) -> str:
    """Return the text of a tool result.

    Chat templates have no field for failed calls, so the text of a failure begins with "Error: "
    unless it begins with "error" in any case, as messages of exceptions often do.
    """
    text = _text(block.content)
    if not block.is_error or text.lower().startswith("error"):
        return text
    return f"Error: {text}" if text else "Error"


def _tools(body: CountRequest) -> dict[str, Any]:
    """Convert the tools and the tool choice to OpenAI's format."""
    functions = [
        {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
        for tool in body.tools or ()
    ]
    tools = [
        {"type": "function", "function": {n: v for n, v in definition.items() if v is not None}}
        for definition in functions
    ]
    choice = body.tool_choice
    fields: dict[str, Any] = {"tools": tools} if tools else {}
    if choice is None:
        return fields
    names = {"auto": "auto", "none": "none", "any": "required"}
    named = {"type": "function", "function": {"name": choice.name or ""}}
    fields["tool_choice"] = names.get(choice.type, named)
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields
