"""Splits conversations into prompts and answers, so that only answers contribute to the loss.

Every answer is rendered as if it were the last message: hybrid templates (Qwen3, GLM) write the
last answer with its reasoning and earlier answers without it, and the model always generates the
last message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from bmforge.errors import DataError
from bmforge.tokenizers.chat_messages import THOUGHT_FIELDS, TOOL_ROLES, Message, Tools
from bmforge.tokenizers.chat_template import ChatTemplate

__all__ = ["AnswerChoice", "AnswerText", "check_fields", "render_answers"]

AnswerChoice = Literal["all", "last"]
Render = Callable[[Sequence[Message]], str]  # messages -> text, with all other arguments set
_OPEN, _CLOSE = "<think>", "</think>"
_ROLES = ("system", "user", "assistant", "tool")
_MESSAGE_FIELDS = ("role", "content", "tool_calls", "tool_call_id", "weight")


@dataclass(frozen=True)
class AnswerText:
    """One assistant message with the conversation before it, both rendered as text.

    Args:
        number: index of the message in the conversation.
        prompt: text before the answer, including the part of the template's generation prompt with
            which the rendered answer begins.
        answer: text of the assistant message, including the end-of-turn token.
    """

    number: int
    prompt: str
    answer: str


def render_answers(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Tools | None = None,
    variables: Mapping[str, Any] | None = None,
    answers: AnswerChoice = "all",
    untrained: list[int] | None = None,
) -> list[AnswerText]:
    """Render each assistant message, with the messages before it, as the end of a conversation.

    Messages with ``weight`` 0 are skipped, and so are answers before the first user message if the
    template cannot render an empty context before them: they are context of the later answers.

    Args:
        template: the model's chat template.
        messages: conversation.
        tools: JSON schemas of functions that the assistant may call.
        variables: further variables of the template.
        answers: "all" answers, or only the "last" one.
        untrained: list to which the indices of answers without a renderable context are appended.

    Raises:
        DataError: the template refuses the conversation, or omits a part of an answer.
    """
    numbers = [n for n, m in enumerate(messages) if m["role"] == "assistant"]
    chosen = [n for n in numbers if _weight_of(messages[n], n) > 0]
    if answers == "last":
        chosen = [n for n in numbers[-1:] if n in chosen]
    turns = []
    for number in chosen:
        turn = _render_answer(template, messages, number, tools, variables or {})
        if turn is not None:
            turns.append(turn)
        elif untrained is not None:
            untrained.append(number)
    return turns


def _weight_of(message: Message, number: int) -> float:
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise DataError(f"message {number + 1} has weight={weight!r} (allowed: 0 and 1).")
    return float(weight)


def _render_answer(
    template: ChatTemplate,
    messages: Sequence[Message],
    number: int,
    tools: Tools | None,
    variables: Mapping[str, Any],
) -> AnswerText | None:
    """Render one answer; return None if the template cannot render the empty context before it."""
    before, message = messages[:number], messages[number]
    try:
        rendered = template.render(messages[: number + 1], tools=tools, **variables)
        prompt = template.render(before, add_generation_prompt=True, tools=tools, **variables)
    except DataError:
        # Templates read messages[0] (Qwen3), or require a user message (Qwen3.5). An error of the
        # whole conversation is raised here, as in transformers.
        if any(m["role"] not in ("system", "assistant") for m in before):
            raise
        template.render(messages, tools=tools, **variables)
        return None
    plain = _render_history(template, before, tools, variables)
    if rendered.startswith(prompt):
        start = prompt
    elif rendered.startswith(plain):
        # The generation prompt may end with text that this answer does not begin with, such as the
        # <think> of DeepSeek-R1. The answer then begins at the first difference.
        start = _common_start(prompt, rendered)
    else:
        raise DataError(
            f"the chat template does not render messages 1 to {number} as a prefix of "
            f"messages 1 to {number + 1}, so the answer cannot be separated from its "
            "prompt. Use another template with --template."
        )
    answer = rendered[len(start) :]
    missing = _find_missing(message, answer)
    if missing == "thoughts" and _CLOSE in template.source + prompt:
        return AnswerText(number, prompt, _write_thoughts(message, prompt, answer))
    if missing:
        advice = _place_thoughts(template, message) if missing == "thoughts" else "Use"
        raise DataError(
            f"the chat template omits the {missing} of message {number + 1}, so the model cannot "
            f"be trained on the {missing}. {advice} another template with --template, or remove "
            f"the {missing} from the data."
        )
    return AnswerText(number, start, answer)


def _render_history(
    template: ChatTemplate, before: Sequence[Message], tools: Tools | None, variables: Any
) -> str:
    """Render the messages before an answer; return "" if there are none.

    A template may refuse to render an empty conversation.
    """
    if not before:
        return ""
    return template.render(before, tools=tools, **variables)


def _common_start(prompt: str, rendered: str) -> str:
    """Return the longest common prefix of two texts, without an incomplete special token."""
    length = next(
        (n for n, (a, b) in enumerate(zip(prompt, rendered, strict=False)) if a != b),
        min(len(prompt), len(rendered)),
    )
    start = rendered[:length]
    cut = start.rfind("<")
    # A complete "<|im_start|>" is kept; an unclosed "<" may begin two different special tokens.
    return start if cut < 0 or ">" in start[cut:] else start[:cut]


def _find_missing(message: Message, answer: str) -> str | None:
    """Return the name of a message part that the rendered text lacks; None if complete."""
    thought, text = split_thought(message)
    if thought and thought not in answer:
        return "thoughts"
    if text and text not in answer:
        return "content"
    names = (call["function"]["name"] for call in message.get("tool_calls", ()))
    return "tool calls" if any(name not in answer for name in names) else None


def split_thought(message: Message) -> tuple[str, str]:
    """Return the reasoning and the text of an assistant message, both stripped."""
    content = message["content"]
    thought = next((message[name] for name in THOUGHT_FIELDS if message.get(name)), "")
    if _CLOSE in content:
        own, _, content = content.partition(_CLOSE)
        thought = thought or own.rpartition(_OPEN)[2]
    return thought.strip(), content.strip()


def _place_thoughts(template: ChatTemplate, message: Message) -> str:
    """Return advice for an error message: where to write the reasoning so that it is rendered.

    The text ends with "use", after which the caller names an alternative.
    """
    for name in THOUGHT_FIELDS:
        if re.search(rf"\b{name}\b", template.source):
            advice = f"Write them into the field {name!r}, which the template reads, or use"
            return "Use" if message.get(name) else advice
    return f"Write them as {_OPEN}...{_CLOSE} at the beginning of 'content', or use"


def _write_thoughts(message: Message, prompt: str, answer: str) -> str:
    """Write an answer with its reasoning, for a template that removes all reasoning.

    DeepSeek-R1's template removes all text up to ``</think>``, although its generation prompt ends
    with ``<think>``. The model must learn to write reasoning, content and the template's
    end-of-turn text.
    """
    thought, text = split_thought(message)
    end = answer.rpartition(text)[2] if text else answer[len(answer.rstrip()) :]
    opens = "" if prompt.rstrip().endswith(_OPEN) else f"{_OPEN}\n"
    return f"{opens}{thought}\n{_CLOSE}\n\n{text}{end}"


def check_fields(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Tools | None = None,
    variables: Mapping[str, Any] | None = None,
) -> None:
    """Raise `DataError` for a message field or role that the template does not use.

    Reasoning fields are not checked: `render_answers` raises an error if the template drops them.
    The `name` of a tool message is not checked: it repeats the name of the tool call.

    Args:
        template, messages, tools, variables: as in `render_answers`.
    """
    render = partial(template.render, tools=tools, **(variables or {}))
    exempt, seen = {*_MESSAGE_FIELDS, *THOUGHT_FIELDS}, set()
    for number, message in enumerate(messages, 1):
        role = message["role"]
        _check_role(template, messages, number, render)
        for field in message:
            if field in exempt or (role, field) in seen or (field == "name" and role in TOOL_ROLES):
                continue
            seen.add((role, field))
            is_used = bool(re.search(rf"\b{re.escape(field)}\b", template.source))
            if is_used and field == "name":  # the source may mean the name of a tool or tool call
                is_used = _depends_on(_drop_name, messages, role, render)
            if not is_used:
                raise DataError(
                    f"message {number} has the field {field!r}, which the chat template does not "
                    f"use for the role {role!r} (used: {', '.join(_MESSAGE_FIELDS)}). Remove the "
                    f"field from the data, or ignore it with --data.ignore {field}."
                )


def _check_role(
    template: ChatTemplate, messages: Sequence[Message], number: int, render: Render
) -> None:
    """Raise `DataError` for a role that the template omits, or one such as "User" for "user"."""
    role = messages[number - 1]["role"]
    if role == "assistant" or role in template.rendered_roles:
        return  # `render_answers` checks answers, because templates omit parts of earlier ones
    is_named = bool(re.search(rf"""['"]{re.escape(role)}['"]""", template.source))
    is_misspelled = role not in _ROLES and role.lower() in _ROLES and not is_named
    if is_misspelled or not _shows_role(messages, role, render):
        raise DataError(
            f"message {number} has the role {role!r}, which the chat template does not use (roles "
            f"of most templates: {', '.join(_ROLES)}). Correct the role, remove the message, or "
            "use another template with --template."
        )
    template.rendered_roles.add(role)


def _shows_role(messages: Sequence[Message], role: str, render: Render) -> bool:
    """Return True if the rendered text depends on the content of messages with a role."""
    try:
        return _depends_on(
            lambda m: {**m, "content": f"{m['content']} (changed)"}, messages, role, render
        )
    except DataError:  # the caller renders the conversation, and raises this error
        return True


def _drop_name(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "name"}


def _depends_on(
    change: Callable[[Message], Message], messages: Sequence[Message], role: str, render: Render
) -> bool:
    """Return True if the rendered text differs when `change` is applied to messages of a role."""
    changed = [change(m) if m["role"] == role else m for m in messages]
    return render(messages) != render(changed)
