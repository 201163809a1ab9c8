"""Conversion of conversations to prompts, with the ends of their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bmforge.errors import BmforgeError
from bmforge.infer.chat import encode_messages, find_ends
from bmforge.infer.openbmb.chat import ChatConfig, join_history
from bmforge.serve.errors import RequestError
from bmforge.serve.openai_types import Message
from bmforge.serve.settings import ServeConfig
from bmforge.serve.sleeping import AnyEngine
from bmforge.tokenizers.chat_messages import normalize_message
from bmforge.tokenizers.chat_template import ChatTemplate, find_template
from bmforge.tokenizers.template_limits import TemplateLimits

__all__ = ["Prompt", "Prompter"]


class Prompt(NamedTuple):
    """A prompt, and the ends of its answer.

    Attributes:
        ids: token ids of the conversation.
        ends: tokens that end an answer.
        stops: strings that end an answer.
        begins: prefix of the answer that is not shown.
    """

    ids: list[int]
    ends: tuple[int, ...]
    stops: tuple[str, ...] = ()
    begins: str = ""


class Prompter:
    """Converts conversations to prompts with a model's template or dialogue format.

    Args:
        engine: engine with the model.
        directory: model directory with the template; None uses the default template.
        config: limits of the template.

    Attributes:
        template: the template; None for EVA, and for models that do not generate text.
    """

    def __init__(self, engine: AnyEngine, directory: Path | None, config: ServeConfig) -> None:
        self._engine = engine
        self.template: ChatTemplate | None = None
        traits = engine.model.traits
        if traits.writes and traits.objective not in ("dialogues", "documents"):
            source = None if directory is None else find_template(directory)
            limits = TemplateLimits(config.template_s, 2 * config.max_body_bytes)
            self.template = ChatTemplate(source, engine.tokenizer, limits)

    @property
    def writes_calls(self) -> bool:
        """Whether the template asks for calls as ``<tool_call>`` and JSON."""
        source = "" if self.template is None else self.template.source
        return "<tool_call>" in source and "tools" in source and "<function=" not in source

    def write(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        begin: str = "",
        **variables: Any,
    ) -> Prompt:
        """Return the prompt of a conversation.

        Args:
            messages: messages of the conversation.
            tools: tools that may be called.
            begin: start of the answer, which the model continues.
            variables: further variables of the chat template, such as ``enable_thinking``.

        Raises:
            RequestError: the model does not support chat, or its template raises an error.
        """
        model, tokenizer = self._engine.model, self._engine.tokenizer
        if model.traits.writes and model.traits.objective == "dialogues":
            return self._write_dialogue(messages)
        if self.template is None:
            raise RequestError(
                f"{type(model).__name__} does not converse: it has no form for what is said",
                "messages",
                code="unsupported_model",
            )
        turns = [normalize_message(m.model_dump(exclude_none=True)) for m in messages]
        try:
            ids = encode_messages(self.template, turns, model, tokenizer, tools, begin, **variables)
            mark = self.template.end_mark()
        except BmforgeError as error:
            raise RequestError(str(error), "messages", code="invalid_value") from error
        mark = mark.strip() or mark
        is_token = len(tokenizer.encode(mark)) == 1 if mark else True
        apart = model.traits.reads == "apart"
        # As in `decode_answer`: a decoder's padding is not part of the answer.
        padding = [tokenizer.pad_id] if apart and tokenizer.pad_id is not None else []
        ends = tuple(dict.fromkeys([*find_ends(model, tokenizer, mark), *padding]))
        begins = model.traits.answer_sentinel.format(0) if apart else ""
        return Prompt(ids, ends, () if is_token or apart else (mark,), begins)

    def _write_dialogue(self, messages: Sequence[Message]) -> Prompt:
        """Return the last utterances in EVA's format, as many as fit into its window."""
        tokenizer = self._engine.tokenizer
        if any(message.role not in ("user", "assistant") for message in messages):
            raise RequestError(
                "EVA's form has room for what user and assistant said alone", "messages"
            )
        utterances = [tokenizer.encode(message.text) for message in messages]
        end, blank = tokenizer.role_id("sep"), tokenizer.sentinel_id(0)
        ids = join_history(utterances, end, blank, ChatConfig().window)
        return Prompt(ids, (end,))
