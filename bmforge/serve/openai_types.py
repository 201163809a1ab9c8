"""Request types with OpenAI's fields, validated strictly.

Types are not coerced: a string is not accepted as a number. An unsupported field that would change
the answer is rejected by name, unless it has its neutral value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import Field, ValidationError, model_validator

from bmforge.serve.errors import RequestError, explain_types
from bmforge.serve.message_types import AllowedChoice, Choice, Message, Strict, Tool
from bmforge.serve.neutral_fields import CHAT_FIELDS, COMPLETION_FIELDS, POOLING_FIELDS

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "DocumentsRequest",
    "EmbeddingRequest",
    "JsonSchema",
    "ResponseFormat",
    "StreamOptions",
    "StructuredOutputs",
    "VLLMSampling",
    "GenerationRequest",
    "make_chat",
]

Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
# fail_fast: report only the first error of a list, which may have a hundred thousand errors.
Texts = Annotated[list[str], Field(fail_fast=True)]
Ids = Annotated[list[TokenId], Field(fail_fast=True)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Inputs = str | Texts | Ids | Annotated[list[Ids], Field(fail_fast=True)]


class StreamOptions(Strict):
    """Options of streaming."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM


class StructuredOutputs(Strict):
    """Constraint on answers with vLLM's field names; only one field may be set."""

    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    # vLLM's options.
    disable_any_whitespace: bool | None = None  # whitespace is fixed
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: None = None
    structural_tag: None = None


