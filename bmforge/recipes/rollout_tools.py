"""Tools of rollouts (`rollout.tools`): the user's functions, in the chat template's format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from bmforge.align.rewards import ToolProcess
from bmforge.align.tool_turns import FunctionCall, ToolTurns
from bmforge.align.verifiers import VERIFIERS
from bmforge.errors import ConfigError
from bmforge.serve.tool_formats import ToolFormat, find_format
from bmforge.tokenizers.chat_template import ChatTemplate

__all__ = ["find_calls", "open_functions", "open_turns"]

# Text of an answer in a rendered example conversation; the template writes the results after it.
_MARK = "ANSWER-OF-THE-EXAMPLE"
Schema = dict[str, Any]


def open_functions(config: Any, template: ChatTemplate | None) -> dict[str, ToolProcess]:
    """Start a process per tool function; return a dict from function name to process.

    Raises:
        ConfigError: prompts are texts instead of conversations, the chat template has no format of
            tool calls, or a function cannot be loaded.
    """
    specs = config.rollout.tools
    if not specs:
        return {}
    if template is None or find_format(template.source) is None:
        raise ConfigError(
            f"rollout.tools={list(specs)} needs prompts that are conversations, and a chat "
            "template that describes tools and their calls. Set --template, or leave tools out."
        )
    functions: dict[str, ToolProcess] = {}
    try:
        for spec in specs:
            if spec.startswith("http") or spec.partition(":")[0] in VERIFIERS:
                raise ConfigError(
                    f"rollout.tools={spec} must be module:function or file.py:function."
                )
            process = ToolProcess(spec)
            assert process.schema is not None
            functions[process.schema["function"]["name"]] = process
    except BaseException:
        for process in functions.values():
            process.close()
        raise
    return functions


def open_turns(
    functions: Mapping[str, ToolProcess],
    config: Any,
    tokenizer: Any,
    template: ChatTemplate,
    stops: Sequence[int],
    decode: Callable[[Sequence[int]], str],
) -> ToolTurns:
    """Create the object that runs the tool calls of answers and continues them with the results.

    Args:
        functions: result of `open_functions`.
        config: config with ``rollout``.
        tokenizer: tokenizer of the run.
        template: chat template of the run.
        stops: token ids that end an answer.
        decode: function that returns the text for the token ids of a turn.
    """
    form = find_format(template.source)
    assert form is not None
    schemas = {
        name: f.schema["function"]["parameters"] for name, f in functions.items() if f.schema
    }
    return ToolTurns(
        functions,
        partial(find_calls, form, schemas),
        partial(_encode_results, tokenizer, template, frozenset(stops)),
        decode,
        config.rollout.max_turns,
        config.rollout.tool_timeout_s,
    )


def find_calls(form: ToolFormat, schemas: Mapping[str, Any], text: str) -> list[FunctionCall]:
    """Return the function calls in the text of a turn.

    Args:
        form: format of the calls.
        schemas: dict from function name to the schema of the function's parameters.
        text: text of the turn.
    """
    calls: list[FunctionCall] = []
    opening = next((mark for mark in form.open if mark and mark in text), None)
    if opening is None:
        is_call = "" in form.open and text.lstrip().startswith("{")
        parts = [text.strip()] if is_call else []
    else:
        parts = text.split(opening)[1:]
    for part in parts:
        inner = part.split(form.close)[0] if form.close else part
        for call in form.parse(inner.strip(), schemas) or ():
            calls.append(FunctionCall(call.name, _read_arguments(call.arguments)))
    return calls


def _read_arguments(text: str) -> dict[str, Any] | None:
    try:
        arguments = json.loads(text)
    except ValueError:
        return None
    return arguments if isinstance(arguments, dict) else None


def _encode_results(
    tokenizer: Any,
    template: ChatTemplate,
    stops: frozenset[int],
    results: Sequence[Mapping[str, Any]],
    last: int,
) -> list[int]:
    """Return the ids between an answer and the next turn: end of turn, results, next header.

    The end of turn is omitted if `last`, the last token id of the answer, is one of `stops`.
    """
    safe = [{**m, "content": tokenizer.escape_specials(m["content"])} for m in results]
    example = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
    text = template.render([*example, *safe], add_generation_prompt=True)
    ids: list[int] = tokenizer.encode_chat(text.partition(_MARK)[2])
    return ids[1:] if last in stops and ids and ids[0] in stops else ids
