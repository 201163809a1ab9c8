"""Conversations with any text-generating model, in the format that the model was trained on.

EVA and CPM-Bee have their own formats; all other models use a chat template.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from bmforge.errors import ConfigError
from bmforge.infer.chat import Conversation
from bmforge.infer.openbmb.chat import Chat, ChatConfig
from bmforge.infer.openbmb.documents import fill_documents
from bmforge.logging import get_logger
from bmforge.settings import ChatSessionConfig
from bmforge.tokenizers.chat_template import ChatTemplate, find_template

__all__ = [
    "OWN_FORMS",
    "ChatSession",
    "ChatSessionConfig",
    "LockedConversation",
    "open_conversation",
    "open_chat_session",
]

# Training objectives of families with their own conversation format.
OWN_FORMS = ("dialogues", "documents")
_EVA_ALONE = ("window", "no_repeat_ngram")


class ChatSession(Protocol):
    """Interface of a conversation."""

    def reply(self, text: str) -> str:
        """Send a user message and return the answer."""

    def clear(self) -> None:
        """Clear the history."""


class LockedConversation:
    """Conversation that locks the model only while an answer is generated.

    Args:
        session: conversation to wrap.
        turn: factory of context managers that lock the model for one answer.
    """

    def __init__(
        self, session: ChatSession, turn: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._session, self._turn = session, turn

    def reply(self, text: str) -> str:
        """Send a user message and return the answer; both are appended to the history."""
        with self._turn():
            return self._session.reply(text)

    def clear(self) -> None:
        """Clear the history."""
        self._session.clear()


class _Documents:
    """Conversation with CPM-Bee: the history is the input, the answer is filled into ``<ans>``."""

    def __init__(self, model: Any, tokenizer: Any, options: dict[str, Any]) -> None:
        self.model, self.tokenizer, self.options = model, tokenizer, options
        self._said: list[str] = []

    def reply(self, text: str) -> str:
        """Send a user message and return the answer; both are appended to the history."""
        turns = [*self._said, text]
        document = {"input": self.tokenizer.escape("\n".join(turns)), "<ans>": ""}
        (filled,) = fill_documents(self.model, self.tokenizer, [document], **self.options)
        answer = str(filled["<ans>"]).replace("<<", "<")
        self._said = [*turns, answer]
        return answer

    def clear(self) -> None:
        """Clear the history."""
        self._said = []


def open_chat_session(
    model: Any,
    tokenizer: Any,
    config: ChatSessionConfig,
    *,
    directory: Path | None = None,
    limit: int | None = None,
) -> ChatSession:
    """Open a conversation in the model's own format.

    Args:
        model: model that generates text.
        tokenizer: the model's tokenizer.
        config: generation options and system message.
        directory: directory of the model and tokenizer, which may contain a chat template.
        limit: maximum length of the conversation in tokens, including the answer; None means the
            model's maximum length.

    Raises:
        ConfigError: the model does not generate text, or does not support an option.
    """
    options, objective = config.given(), model.traits.objective
    family = type(model).__name__
    if config.system is not None and objective in OWN_FORMS:
        raise ConfigError(
            f"system={config.system!r} is not supported by the dialogue format of a {family}. "
            "Leave it out."
        )
    if objective == "dialogues":
        return Chat(model, tokenizer, ChatConfig(**options))
    alone = [n for n in _EVA_ALONE if n in options]
    if alone:
        raise ConfigError(
            f"only EVA supports {', '.join(alone)}, but the model is a {family}. Leave "
            f"{' and '.join(alone)} out."
        )
    if options.get("num_beams", 1) == 1:
        options = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, **options}
    if objective == "documents":
        return _Documents(model, tokenizer, options)
    return open_conversation(model, tokenizer, directory, options, config.system, limit)


def open_conversation(
    model: Any,
    tokenizer: Any,
    directory: Path | None,
    options: dict[str, Any],
    system: str | None = None,
    limit: int | None = None,
) -> Conversation:
    """Open a conversation with the chat template of the model's directory, or the default one.

    Args:
        model, tokenizer, directory, limit: arguments of `open_chat_session`.
        options: fields of `GenerationConfig`.
        system: system message.
    """
    source = None if directory is None else find_template(directory)
    if source is None:
        get_logger().info(
            "%s has no chat template, so a plain template is used", directory or "the model"
        )
    template = ChatTemplate(source, tokenizer)
    chat = Conversation(model, tokenizer, template, system=system, limit=limit, directory=directory)
    chat.options = chat.options.replace(**options)
    return chat
