"""`bmforge chat MODEL`: a conversation in the terminal, or line by line through a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict

import torch

from bmforge.cli.options import ChatCommand
from bmforge.infer.openbmb.chat import Chat, ChatConfig
from bmforge.models import AutoModel
from bmforge.models.hub import find_model
from bmforge.tokenizers import AutoTokenizer

__all__ = ["run_chat", "talk"]


def run_chat(command: ChatCommand) -> None:
    """Talk to a model in the terminal."""
    talk(command.model, ChatConfig(**asdict(command.config)))


def talk(model: str, config: ChatConfig) -> None:
    """Answer what is typed until the input ends.

    Args:
        model: directory, hub id or short name of an EVA with its tokenizer.
        config: how to answer.

    Raises:
        ConfigError: no EVA.
    """
    directory = find_model(model)
    opened, tokenizer = (
        AutoModel.from_pretrained(directory),
        AutoTokenizer.from_pretrained(directory),
    )
    chat = Chat(opened, tokenizer, config)
    if config.seed is None:
        torch.seed()
    for line in _read_lines():
        if line == "/exit":
            return
        if line == "/clear":
            chat.clear()
        elif line:
            print(chat.reply(line), flush=True)


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
