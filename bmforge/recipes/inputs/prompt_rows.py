"""Encodes prompts (texts and chats) for reinforcement learning and on-policy distillation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bmforge.align.rollout_config import PromptRow
from bmforge.data.sources.prompts import PromptRecord, read_prompts
from bmforge.errors import ConfigError, DataError
from bmforge.infer.end_tokens import find_end_tokens
from bmforge.logging import get_logger
from bmforge.recipes.inputs.conversation_rows import drop_fields
from bmforge.recipes.inputs.document_segments import find_tokenizer
from bmforge.recipes.inputs.examples import ExampleConfig
from bmforge.recipes.sft import read_template
from bmforge.tokenizers.chat_messages import THOUGHT_MARKS
from bmforge.tokenizers.chat_template import ChatTemplate
from bmforge.tokenizers.chat_turns import check_fields

__all__ = [
    "PromptConfig",
    "encode_prompts",
    "find_stops",
    "make_decoder",
    "open_template",
    "read_all",
]


@dataclass(kw_only=True)
class PromptConfig(ExampleConfig):
    """Prompt options of a run that generates its own answers.

    Args:
        paths: JSON files or tables, or directories of them. Each record has a field ``prompt``, a
            string or a list of messages; its other fields are passed to the reward functions.
        validation: not supported by tasks that generate answers; evaluate the exported model with
            `bmforge evaluate`.
        tokenizer: directory of the tokenizer (if None: the tokenizer of `init_from`).
        seq_len: maximum length of a prompt in tokens; longer prompts are skipped and counted.
        global_batch_size: number of answers per optimizer step, over all processes.
        micro_batch_size: number of answers per forward pass of one process.
        ignore: fields of the messages to ignore; every other field that the chat template does not
            use is an error.
    """

    seq_len: int = 512
    ignore: tuple[str, ...] = ("id",)

    def check(self) -> None:
        """Raise `ConfigError` for a number out of range, or an option without effect."""
        super().check()
        idle = [name for name in ("validation", "split") if getattr(self, name)]
        idle += ["validation_batches"] if self.validation_batches is not None else []
        if idle:
            raise ConfigError(
                f"data.{idle[0]} has no effect in a run that generates its own answers. "
                "Leave it out."
            )


def read_all(data: PromptConfig) -> list[PromptRecord]:
    """Read the prompts from all paths."""
    return [prompt for path in data.paths for prompt in read_prompts(path)]


def open_template(
    config: Any, tokenizer: Any, prompts: Sequence[PromptRecord]
) -> ChatTemplate | None:
    """Return the run's chat template; None if no prompt is a conversation.

    Raises:
        ConfigError: a template is given, but no prompt is a conversation.
    """
    if any(not isinstance(prompt.content, str) for prompt in prompts):
        return ChatTemplate(read_template(config, find_tokenizer(config)), tokenizer)
    if config.template is not None:
        raise ConfigError(
            f"template={str(config.template)!r} has no effect: all prompts are strings, not lists "
            "of messages. Leave it out."
        )
    return None


def encode_prompts(
    prompts: Sequence[PromptRecord],
    data: PromptConfig,
    tokenizer: Any,
    template: ChatTemplate | None,
    tools: list[dict[str, Any]] | None = None,
) -> list[PromptRow]:
    """Encode prompts as token ids; prompts that are too long are skipped.

    Args:
        prompts: prompts of the files.
        data: prompt options of the run.
        tokenizer: tokenizer of the run.
        template: chat template for conversations.
        tools: schemas of the tools to use for conversations that define no tools.

    Raises:
        DataError: a prompt has a field that the template does not use, a record describes a tool
            that is not in `tools`, or no prompt is short enough.
    """
    if tools is not None:
        _check_tools(prompts, tools)
        prompts = [replace(p, tools=p.tools or tools) for p in prompts]
    rows = [_encode(prompt, tokenizer, template, data.ignore) for prompt in prompts]
    short = [row for row in rows if len(row.ids) <= data.seq_len]
    if not short:
        raise DataError(
            f"none of the {len(rows)} prompts fits into data.seq_len={data.seq_len} tokens. "
            "Raise data.seq_len, or use shorter prompts."
        )
    if len(short) < len(rows):
        get_logger().warning(
            "%d of %d prompts are longer than data.seq_len=%d and were left out",
            *(len(rows) - len(short), len(rows), data.seq_len),
        )
    return short


def _check_tools(prompts: Sequence[PromptRecord], tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise `DataError` if a record describes a tool that is not in `tools`."""
    functions = {tool["function"]["name"] for tool in tools}
    for prompt in prompts:
        described = {str(tool.get("function", tool).get("name")) for tool in prompt.tools or ()}
        missing = sorted(described - functions)
        if missing:
            raise DataError(
                f"{prompt.source}: 'tools' describes {', '.join(missing)}, but rollout.tools has "
                f"only {', '.join(sorted(functions))}. Add the function to rollout.tools, or "
                "remove it from the record."
            )


