"""Converts records of conversation data sets from all published formats into messages.

Formats: OpenAI's `messages`; ShareGPT's `conversations` with `from` and `value`, function calls and
observations included; TRL's `prompt` and `completion`; Alpaca's `instruction`, `input`, `output`
with `history`; XTuner's and Firefly's `conversation`; and pairs such as `question` and `answer`.
Sources of the field names: platform.openai.com/docs/guides/fine-tuning, github.com/lm-sys/FastChat,
huggingface.co/docs/trl/dataset_formats, github.com/tatsu-lab/stanford_alpaca,
github.com/InternLM/xtuner, github.com/yangjianxin1/Firefly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bmforge.errors import DataError
from bmforge.tokenizers.chat_messages import Message, normalize_message, parse_arguments

__all__ = ["find_messages", "read_tools", "read_turns", "with_system"]

_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
}
# Question field -> (answer field, field of an additional input).
_PAIRS = {
    "instruction": ("output", "input"),
    "prompt": ("completion",),
    "question": ("answer",),
    "query": ("response",),
    "input": ("target",),
}
# The two fields of a turn in a `conversation`.
_TURN_FIELDS = (("human", "assistant"), ("input", "output"))
_ALSO = {"output": "response", "completion": "response", "input": "context"}

# Fields that are read in every format.
_SHARED = frozenset({"tools", "functions", "system"})


def find_messages(
    record: Any, location: str, images: bool = False
) -> tuple[list[Message], frozenset[str]]:
    """Convert a record into messages; also return the names of the fields that were used.

    Args:
        record: the parsed JSON value or table row.
        location: file and line, for error messages.
        images: whether messages may have images; see `normalize_message`.

    Raises:
        DataError: the record has none of the known formats.
    """
    values = record if isinstance(record, dict) else {}
    for name in ("messages", "conversations"):
        if isinstance(values.get(name), list):
            messages = read_turns(values[name], location, images)
            return with_system(values, messages), _SHARED | {name}
    if {"chosen", "rejected"} <= values.keys():
        raise DataError(
            f"{location} is preference data ('chosen' and 'rejected'), which this task "
            "does not support. Use `bmforge train preferences`, or rename 'chosen' to "
            "'messages'."
        )
    if isinstance(values.get("conversation"), list):
        messages = _read_exchanges(values["conversation"], location)
        return with_system(values, messages), _SHARED | {"conversation"}
    question = next((name for name in _PAIRS if name in values), None)
    if question is None:
        raise _unknown_form(location, record)
    names = [question, *(_find_name(values, name) for name in _PAIRS[question])]
    messages = _read_pair(values, names, location)
    return with_system(values, messages), _SHARED | {"history", *names}


def _find_name(values: Mapping[str, Any], name: str) -> str:
    """Return the name, or alias, under which a record contains a standard field."""
    return name if name in values else _ALSO.get(name, name)


def _unknown_form(location: str, record: Any) -> DataError:
    """Return an error that names the record's fields and, if one has messages, its right name."""
    values = record if isinstance(record, dict) else {}
    names = ", ".join(map(repr, values))
    problem = f"has the fields {names}" if names else f"is {record!r:.60}"
    lists = {k: v for k, v in values.items() if isinstance(v, list) and v and _is_turn(v[0])}
    hint = "".join(
        f" Rename {name!r} to {'messages' if 'role' in turns[0] else 'conversations'!r}."
        for name, turns in list(lists.items())[:1]
        if name not in ("messages", "conversations")
    )
    return DataError(
        f"{location} {problem} (needed: 'messages', a list of objects with 'role' "
        "and 'content' (OpenAI); or 'conversations' with 'from' and 'value' (ShareGPT); 'prompt' "
        f"and 'completion'; or 'instruction', 'input' and 'output' (Alpaca)).{hint}"
    )


def _is_turn(turn: Any) -> bool:
    """Return True for an object with OpenAI's or ShareGPT's fields of a message."""
    names = {*turn} if isinstance(turn, dict) else set()
    return {"role", "content"} <= names or {"from", "value"} <= names


def read_turns(turns: Sequence[Any], location: str, images: bool = False) -> list[Message]:
    """Convert messages in OpenAI's or ShareGPT's format to OpenAI's.

    Args:
        turns: objects with ``role`` and ``content``, or ``from`` and ``value``.
        location: file and line, for error messages.
        images: whether messages may have images; see `normalize_message`.

    Raises:
        DataError: an object has neither format.
    """
    return [_read_turn(turn, location, images) for turn in turns]


