"""`bmforge chat MODEL`: chat with a model in the terminal, or line by line through a pipe."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bmforge.cli.open_model import opened_model, with_own_adapter
from bmforge.cli.options import ChatCommand
from bmforge.errors import BmforgeError, ConfigError
from bmforge.files import replace_file
from bmforge.infer.chat import Conversation
from bmforge.infer.conversation import (
    OWN_FORMS,
    ChatSession,
    ChatSessionConfig,
    open_chat_session,
    open_conversation,
)
from bmforge.infer.engine import EngineConfig
from bmforge.recipes.adapter_dirs import find_source
from bmforge.settings import MemoryOptions
from bmforge.tokenizers import AutoTokenizer

__all__ = [
    "OWN_FORMS",
    "ChatSessionConfig",
    "ThoughtFilter",
    "answer_once",
    "run_chat",
    "run_chat_session",
]

_HELP = """\
/clear          forget the conversation
/system TEXT    set the system message (without TEXT: remove it) and forget the conversation
/image FILE     attach an image to the next message
/save FILE      write the conversation to a .json file
/load FILE      continue a conversation of such a file
/thoughts       show or hide the model's thoughts (<think>...</think>)
/exit           end (Ctrl-D too)"""
_OPEN, _CLOSE = "<think>", "</think>"


def run_chat(command: ChatCommand) -> None:
    """Chat with a model in the terminal."""
    run_chat_session(
        command.model,
        command.config,
        command.memory,
        command.adapter,
        not command.hide_thoughts,
        command.allow_other_base,
    )


def run_chat_session(
    model: str,
    config: ChatSessionConfig,
    memory: MemoryOptions | None = None,
    adapters: Sequence[str] = (),
    shows_thoughts: bool = True,
    allow_other_base: bool = False,
) -> None:
    """Answer each line of the input until the input ends.

    Args:
        model: directory, hub id or short name of a model that generates text, a run's
            directory, or an adapter directory.
        config: generation options.
        memory: memory limits of the model (default: none).
        adapters: adapter directories to attach; DIR=0.5 scales the adapter's output by 0.5.
        shows_thoughts: print the text between ``<think>`` and ``</think>``.
        allow_other_base: accept adapters that were trained on a base model with other weights.

    Raises:
        ConfigError: the model does not generate text, or does not support an option.
    """
    source, memory = find_source(model), memory or MemoryOptions()
    tokenizer = AutoTokenizer.from_pretrained(source.tokenizer)
    own = with_own_adapter(source, adapters)
    rows = config.num_beams or 3
    with opened_model(source.model, memory, rows, own, allow_other_base) as opened:
        limit = None
        if memory.device_budget is not None:
            limit = EngineConfig(max_tokens=memory.max_model_len).tokens_of(opened)
        chat = open_chat_session(opened, tokenizer, config, directory=source.tokenizer, limit=limit)
        if config.seed is None:
            torch.seed()
        _Session(chat, shows_thoughts).run()


class ThoughtFilter:
    """Removes ``<think>...</think>`` from text that arrives in chunks.

    Args:
        is_inside: whether the text begins inside a thought because the prompt ends with
            ``<think>``.
    """

    def __init__(self, is_inside: bool = False) -> None:
        self._is_inside, self._held = is_inside, ""

    def add(self, piece: str) -> str:
        """Add a chunk of text; return the text that can be shown now."""
        self._held += piece
        shown = ""
        while True:
            mark = _CLOSE if self._is_inside else _OPEN
            before, matched, behind = self._held.partition(mark)
            if not matched:
                break
            shown += "" if self._is_inside else before
            self._held = behind.lstrip("\n") if self._is_inside else behind
            self._is_inside = not self._is_inside
        # The text may end with a part of a tag.
        held_length = next(
            (n for n in range(len(mark) - 1, 0, -1) if self._held.endswith(mark[:n])), 0
        )
        cut = len(self._held) - held_length
        shown += "" if self._is_inside else self._held[:cut]
        self._held = self._held[cut:]
        return shown

    def finish(self) -> str:
        """Return the remaining text that `add` held back, at the end of the answer."""
        remainder, self._held = ("" if self._is_inside else self._held), ""
        return remainder


class _Session:
    """Interactive loop that reads lines, runs commands and prints answers.

    Args:
        chat: conversation with the model.
        shows_thoughts: whether to print the text between ``<think>`` and ``</think>``.
    """

    def __init__(self, chat: ChatSession, shows_thoughts: bool) -> None:
        self._chat, self._shows_thoughts = chat, shows_thoughts

    def run(self) -> None:
        """Answer each line until the input ends or the user types /exit."""
        for line in _read_lines():
            if line == "/exit":
                return
            try:
                if line.startswith("/"):
                    self._command(*line.partition(" ")[::2])
                elif line:
                    self._answer(line)
            except BmforgeError as error:
                # An error in one line does not end an interactive conversation.
                if not sys.stdin.isatty():
                    raise
                print(f"error: {error}", file=sys.stderr)

    def _answer(self, line: str) -> None:
        """Print the answer to a line, token by token if the model is a decoder."""
        chat = self._chat
        opens = isinstance(chat, Conversation) and chat.prompt_opens(_OPEN)
        hidden = ThoughtFilter(is_inside=opens)

        def show(piece: str) -> None:
            print(piece if self._shows_thoughts else hidden.add(piece), end="", flush=True)

        if isinstance(chat, Conversation) and chat.streams and sys.stdout.isatty():
            chat.reply(line, show)
        else:
            show(chat.reply(line))
        print(hidden.finish(), flush=True)

    def _command(self, name: str, value: str) -> None:
        value = value.strip()
        if name == "/clear":
            self._chat.clear()
        elif name == "/thoughts":
            self._shows_thoughts = not self._shows_thoughts
            print(f"reasoning is {'shown' if self._shows_thoughts else 'hidden'}")
        elif name == "/help":
            print(_HELP)
        elif name in ("/system", "/image", "/save", "/load"):
            self._run_command(name, value)
        else:
            raise ConfigError(f"unknown command {name!r}.\n{_HELP}")

    def _run_command(self, name: str, value: str) -> None:
        """Run a command such as /save, which only models with a chat template support."""
        chat = self._chat
        if not isinstance(chat, Conversation):
            raise ConfigError(
                f"{name} is not available, because this model has no chat template "
                "(available: /clear, /thoughts, /help and /exit)."
            )
        if name == "/system":
            chat.set_system(value or None)
            chat.clear()
        elif not value:
            file = "cat.jpg" if name == "/image" else "chat.json"
            raise ConfigError(f"{name} needs a file name, such as {name} {file}.")
        elif name == "/image":
            chat.attach_image(value)
            print(f"attached {value} to the next message")
        elif name == "/save":
            text = json.dumps({"messages": chat.messages}, ensure_ascii=False, indent=1)
            replace_file(Path(value), text + "\n")
            print(f"saved {len(chat.messages)} messages to {value}")
        else:
            _load(chat, Path(value))
            print(f"loaded {len(chat.messages)} messages")


def _load(chat: Conversation, file: Path) -> None:
    """Load a conversation from a file that /save wrote."""
    try:
        messages = json.loads(file.read_text(encoding="utf-8"))["messages"]
        is_valid = all(isinstance(m["role"], str) and _is_content(m["content"]) for m in messages)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"cannot load {str(file)!r} as a conversation ({type(error).__name__}: {error}). Use "
            "a JSON file that /save wrote."
        ) from error
    if not is_valid:
        raise ConfigError(
            f"cannot load {str(file)!r}, because a message has an invalid role or content. Use a "
            "JSON file that /save wrote."
        )
    for message in messages:
        for part in [] if isinstance(message["content"], str) else message["content"]:
            if part["type"] == "image":
                chat.read_image(part["image"])
    system = [m["content"] for m in messages[:1] if m["role"] == "system"]
    chat.set_system(system[0] if system else None)
    chat.history = messages[len(system) :]


def _is_content(content: Any) -> bool:
    """Return True for a string, or a list of text parts and images given as file paths."""
    return isinstance(content, str) or all(
        part["type"] in ("text", "image") and isinstance(part[part["type"]], str)
        for part in content
    )


def answer_once(model: Any, tokenizer: Any, directory: Path, text: str, **options: Any) -> str:
    """Return the model's answer to a single message, rendered with the model's chat template.

    EVA and CPM-Bee need no template, because their `generate` returns answers.

    Args:
        model: any model that generates text.
        tokenizer: the model's tokenizer.
        directory: directory that contains the chat template.
        text: the user's message.
        options: fields of `GenerationConfig`.
    """
    return open_conversation(model, tokenizer, directory, options).reply(text)


def _read_lines() -> Iterator[str]:
    """Yield the input lines; on a terminal, with a prompt, line editing and history."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.strip()
        return
    with contextlib.suppress(ImportError):  # Windows has no readline
        import readline  # noqa: F401 - gives input() line editing and history
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        yield line.strip()