def _encode(
    prompt: PromptRecord, tokenizer: Any, template: ChatTemplate | None, ignore: Sequence[str]
) -> PromptRow:
    options: dict[str, Any] = {}
    if isinstance(prompt.content, str):
        ids: Sequence[int] = tokenizer.encode_prompt(prompt.content)
    else:
        assert template is not None
        unread = [*prompt.variables, *(["tools"] if prompt.tools else [])]
        unread = [name for name in unread if name not in template.variables]
        if unread:
            raise DataError(
                f"{prompt.source}: the chat template does not use {', '.join(unread)} (it uses "
                f"{', '.join(sorted(template.variables))}). Leave these fields out."
            )
        messages = drop_fields(prompt.content, ignore)
        try:
            check_fields(template, messages, prompt.tools, prompt.variables)
        except DataError as error:
            raise DataError(f"{prompt.source}: {error}") from error
        options = {"tools": prompt.tools, **prompt.variables}
        ids = template.encode(messages, **options)[1]
    if not ids:
        raise DataError(f"{prompt.source}: the prompt is empty. Remove this record.")
    return PromptRow(tuple(ids), prompt.content, prompt.columns, options)


def find_stops(config: Any, tokenizer: Any, template: ChatTemplate | None) -> list[int]:
    """Return the ids of tokens that end an answer, including the chat template's end mark.

    Args:
        config: config of the model.
        tokenizer: tokenizer of the model.
        template: chat template; None if no prompt is a conversation.

    Raises:
        ConfigError: no token ends an answer.
    """
    stops = list(find_end_tokens(config, tokenizer))
    mark = [] if template is None else tokenizer.encode_chat(template.end_mark().strip())
    if len(mark) == 1 and mark[0] not in stops:
        stops.append(mark[0])
    if not stops:
        raise ConfigError(
            "neither the model nor its tokenizer has an end-of-sequence token, so generated "
            "answers would never end. Set eos_token in the tokenizer's config."
        )
    return stops


def make_decoder(tokenizer: Any, stops: Sequence[int], with_special: bool = False) -> Any:
    """Return a function that decodes the token ids of an answer, without special tokens.

    As in TRL, reward functions get text without special tokens. Delimiters of reasoning are kept,
    because reward functions check them.

    Args:
        tokenizer: tokenizer of the run.
        stops: token ids that end an answer, which are never decoded.
        with_special: True to keep the other special tokens, which may delimit tool calls.
    """
    hidden = set(stops)
    if not with_special:
        marks = {mark for pair in THOUGHT_MARKS for mark in pair}
        special = tokenizer.special_token_ids
        hidden |= {id for id in special if tokenizer.decode([id]).strip() not in marks}

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode_written(id for id in ids if id not in hidden)
        return text

    return decode
