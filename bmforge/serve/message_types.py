"""Request types of messages and tools, with strict validation.

Types are not coerced: a string is not accepted as a number. Unknown fields are errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from bmforge.serve.neutral_fields import NeutralFields

__all__ = ["AllowedChoice", "Choice", "ImagePart", "Message", "SentBack", "Strict", "Tool",
           "ToolChoice"]  # fmt: skip

# Minimum similarity of a suggested field name: below it are system and stream, foo and tools.
_CUTOFF = 0.7


def _describe_neutral_fields(schema: dict[str, Any], model: type[Any]) -> None:
    """Add the fields that must have their default value to a request type's JSON schema."""
    for name, field in model.neutral_fields.items():
        values = {} if field.is_hint else {"enum": [*field.values, *field.idle_values, None]}
        schema["properties"][name] = {**values, "description": field.reason}


class Strict(BaseModel):
    """Base class of all request types: strict types, no unknown fields.

    Attributes:
        neutral_fields: fields that are accepted only with values that have no effect.
        foreign_fields: dict from field of another API to the field or path to use instead.
    """

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        json_schema_extra=_describe_neutral_fields,
    )
    neutral_fields: ClassVar[NeutralFields] = {}
    foreign_fields: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, value: Any) -> Any:
        """Remove fields with neutral values; refuse their other values and misspelled field names.

        Pydantic reports other unknown fields.
        """
        if not isinstance(value, dict) or value.keys() <= cls.model_fields.keys():
            return value
        neutral = cls.neutral_fields.keys() & value.keys()
        for name in sorted(neutral):
            field = cls.neutral_fields[name]
            if not field.accepts(value[name], value):
                context = {"field": name, "allowed": field.allowed, "reason": field.reason}
                raise PydanticCustomError("neutral_field", "not neutral", context)
        value = {name: item for name, item in value.items() if name not in neutral}
        names = [field.alias or name for name, field in cls.model_fields.items()]
        kind: Any = cls.model_fields["type"].annotation if "type" in cls.model_fields else None
        if get_origin(kind) is Literal and value.get("type") not in (None, *get_args(kind)):
            return value  # pydantic reports the type, which explains the other fields
        for key in value:
            if key in names or key in cls.model_fields or not isinstance(key, str):
                continue
            hint = ""
            if key in cls.foreign_fields:
                hint = f" Use {cls.foreign_fields[key]}."
            elif similar := get_close_matches(key, names, n=1, cutoff=_CUTOFF):
                hint = f" Did you mean {similar[0]!r}?"
            if hint:
                raise PydanticCustomError("unknown_field", "unknown", {"field": key, "hint": hint})
        return value


class SentBack(Strict):
    """Base class of objects that clients copy from an earlier answer; null fields are ignored."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: item for name, item in value.items() if item is not None}


class Function(Strict):
    """Definition of a function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: None = None  # vLLM


class Tool(Strict):
    """Tool that the model may call; only functions are supported."""

    type: Literal["function"]
    function: Function
    defer_loading: None = None


class FunctionName(Strict):
    """Name of the function to call."""

    name: str


class ToolChoice(Strict):
    """Tool choice that requires a call of one function."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Strict):
    """The only tools that may be called, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolChoice], Field(fail_fast=True)] = Field(min_length=1)


class AllowedChoice(Strict):
    """Choice that restricts a request to some of its tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


Choice = Annotated[ToolChoice | AllowedChoice, Field(discriminator="type")]


class CalledFunction(SentBack):
    """Called function with its arguments."""

    name: str
    arguments: str


class ToolCall(SentBack):
    """Tool call in an assistant message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # clients may send the deltas of a stream back unchanged


class TextPart(SentBack):
    """Text of a message's content."""

    type: Literal["text"]
    text: str
    # Marks for prefix caches of other servers (Anthropic, OpenAI); they are ignored.
    cache_control: dict[str, Any] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class RefusalPart(SentBack):
    """Refusal of an earlier answer, which is text for the chat template."""

    type: Literal["refusal"]
    refusal: str


class ImageURL(SentBack):
    """Image as a data URI; it is always processed in full detail."""

    url: str
    detail: Literal["auto", "high"] | None = None


class ImagePart(SentBack):
    """Image of a message's content."""

    type: Literal["image_url"]
    image_url: ImageURL
    # Ignored as in a text part.
    cache_control: dict[str, Any] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


Part = Annotated[TextPart | RefusalPart | ImagePart, Field(discriminator="type")]


class ReasoningDetail(SentBack):
    """Part of an earlier answer's reasoning in OpenRouter's format; encrypted parts are refused."""

    type: Literal["reasoning.text", "reasoning.summary"]
    text: str = ""
    summary: str = ""
    # Identifiers of the provider that generated the reasoning; they are ignored.
    id: str | None = None
    format: str | None = None
    index: int | None = None
    signature: str | None = None


class Message(SentBack):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None  # for the chat template
    reasoning: str | None = None  # the same in newer versions of vLLM
    reasoning_details: Annotated[list[ReasoningDetail], Field(fail_fast=True)] | None = None
    refusal: str | None = None  # the content of an earlier answer without content
    # Fields that clients send back with an earlier answer; they are ignored.
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    parsed: Any = None  # added by OpenAI's client, which parses the content

    @model_validator(mode="after")
    def _fits(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(
                f"content is required in a message with the role {self.role}. Add content."
            )
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError(
                "tool_calls is allowed only in messages with the role assistant. Leave "
                "tool_calls out."
            )
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError(
                "tool_call_id is required in messages with the role tool, and not allowed in "
                "messages with other roles. Add or remove tool_call_id."
            )
        if self.role != "user" and any(self.images):
            raise ValueError(
                "parts of the type image_url are allowed only in messages with the role user. "
                "Move the image there."
            )
        return self

    def as_template(self) -> dict[str, Any]:
        """Return the message as a dict with the fields that chat templates use.

        The template receives an image as a part of the type ``image``, without its data.
        """
        unread = {
            "reasoning_content",
            "reasoning",
            "reasoning_details",
            "refusal",
            "annotations",
            "audio",
            "function_call",
            "parsed",
        }
        fields = self.model_dump(exclude_none=True, exclude=unread)
        if isinstance(self.content, list):
            fields["content"] = [
                {"type": "image"}
                if isinstance(part, ImagePart)
                else {"type": "text", "text": _text_of(part)}
                for part in self.content
            ]
        fields.setdefault("content", self.refusal or "")
        return {**fields, "reasoning_content": self.thoughts} if self.thoughts else fields

    @property
    def thoughts(self) -> str:
        """Reasoning of the message; "" without reasoning."""
        details = "".join(part.text or part.summary for part in self.reasoning_details or ())
        return self.reasoning_content or self.reasoning or details

    @property
    def text(self) -> str:
        """Content of the message as a single string."""
        if self.content is None or isinstance(self.content, str):
            return self.content or self.refusal or ""
        return "".join(_text_of(p) for p in self.content if not isinstance(p, ImagePart))

    @property
    def images(self) -> list[str]:
        """URLs of the images in the content."""
        parts = self.content if isinstance(self.content, list) else ()
        return [part.image_url.url for part in parts if isinstance(part, ImagePart)]


def _text_of(part: TextPart | RefusalPart) -> str:
    return part.text if isinstance(part, TextPart) else part.refusal
