"""Converts conversations to prompts, and determines the tokens and strings that end an answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from bmforge.errors import BmforgeError, ConfigError, DataError, MissingDependencyError
from bmforge.infer.chat import encode_messages, find_ends
from bmforge.infer.images import read_data_uri
from bmforge.infer.openbmb.chat import ChatConfig, join_history
from bmforge.infer.processor import find_processor
from bmforge.logging import get_logger
from bmforge.serve.errors import RequestError
from bmforge.serve.idle_unloading import AnyEngine
from bmforge.serve.message_types import Message
from bmforge.serve.openai_types import ChatRequest
from bmforge.serve.settings import ServeConfig
from bmforge.serve.thoughts import find_thought_marks, opens_thought
from bmforge.serve.tool_formats import FORMATS, find_format
from bmforge.serve.tools import ToolUse
from bmforge.tokenizers.chat_messages import normalize_message
from bmforge.tokenizers.chat_template import ChatTemplate, find_template
from bmforge.tokenizers.template_limits import TemplateLimits

__all__ = ["EncodedPrompt", "Prompter", "template_variables"]

_TAIL = 16  # number of last prompt tokens that may contain the start of the reasoning
_THINKING = ("enable_thinking", "thinking")  # Qwen, GLM; DeepSeek


class EncodedPrompt(NamedTuple):
    """Prompt of a conversation, with the tokens and strings that end its answer.

    Attributes:
        ids: token ids of the conversation.
        ends: tokens that end an answer.
        stops: strings that end an answer.
        begins: prefix of the answer that the client does not receive, such as a sentinel token.
        thought_marks: delimiters of the model's reasoning; None if it is not separated.
        is_thinking: True if the prompt ends inside the reasoning.
        has_thought: True if the prompt ends after the reasoning, so that the answer has none.
        inputs: the model's inputs for the images of the conversation.
    """

    ids: list[int]
    ends: tuple[int, ...]
    stops: tuple[str, ...] = ()
    begins: str = ""
    thought_marks: tuple[str, str] | None = None
    is_thinking: bool = False
    has_thought: bool = False
    inputs: Mapping[str, Tensor] | None = None


class Prompter:
    """Converts conversations to prompts with the model's chat template or dialogue format.

    Args:
        engine: engine with the model.
        directory: model directory with the template; None for the default template.
        config: limits of the template.

    Attributes:
        template: the template; None for EVA, and for models that do not generate text.
        tool_format: format of tool calls; None if the template does not support them.
        thought_marks: delimiters of the model's reasoning; None if it is not separated.
        processor: processor of images; None if the model supports only text.
    """

    def __init__(self, engine: AnyEngine, directory: Path | None, config: ServeConfig) -> None:
        self._engine, self._config = engine, config
        self.processor = None
        if directory is not None and engine.model.takes_images:
            try:
                self.processor = find_processor(directory)
            except (ConfigError, MissingDependencyError) as error:
                get_logger().warning("requests with images are refused: %s", error)
        self.template: ChatTemplate | None = None
        traits = engine.model.traits
        if traits.can_generate and traits.objective not in ("dialogues", "documents"):
            source = None if directory is None else find_template(directory)
            chat = config.chat
            limits = TemplateLimits(chat.template_s, 2 * config.body.max_body_bytes)
            self.template = ChatTemplate(source, engine.tokenizer, limits, chat.parse_special)

        source = "" if self.template is None else self.template.source
        self.tool_format = find_format(source)
        if config.chat.tool_call_parser is not None and self.template is not None:
            self.tool_format = FORMATS[config.chat.tool_call_parser]
        self.thought_marks = find_thought_marks(source) if config.chat.split_reasoning else None

    def write(self, body: ChatRequest, tools: ToolUse) -> EncodedPrompt:
        """Build the prompt of a conversation.

        Args:
            body: request with the messages and the variables of the template.
            tools: tools that may be called.

        Raises:
            RequestError: the model does not support chat, or its template raises an error.
        """
        model, tokenizer = self._engine.model, self._engine.tokenizer
        images = self._read_images(body.messages)
        if model.traits.can_generate and model.traits.objective == "dialogues":
            return self._write_dialogue(body.messages)
        if self.template is None:
            raise RequestError(
                f"the model {type(model).__name__} does not support conversations, because it has "
                "no chat template. Use /v1/completions instead.",
                "messages",
                code="unsupported_model",
            )
        messages, last = body.messages, None
        if body.continue_final_message:
            messages, last = messages[:-1], messages[-1]
        variables = template_variables(body, self.template.variables, self.thought_marks)
        turns = [normalize_message(m.as_template(), images=True) for m in messages]
        template, processor = self.template, self.processor

        def ask(begin: str) -> tuple[list[int], Mapping[str, Tensor] | None]:
            if processor is None:
                shown = tools.shown
                args = template, turns, model, tokenizer, shown, begin
                return encode_messages(*args, **variables), None
            text, _ = template.encode(turns, tools.shown, begin, **variables)
            encoded = processor.encode(text, images)
            return encoded.ids, encoded.inputs

        try:
            ids, inputs = ask("")
            marks, tail = self.thought_marks, tokenizer.decode(ids[-_TAIL:])
            is_thinking = opens_thought(tail, marks)
            has_thought = marks is not None and tail.rstrip().endswith(marks[1])
            begin = tools.begin
            if last is not None:
                begin = self._write_last(last, is_thinking)
            elif is_thinking and tools.rule is not None and marks is not None:
                begin = f"{marks[1]}\n\n{begin}"
            if begin:
                ids, inputs = ask(begin)
                is_thinking = last is not None and not last.text
                has_thought = not is_thinking
            mark = self.template.end_mark()
        except BmforgeError as error:
            raise RequestError(str(error), "messages", code="invalid_value") from error
        mark = mark.strip() or mark
        is_token = len(tokenizer.encode(mark)) == 1 if mark else True
        apart = model.traits.is_encoder_decoder
        # Like `decode_answer`: a decoder's padding is not part of the answer.
        padding = [tokenizer.pad_id] if apart and tokenizer.pad_id is not None else []
        ends = tuple(dict.fromkeys([*find_ends(model, tokenizer, mark), *padding]))
        begins = model.traits.answer_sentinel.format(0) if apart else ""
        stops = () if is_token or apart else (mark,)
        state = is_thinking, has_thought
        return EncodedPrompt(ids, ends, stops, begins, marks, *state, inputs)

    def _write_last(self, message: Message, is_thinking: bool) -> str:
        """Return the reasoning and the text of a message that the answer continues.

        Args:
            message: the message.
            is_thinking: True if the template has begun the reasoning.
        """
        marks, text, thoughts = self.thought_marks, message.text, message.thoughts
        if not self._config.chat.parse_special:
            text, thoughts = map(self._engine.tokenizer.escape_specials, (text, thoughts))
        if marks is None or not (thoughts or is_thinking):
            return text
        if marks[1] in text:
            return text.removeprefix(marks[0]) if is_thinking else text
        opened = thoughts if is_thinking else f"{marks[0]}\n{thoughts}"
        return f"{opened}\n{marks[1]}\n\n{text}" if text else opened

    def _read_images(self, messages: Sequence[Message]) -> list[Any]:
        """Decode the images of a conversation.

        Raises:
            RequestError: the model supports only text, or an image is not a data URI, damaged or
                too large.
        """
        images, limits = [], self._config.limits
        for number, message in enumerate(messages):
            field = f"messages.{number}.content"
            if message.images and self.processor is None:
                raise RequestError(
                    f"{field} has a part that is not text, but this model supports only text. "
                    "Leave this part out.",
                    field,
                    code="unsupported_value",
                )
            for uri in message.images:
                try:
                    images.append(read_data_uri(uri, "image_url.url", limits.max_image_pixels))
                except DataError as error:
                    raise RequestError(f"{field}: {error}", field, code="invalid_value") from error
        return images

    def _write_dialogue(self, messages: Sequence[Message]) -> EncodedPrompt:
        """Build a prompt in EVA's format from the last utterances that fit into its window."""
        tokenizer = self._engine.tokenizer
        if any(message.role not in ("user", "assistant") for message in messages):
            raise RequestError(
                "EVA's dialogue format supports only the roles user and assistant. Leave "
                "messages with other roles out.",
                "messages",
            )
        turns = [tokenizer.encode(message.text) for message in messages]
        end, blank = tokenizer.role_id("sep"), tokenizer.sentinel_id(0)
        ids = join_history(turns, end, blank, ChatConfig().window)
        return EncodedPrompt(ids, (end,))


