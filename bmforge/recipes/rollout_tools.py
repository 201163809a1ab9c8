"""Tools of rollouts (`rollout.tools`): the user's functions, in the chat template's format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from bmforge.align.rewards import ToolProcess
from bmforge.align.tool_turns import FunctionCall, ToolTurns
from bmforge.align.verifiers import VERIFIERS
from bmforge.errors import ConfigError, DataError
from bmforge.recipes.inputs.prompt_rows import make_decoder
from bmforge.serve.parts import GeneratedToolCall
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
            if spec.startswith(("http:", "https:")) or spec.partition(":")[0] in VERIFIERS:
                raise ConfigError(
                    f"rollout.tools={spec} must be module:function or file.py:function."
                )
            process = ToolProcess(spec)
            assert process.schema is not None
            name = process.schema["function"]["name"]
            if name in functions:
                process.close()
                raise ConfigError(
                    f"rollout.tools={list(specs)} has several functions {name!r}. Rename all but "
                    "one."
                )
            functions[name] = process
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
) -> ToolTurns:
    """Create the object that runs the tool calls of answers and continues them with the results.

    Args:
        functions: result of `open_functions`.
        config: config with ``rollout``.
        tokenizer: tokenizer of the run.
        template: chat template of the run.
        stops: token ids that end an answer.
    """
    form = find_format(template.source)
    assert form is not None
    encode = partial(_encode_results, tokenizer, template, frozenset(stops))
    _check_results(template, next(iter(functions)), [f.schema for f in functions.values()])
    schemas = {
        name: f.schema["function"]["parameters"] for name, f in functions.items() if f.schema
    }
    return ToolTurns(
        functions,
        partial(find_calls, form, schemas),
        encode,
        make_decoder(tokenizer, stops),
        config.rollout.max_turns,
        config.rollout.tool_timeout_s,
        make_decoder(tokenizer, stops, with_special=True),
    )


class _AllNames(dict[str, Any]):
    """Dict of function schemas that contains every name; unknown functions have no schema."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> None:
        return None


def find_calls(
    form: ToolFormat, schemas: Mapping[str, Any], text: str
) -> tuple[str, list[FunctionCall]]:
    """Return the text before the function calls of a turn, and the calls.

    If the format has delimiters, calls of unknown functions are returned too, and text between
    delimiters that cannot be parsed becomes a call without a name. If the format has no delimiters,
    text that cannot be parsed, or that calls an unknown function, is an ordinary answer.

    Args:
        form: format of the calls.
        schemas: dict from function name to the schema of the function's parameters.
        text: text of the turn.
    """
    opening = next((mark for mark in form.open if mark and mark in text), None)
    if opening is None:
        is_call = "" in form.open and text.lstrip().startswith("{")
        parsed = (form.parse(text.strip(), schemas) or []) if is_call else []
        return "" if parsed else text, [_read_call(call) for call in parsed]
    content, *parts = text.split(opening)
    calls: list[FunctionCall] = []
    for part in parts:
        inner = part.split(form.close)[0] if form.close else part
        parsed = form.parse(inner.strip(), _AllNames(schemas)) or []
        calls += [_read_call(call) for call in parsed] or [FunctionCall("", None)]
    return content.strip(), calls


def _read_call(call: GeneratedToolCall) -> FunctionCall:
    return FunctionCall(call.name, _read_arguments(call.arguments))


def _read_arguments(text: str) -> dict[str, Any] | None:
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None


def _encode_results(
    tokenizer: Any,
    template: ChatTemplate,
    stops: frozenset[int],
    results: Sequence[Mapping[str, Any]],
    last: int,
    options: Mapping[str, Any],
) -> list[int]:
    """Return the ids between an answer and the next turn: end of turn, results, next header.

    The end of turn is omitted if `last`, the last token id of the answer, is one of `stops`.
    """
    texts = ("name", "content")
    safe = [{**m, **{key: tokenizer.escape_specials(m[key]) for key in texts}} for m in results]
    ids: list[int] = tokenizer.encode_chat(_render_results(template, safe, options))
    return ids[1:] if last in stops and ids and ids[0] in stops else ids


def _render_results(
    template: ChatTemplate, results: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> str:
    """Return the text that the template writes after an assistant message with tool calls."""
    example = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
    text = template.render([*example, *results], add_generation_prompt=True, **options)
    return text.partition(_MARK)[2]


def _check_results(template: ChatTemplate, name: str, schemas: Sequence[Schema | None]) -> None:
    """Raise `ConfigError` if the template does not write the result of a tool."""
    result = {"role": "tool", "name": name, "tool_call_id": "call00000", "content": "RESULT"}
    reason = ""
    try:
        is_written = "RESULT" in _render_results(template, [result], {"tools": schemas})
    except DataError as error:
        is_written, reason = False, f" ({error})"
    if not is_written:
        raise ConfigError(
            "rollout.tools is not supported with this chat template, which does not write results "
            f"of tools after an answer{reason}. Set --template, or leave tools out."
        )