def _read_exchanges(turns: Sequence[Any], location: str) -> list[Message]:
    """Convert turns with a question and an answer, and possibly a system prompt, into messages."""
    messages: list[Message] = []
    for turn in turns:
        names = next((n for n in _TURN_FIELDS if isinstance(turn, dict) and {*n} <= {*turn}), None)
        if names is None or {*turn} - {*names, "system"}:
            raise DataError(
                f"{location}: a turn of 'conversation' is {turn!r:.60} (needed: 'human' and "
                "'assistant', or 'input' and 'output', and optionally 'system')."
            )
        roles = zip(("system", "user", "assistant"), ("system", *names), strict=True)
        for role, name in roles:
            if not isinstance(turn.get(name, ""), str):
                raise DataError(
                    f"{location}: {name}={turn[name]!r:.60} must be a string. Correct the record."
                )
            if turn.get(name) or role == "assistant":
                messages.append({"role": role, "content": turn[name]})
    return messages


def _read_turn(turn: Any, location: str, images: bool) -> Message:
    values = turn if isinstance(turn, dict) else {}
    if isinstance(values.get("role"), str):
        return normalize_message(values, location, images)
    role, text = values.get("from"), values.get("value")
    if not isinstance(role, str) or not isinstance(text, str):
        raise DataError(
            f"{location} has a message {turn!r:.60} (needed: 'role' and 'content', or 'from' and "
            "'value'). Correct the record."
        )
    if role not in _ROLES:
        raise DataError(f"{location}: from={role!r} is unknown (supported: {', '.join(_ROLES)}).")
    others = {key: value for key, value in values.items() if key not in ("from", "value")}
    if role == "function_call":
        others["tool_calls"], text = _read_calls(text, location), ""
    return normalize_message({"role": _ROLES[role], "content": text, **others}, location)


def _read_calls(text: str, location: str) -> list[dict[str, Any]]:
    """Parse the value of ShareGPT's ``function_call``: one JSON object, or a list of objects."""
    calls = parse_arguments(text)
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise DataError(
            f'{location}: function_call must be a JSON object {{"name": ..., "arguments": ...}} '
            "or a list of such objects."
        )
    return [{"type": "function", "function": {"arguments": {}, **call}} for call in calls]


def with_system(values: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    """Prepend the record's ``system`` field as a message, unless there is a system message."""
    text = values.get("system")
    has_own = bool(messages) and messages[0]["role"] == "system"
    if not isinstance(text, str) or not text or has_own:
        return messages
    return [{"role": "system", "content": text}, *messages]


def _read_pair(values: Mapping[str, Any], names: Sequence[str], location: str) -> list[Message]:
    """Convert a question and an answer into messages, after the record's ``history``, if any.

    Args:
        values: the record.
        names: fields of the question, of the answer, and of an additional input of the question.
        location: file and line, for error messages.
    """
    question, answer, more = (values.get(name) for name in (*names, "")[:3])
    if isinstance(question, list) and isinstance(answer, list):
        return read_turns((*question, *answer), location)
    more, history = more or "", values.get("history") or []
    is_history = isinstance(history, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
        for pair in history
    )
    if not is_history or not all(isinstance(text, str) for text in (question, answer, more)):
        raise _unknown_form(location, values)
    question = "\n".join(text for text in (question, more) if text)
    messages: list[Message] = []
    for user, assistant in [*history, [question, answer]]:
        messages.append({"role": "user", "content": user})
        messages.append({"role": "assistant", "content": assistant})
    return messages


def read_tools(values: Mapping[str, Any], location: str) -> list[dict[str, Any]] | None:
    """Return a record's ``tools`` (or OpenAI's older ``functions``) as OpenAI's tool objects.

    Args:
        values: the record; its tools are a list, or a list serialized as JSON.
        location: file and line, for error messages.

    Raises:
        DataError: the field has a different type.
    """
    tools = values.get("tools") or values.get("functions")
    if not tools:
        return None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise DataError(
                f"{location}: 'tools' is not JSON ({error}). Write a list of JSON schemas."
            ) from error
        if not tools:
            return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{location}: 'tools' must be a list of JSON schemas of functions.")
    # Templates and OpenAI's protocol expect the schema under "function".
    return [
        tool if "function" in tool or "name" not in tool else {"type": "function", "function": tool}
        for tool in tools
    ]
