"""`bmforge chat MODEL`: a conversation in the terminal, or line by line through a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bmforge.cli.opening import opened_model, with_own_adapter
from bmforge.cli.options import ChatCommand
from bmforge.infer.engine import EngineConfig
from bmforge.infer.talk import OWN_FORMS, Talk, TalkConfig, converse, open_talk
from bmforge.recipes.adapter_dirs import find_source
from bmforge.settings import MemoryOptions
from bmforge.tokenizers import AutoTokenizer

__all__ = ["OWN_FORMS", "TalkConfig", "answer_once", "run_chat", "talk"]


def run_chat(command: ChatCommand) -> None:
    """Talk to a model in the terminal."""
    talk(command.model, command.config, command.memory, command.adapter)


def talk(
    model: str,
    config: TalkConfig,
    memory: MemoryOptions | None = None,
    deltas: Sequence[str] = (),
) -> None:
    """Answer what is typed until the input ends.

    Args:
        model: directory, hub id or short name of a model that writes text, with its tokenizer.
        config: how to answer.
        memory: how much the model may take; None takes what it needs.
        deltas: directories of deltas that are put beside it, with ``=WEIGHT`` behind or not.

    Raises:
        ConfigError: the model writes no text, or an option that it has not.
    """
    source, memory = find_source(model), memory or MemoryOptions()
    tokenizer = AutoTokenizer.from_pretrained(source.tokenizer)
    adapters = with_own_adapter(source, deltas)
    with opened_model(source.model, memory, config.num_beams or 3, adapters) as opened:
        limit = None
        if memory.device_budget is not None:
            limit = EngineConfig(max_tokens=memory.max_tokens).tokens_of(opened)
        chat = open_talk(opened, tokenizer, config, directory=source.tokenizer, limit=limit)
        if config.seed is None:
            torch.seed()
        _answer(chat)


def _answer(chat: Talk) -> None:
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
    return converse(model, tokenizer, directory, options).reply(text)


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
