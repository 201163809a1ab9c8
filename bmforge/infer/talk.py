"""A conversation with any model that writes text, in the form it was made for.

EVA and CPM-Bee have forms of their own; all others talk in that of a chat template.
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
from bmforge.settings import TalkConfig
from bmforge.tokenizers.chat_template import ChatTemplate, find_template

__all__ = ["OWN_FORMS", "Talk", "TalkConfig", "TalkInTurns", "converse", "open_talk"]

# Objectives of families that answer in a form of their own.
OWN_FORMS = ("dialogues", "documents")
_EVA_ALONE = ("window", "no_repeat_ngram")


class Talk(Protocol):
    """What answers."""

    def reply(self, text: str) -> str:
        """Say something and return the answer."""

    def clear(self) -> None:
        """Forget what was said."""


class TalkInTurns:
    """A conversation that waits for nothing: every answer is one request.

    Args:
        talk: the conversation.
        turn: has the model for one answer.
    """

    def __init__(self, talk: Talk, turn: Callable[[], AbstractContextManager[Any]]) -> None:
        self._talk, self._turn = talk, turn

    def reply(self, text: str) -> str:
        """Say something and return the answer; both become history."""
        with self._turn():
            return self._talk.reply(text)

    def clear(self) -> None:
        """Forget what was said."""
        self._talk.clear()


class _Documents:
    """A CPM-Bee: what was said is a document's input, the answer is written under ``<ans>``."""

    def __init__(self, model: Any, tokenizer: Any, options: dict[str, Any]) -> None:
        self.model, self.tokenizer, self.options = model, tokenizer, options
        self._said: list[str] = []

    def reply(self, text: str) -> str:
        """Say something and return the answer; both become history."""
        said = [*self._said, text]
        document = {"input": self.tokenizer.escape("\n".join(said)), "<ans>": ""}
        (filled,) = fill_documents(self.model, self.tokenizer, [document], **self.options)
        answer = str(filled["<ans>"]).replace("<<", "<")
        self._said = [*said, answer]
        return answer

    def clear(self) -> None:
        """Forget what was said."""
        self._said = []


def open_talk(
    model: Any,
    tokenizer: Any,
    config: TalkConfig,
    *,
    directory: Path | None = None,
    limit: int | None = None,
) -> Talk:
    """Return what answers with a model, in the model's form.

    Args:
        model: any that writes text.
        tokenizer: its own.
        config: how to answer.
        directory: of both, where a chat template may be.
        limit: longest row in tokens, answer included; None takes the model's.

    Raises:
        ConfigError: the model writes no text, or an option that it has not.
    """
    options, objective = config.given(), model.traits.objective
    family = type(model).__name__
    if config.system is not None and objective in OWN_FORMS:
        raise ConfigError(
            f"system={config.system!r} has no place in the form of a {family}. Leave it out."
        )
    if objective == "dialogues":
        return Chat(model, tokenizer, ChatConfig(**options))
    alone = [n for n in _EVA_ALONE if n in options]
    if alone:
        raise ConfigError(f"{', '.join(alone)} is an EVA's, and this is a {family}. Leave it out.")
    if options.get("num_beams", 1) == 1:
        options = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, **options}
    if objective == "documents":
        return _Documents(model, tokenizer, options)
    return converse(model, tokenizer, directory, options, config.system, limit)


def converse(
    model: Any,
    tokenizer: Any,
    directory: Path | None,
    options: dict[str, Any],
    system: str | None = None,
    limit: int | None = None,
) -> Conversation:
    """Return a conversation by the template in a model's directory, or by a plain one.

    Args:
        model, tokenizer, directory, limit: as in `open_talk`.
        options: fields of `GenerationConfig`.
        system: what is said before all else.
    """
    source = None if directory is None else find_template(directory)
    if source is None:
        get_logger().info("%s has no chat template: a plain one is used", directory or "the model")
    template = ChatTemplate(source, tokenizer)
    chat = Conversation(model, tokenizer, template, system=system, limit=limit)
    chat.options = chat.options.replace(**options)
    return chat
