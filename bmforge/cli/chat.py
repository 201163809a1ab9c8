"""`bmforge chat MODEL`: a conversation in the terminal, or line by line through a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from bmforge.cli.options import ChatCommand
from bmforge.errors import ConfigError
from bmforge.infer.chat import Conversation
from bmforge.infer.openbmb.chat import Chat, ChatConfig
from bmforge.infer.openbmb.documents import fill_documents
from bmforge.logging import get_logger
from bmforge.models import AutoModel
from bmforge.models.hub import find_model
from bmforge.settings import TalkConfig
from bmforge.tokenizers import AutoTokenizer
from bmforge.tokenizers.chat_template import ChatTemplate, find_template

__all__ = ["OWN_FORMS", "TalkConfig", "answer_once", "run_chat", "talk"]

# Objectives of families that answer in a form of their own.
OWN_FORMS = ("dialogues", "documents")
_EVA_ALONE = ("window", "no_repeat_ngram")


class Talk(Protocol):
    """What answers."""

    def reply(self, text: str) -> str:
        """Say something and return the answer."""

    def clear(self) -> None:
        """Forget what was said."""


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


def run_chat(command: ChatCommand) -> None:
    """Talk to a model in the terminal."""
    talk(command.model, command.config)


def talk(model: str, config: TalkConfig) -> None:
    """Answer what is typed until the input ends.

    Args:
        model: directory, hub id or short name of a model that writes text, with its tokenizer.
        config: how to answer.

    Raises:
        ConfigError: the model writes no text, or an option that it has not.
    """
    chat = _open(model, config)
    if config.seed is None:
        torch.seed()
    for line in _read_lines():
        if line == "/exit":
            return
        if line == "/clear":
            chat.clear()
        elif line:
            print(chat.reply(line), flush=True)


def answer_once(model: Any, tokenizer: Any, directory: Path, text: str, **options: Any) -> str:
    """Return what a model answers to one thing that is said, in the form of its chat template.

    An EVA and a CPM-Bee answer in `generate` as it is.

    Args:
        model: any that writes text.
        tokenizer: its own.
        directory: of both, where the template is.
        text: what is said.
        options: fields of `GenerationConfig`.
    """
    return _converse(model, tokenizer, directory, options).reply(text)


def _open(name: str, config: TalkConfig) -> Talk:
    """Return what answers with a model, in the model's form."""
    directory, options = find_model(name), config.given()
    model: Any = AutoModel.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    objective = model.traits.objective
    if config.system is not None and objective in OWN_FORMS:
        raise ConfigError(
            f"system={config.system!r} has no place in the form of a {type(model).__name__}. "
            "Leave it out."
        )
    if objective == "dialogues":
        return Chat(model, tokenizer, ChatConfig(**options))
    alone = [n for n in _EVA_ALONE if n in options]
    if alone:
        raise ConfigError(
            f"{', '.join(alone)} is an EVA's, and {name!r} is a {type(model).__name__}. Leave it "
            "out."
        )
    if options.get("num_beams", 1) == 1:
        options = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, **options}
    if objective == "documents":
        return _Documents(model, tokenizer, options)
    return _converse(model, tokenizer, directory, options, config.system)


def _converse(
    model: Any, tokenizer: Any, directory: Path, options: dict[str, Any], system: str | None = None
) -> Conversation:
    """Return a conversation by the template in a model's directory."""
    source = find_template(directory)
    if source is None:
        get_logger().info("%s has no chat template: a plain one is used", directory)
    chat = Conversation(model, tokenizer, ChatTemplate(source, tokenizer), system=system)
    chat.options = chat.options.replace(**options)
    return chat


def _read_lines() -> Iterator[str]:
    """Yield what is typed, with a mark to type at where a person does."""
    asks = sys.stdin.isatty()
    while True:
        if asks:
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        yield line.strip()
