"""Conversations in files, in the forms in which they are published.

Read are messages with `role` and `content`, ShareGPT's `conversations` with `from` and `value`, and
Alpaca's `instruction`, `input` and `output`: one a line, or all in a list.

Source: github.com/tatsu-lab/stanford_alpaca (fields), github.com/lm-sys/FastChat (ShareGPT's).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from bmforge.data.sources.text_files import read_text
from bmforge.errors import DataError
from bmforge.tokenizers.chat_template import Message

__all__ = ["read_conversations"]

_SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
}
_ALPACA = ("instruction", "input", "output", "system")


def read_conversations(path: str | os.PathLike[str]) -> list[tuple[str, list[Message]]]:
    """Return the conversations of a file, each with its place in it.

    Args:
        path: of a file with one JSON object a line, or with a JSON list of them.

    Raises:
        DataError: an entry is no conversation.
    """
    found = []
    for place, record in _read_entries(path):
        messages = _find_messages(record, place)
        if not any(message["role"] == "assistant" for message in messages):
            raise DataError(f"{place} has no message of the assistant, so nothing to learn.")
        found.append((place, messages))
    return found


def _read_entries(path: str | os.PathLike[str]) -> Iterator[tuple[str, Any]]:
    """Yield place and contents of a file's entries."""
    text = read_text(path)
    if text.lstrip().startswith("["):
        for number, record in enumerate(_parse(text, repr(str(path))), 1):
            yield f"{str(path)!r}, entry {number}", record
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            place = f"{str(path)!r}, line {number}"
            yield place, _parse(line, place)


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not JSON ({error}).") from error


def _find_messages(record: Any, place: str) -> list[Message]:
    """Return what is said in an entry, whatever form it has."""
    values = record if isinstance(record, dict) else {}
    if isinstance(values.get("messages"), list):
        messages = [_read_turn(turn, place) for turn in values["messages"]]
    elif isinstance(values.get("conversations"), list):
        messages = [_read_turn(turn, place) for turn in values["conversations"]]
        messages = [*_system_of(values), *messages]
    elif "instruction" in values:
        messages = _read_alpaca(values, place)
    else:
        raise _no_conversation(place)
    return messages


def _no_conversation(place: str) -> DataError:
    return DataError(
        f"{place} needs 'messages', a list of objects with the texts 'role' and 'content'; or "
        "'conversations' with 'from' and 'value' (ShareGPT), or the texts 'instruction' and "
        "'output', and 'input' where there is one (Alpaca)."
    )


def _read_turn(turn: Any, place: str) -> Message:
    values = turn if isinstance(turn, dict) else {}
    if all(isinstance(values.get(key), str) for key in ("role", "content")):
        return values
    speaker, said = values.get("from"), values.get("value")
    if not isinstance(speaker, str) or not isinstance(said, str):
        raise _no_conversation(place)
    if speaker not in _SPEAKERS:
        raise DataError(f"{place}: from={speaker!r} is no speaker. Known: {', '.join(_SPEAKERS)}.")
    return {"role": _SPEAKERS[speaker], "content": said}


def _system_of(values: Mapping[str, Any]) -> list[Message]:
    said = values.get("system")
    return [{"role": "system", "content": said}] if isinstance(said, str) and said else []


def _read_alpaca(values: Mapping[str, Any], place: str) -> list[Message]:
    """Return an instruction, with its input a line below, and the output; earlier rounds first."""
    texts = {name: "" if values.get(name) is None else values[name] for name in _ALPACA}
    history = values.get("history") or []
    rounds = isinstance(history, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
        for pair in history
    )
    if not rounds or "output" not in values or not all(isinstance(t, str) for t in texts.values()):
        raise _no_conversation(place)
    asked = "\n".join(text for text in (texts["instruction"], texts["input"]) if text)
    messages = _system_of(texts)
    for question, answer in [*history, [asked, texts["output"]]]:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return messages