def template_variables(
    body: ChatRequest, readable: Collection[str], thought_marks: tuple[str, str] | None
) -> dict[str, Any]:
    """Return a dict with the chat template variables that a request sets.

    Args:
        body: request body.
        readable: variables that the template reads.
        thought_marks: delimiters of the model's reasoning; None if the model does not reason.

    Raises:
        RequestError: the template does not read a variable, which would have no effect.
    """
    variables = dict(body.chat_template_kwargs or {})
    if body.enable_thinking is not None:
        variables["enable_thinking"] = body.enable_thinking
    effort = body.reasoning_effort
    if effort is not None and "reasoning_effort" in readable:
        variables["reasoning_effort"] = effort
    elif effort is not None:
        name = next((name for name in _THINKING if name in readable), "enable_thinking")
        variables.setdefault(name, effort not in ("none", "minimal"))
    for name in [name for name in variables if name not in readable]:
        is_off = name in _THINKING and variables[name] is False and thought_marks is None
        is_on = name in _THINKING and variables[name] is True and thought_marks is not None
        # Reasoning may be disabled for a model that never reasons, and enabled for one that always
        # does.
        if not (is_off or is_on):
            is_given = name in (body.chat_template_kwargs or {})
            field = f"chat_template_kwargs.{name}" if is_given else "enable_thinking"
            field = "reasoning_effort" if effort is not None and not is_given else field
            raise RequestError(
                (
                    f"{field} has no effect, because the chat template of this model uses only "
                    f"{', '.join(sorted(readable)) or 'messages'}. Leave it out."
                ),
                field.partition(".")[0],
                code="unsupported_value",
            )
    return variables
