"""Reads prompts for reinforcement learning and distillation from JSON and Parquet files.

A record has a ``prompt`` (a string or a list of messages), and columns for reward functions.
verl's format is supported as well: its ``reward_model.ground_truth`` becomes the column
``ground_truth``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from bmforge.data.sources.conversation_forms import read_tools
from bmforge.data.sources.conversations import find_conversation_files, read_records
from bmforge.errors import DataError
from bmforge.tokenizers.chat_messages import Message, normalize_message

__all__ = ["PromptRecord", "read_prompts"]

# Argument names that every reward function already has.
_RESERVED = frozenset(
    ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
)


@dataclass(frozen=True)
class PromptRecord:
    """One prompt from a file.

    Args:
        source: file and line, entry or row, for error messages.
        content: text, or messages, the last of which is not from the assistant.
        tools: JSON schemas of the functions that the assistant may call; None without tools.
        variables: variables of the chat template.
        columns: the record's other fields.
    """

    source: str
    content: str | list[Message]
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)


def read_prompts(path: str | os.PathLike[str]) -> list[PromptRecord]:
    """Read every prompt from a file, or from all files of a folder.

    Args:
        path: a file with one JSON object per line, with a JSON list of objects, or a Parquet table;
            or a folder of such files.

    Raises:
        DataError: the path does not exist, or an entry has no prompt.
    """
    return [
        _read_prompt(record, source)
        for file in find_conversation_files(path)
        for source, record in read_records(file)
    ]


def _read_prompt(record: Any, source: str) -> PromptRecord:
    content = record.get("prompt") if isinstance(record, dict) else None
    if isinstance(content, list) and content:
        content = [_read_message(message, source) for message in content]
        if content[-1]["role"] == "assistant":
            raise DataError(
                f"{source}: the prompt must not end with an assistant message. Remove the last "
                "message."
            )
    elif not isinstance(content, str) or not content:
        raise DataError(
            f"{source} needs 'prompt', a string or a list of messages with 'role' and 'content'."
        )
    names = ("prompt", "tools", "chat_template_kwargs")
    columns = {name: value for name, value in record.items() if name not in names}
    reserved = sorted(_RESERVED & columns.keys())
    if reserved:
        raise DataError(
            f"{source} has the field {reserved[0]!r}, whose name is reserved for an argument of "
            "reward functions. Rename the field."
        )
    checked = columns.get("reward_model")
    if isinstance(checked, dict) and "ground_truth" in checked:
        columns.setdefault("ground_truth", checked["ground_truth"])
    variables = record.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise DataError(
            f"{source}: 'chat_template_kwargs' must be an object with variables of the chat "
            "template."
        )
    tools = read_tools({"tools": record.get("tools")}, source)
    if isinstance(content, str) and (tools or variables):
        name = "tools" if tools else "chat_template_kwargs"
        raise DataError(
            f"{source}: {name!r} has no effect, because the prompt is a string, which is not "
            "rendered with the chat template. Leave the field out, or write the prompt as a list "
            "of messages."
        )
    return PromptRecord(source, content, tools, variables, columns)


def _read_message(message: Any, source: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(f"{source}: every message of the prompt needs 'role' and 'content'.")
    return normalize_message(message, source)