class JsonSchema(Strict):
    """A named JSON schema."""

    name: str = Field(max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """Required format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _fits(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError(
                "json_schema is required with type=json_schema, and not allowed with other "
                "types. Add or remove json_schema."
            )
        return self


class VLLMSampling(Strict):
    """vLLM's sampling parameters, common to chat and text completions and to responses."""

    seed: int | None = None
    stop: str | Texts | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    top_k: int | None = Field(None, ge=-1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    structured_outputs: StructuredOutputs | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = Field(None, max_length=256)


class GenerationRequest(VLLMSampling):
    """Fields common to the requests for chat completions and for text completions."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Sampling parameters.
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    min_tokens: int | None = Field(None, ge=0)
    bad_words: Texts | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    stop_token_ids: Ids | None = None
    response_format: ResponseFormat | None = None
    sse_ping_interval: int | None = Field(None, ge=-1)  # llama.cpp
    # Accepted and ignored.
    user: str | None = None
    request_id: str | None = None  # vLLM
    session_id: str | None = None  # vLLM
    cache_prompt: bool | None = None  # llama.cpp; a hint for the prefix cache

    @model_validator(mode="after")
    def _streams(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options has no effect without stream=true. Leave it out.")
        return self

    @property
    def count(self) -> int:
        """Number of answers per prompt."""
        return self.n or 1

    @property
    def is_greedy(self) -> bool:
        """True if sampling with these parameters is the same as greedy decoding.

        Scores divided by less than 1e-38 overflow fp32; vLLM decodes greedily below 1e-5 too.
        """
        return self.top_p == 0 or (self.temperature is not None and self.temperature < 1e-5)

    @property
    def outputs(self) -> StructuredOutputs | None:
        """Constraint on the answers, from `structured_outputs` or vLLM's older `guided_*` fields.

        Raises:
            RequestError: both are set.
        """
        rules: dict[str, Any] = {
            "json": self.guided_json,
            "regex": self.guided_regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar,
        }
        guided = {name: rule for name, rule in rules.items() if rule is not None}
        if guided and self.structured_outputs is not None:
            name = f"guided_{next(iter(guided))}"
            raise RequestError(
                f"{name} and structured_outputs cannot be used together. Keep one of them.", name
            )
        return StructuredOutputs(**guided) if guided else self.structured_outputs

    @property
    def stops(self) -> list[str]:
        """Stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """True if a stream ends with the token usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        """True if every chunk of a stream contains the token usage so far."""
        options = self.stream_options
        return self.wants_usage and options is not None and bool(options.continuous_usage_stats)


class ChatRequest(GenerationRequest):
    """Request for a chat completion."""

    neutral_fields = CHAT_FIELDS
    foreign_fields: ClassVar[Mapping[str, str]] = {
        "prompt": "messages, or /v1/completions",
        "input": "messages, or /v1/responses",
        "system": "a message with the role system",
    }
    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None
    parallel_tool_calls: bool | None = None
    # Accepted and ignored.
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    # Reasoning.
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = Field(None, ge=-1)  # -1: no limit, as in vLLM
    # vLLM's arguments of the chat template.
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _fits(self) -> ChatRequest:
        limits = self.max_tokens, self.max_completion_tokens
        if None not in limits and limits[0] != limits[1]:
            raise ValueError(
                "max_tokens and max_completion_tokens cannot be used together. Keep one of them."
            )
        if self.top_logprobs and not self.logprobs:
            raise ValueError(
                "top_logprobs has no effect without logprobs=true. Set logprobs=true, or leave "
                "top_logprobs out."
            )
        if not self.tools and self.tool_choice not in (None, "none", "auto"):
            raise ValueError("tool_choice has no effect without tools. Leave it out.")
        self._fits_template()
        return self

    def _fits_template(self) -> None:
        reserved = {"messages", "tools", "add_generation_prompt"}
        if twice := reserved & (self.chat_template_kwargs or {}).keys():
            raise ValueError(
                f"chat_template_kwargs.{min(twice)} is not allowed, because {min(twice)} is a "
                "separate field of the request. Set that field instead."
            )
        if not self.continue_final_message:
            if self.add_generation_prompt is False:
                raise ValueError(
                    "add_generation_prompt=false is allowed only with "
                    "continue_final_message=true. Set both, or leave both out."
                )
            return
        if self.add_generation_prompt:
            raise ValueError(
                "add_generation_prompt and continue_final_message cannot both be true. Set one "
                "of them to false."
            )
        if self.messages[-1].role != "assistant" or len(self.messages) < 2:
            raise ValueError(
                "continue_final_message continues the last of several messages, which must "
                "have the role assistant. Add this message, or leave continue_final_message "
                "out."
            )
        if self.tool_mode == "required":
            raise ValueError(
                'continue_final_message cannot be used with tool_choice="required" or a named '
                'function. Set tool_choice to "auto" or "none".'
            )

    @property
    def tool_mode(self) -> Literal["none", "auto", "required"]:
        """Whether no tool, any number of tools or at least one tool is called."""
        choice = self.tool_choice or "auto"
        if isinstance(choice, AllowedChoice):
            return choice.allowed_tools.mode
        return choice if isinstance(choice, str) else "required"

    @property
    def most_tokens(self) -> int | None:
        """Maximum length of an answer in tokens: `max_completion_tokens` or `max_tokens`."""
        return self.max_completion_tokens or self.max_tokens


def make_chat(fields: dict[str, Any]) -> ChatRequest:
    """Build a chat request from fields that were converted from another protocol.

    Raises:
        RequestError: a field is invalid or not supported.
    """
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise explain_types(RequestValidationError(error.errors())) from error


class CompletionRequest(GenerationRequest):
    """Request to complete prompts, which are strings or lists of token ids."""

    neutral_fields = COMPLETION_FIELDS
    foreign_fields: ClassVar[Mapping[str, str]] = {
        "messages": "prompt, or /v1/chat/completions",
        "input": "prompt",
    }
    prompt: Inputs
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0)
    echo: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0)
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _fits(self) -> CompletionRequest:
        if self.max_tokens == 0 and not (self.echo or self.prompt_logprobs is not None):
            raise ValueError(
                "max_tokens=0 generates no text, so it is allowed only with echo or "
                "prompt_logprobs. Add one of these fields, or raise max_tokens."
            )
        if self.stream and (self.echo or self.prompt_logprobs is not None):
            raise ValueError("echo and prompt_logprobs cannot be streamed. Leave stream out.")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """Prompts as a list."""
        return split_inputs(self.prompt, "prompt")

    @property
    def most_tokens(self) -> int | None:
        """Maximum length of an answer in tokens."""
        return self.max_tokens


class EmbeddingRequest(Strict):
    """Request for embeddings of texts or token ids."""

    neutral_fields = POOLING_FIELDS
    model: str
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    user: str | None = None

    @property
    def inputs(self) -> list[str | list[int]]:
        """Inputs as a list."""
        return split_inputs(self.input, "input")


class DocumentsRequest(Strict):
    """Request to fill in CPM-Bee documents, whose texts under ``<ans>`` are generated."""

    model: str
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] = Field(min_length=1)
    examples: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    max_tokens: int | None = Field(None, ge=1)
    num_beams: int | None = Field(None, ge=1, le=8)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: Share | None = None
    top_k: int | None = Field(None, ge=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    seed: int | None = None
    user: str | None = None


def split_inputs(inputs: Any, name: str) -> list[str | list[int]]:
    """Return a list of the inputs (strings or lists of token ids), also for a single input.

    Raises:
        RequestError: no input is given, or an input is empty.
    """
    items = [inputs] if isinstance(inputs, str) else list(inputs)
    if items and isinstance(items[0], int):
        items = [items]
    if not items or not all(items):
        raise RequestError(
            f"{name} is empty or contains an empty string. Send non-empty strings.", name
        )
    return items
