"""Renders conversations as text with Jinja chat templates, as transformers does.

`ChatTemplate` renders; `find_template` reads the source from a model directory; `chat_turns.py`
splits a conversation into prompts and answers; `chat_named.py` contains named templates. A template
is a program from an untrusted file, so it runs in Jinja's sandbox, where it can only read texts and
lists.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from bmforge.errors import ConfigError, DataError, MissingDependencyError
from bmforge.files import replace_file
from bmforge.gguf_header import is_gguf, read_gguf_header
from bmforge.tokenizers import Tokenizer
from bmforge.tokenizers.chat_messages import Message, Tools
from bmforge.tokenizers.template_limits import TemplateLimits, run_template
from bmforge.tokenizers.tokenizer_json import CONFIG_FILE, TEMPLATE_DIR, TEMPLATE_FILE

__all__ = ["ChatTemplate", "Message", "find_template"]

# transformers uses this template, if there is one, for conversations with tools.
_TOOL_FILE = f"{TEMPLATE_DIR}/tool_use.jinja"
# Where older vision-language models have the template.
_JSON_FILE = "chat_template.json"
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
Render = Callable[[Mapping[str, Any]], str]


class ChatTemplate:
    """Chat template that renders conversations as text.

    Args:
        source: Jinja source; if None, the default template, which writes ``Role: text`` and a
            newline for every message, with the EOS token after each assistant message.
        tokenizer: tokenizer whose special tokens are the template's `bos_token`, `eos_token` and
            so on.
        limits: time and length limits of one rendering (default: none).
        parse_special: encode names of special tokens inside messages as special tokens instead of
            as text. The authors of messages can then forge turns of other roles.

    Attributes:
        source: Jinja source, also of the default template.
        variables: names of the variables that the template reads, such as ``tools``.
        rendered_roles: roles whose messages were found to be part of rendered texts.

    Raises:
        ConfigError: the source is not a valid template.
        MissingDependencyError: a source is passed, but jinja2 is not installed.
    """

    def __init__(
        self,
        source: str | None,
        tokenizer: Tokenizer,
        limits: TemplateLimits | None = None,
        parse_special: bool = False,
    ) -> None:
        self._tokenizer, self._parse_special = tokenizer, parse_special
        tokens = tokenizer.special_ids
        self._marks = {
            f"{role}_token": tokenizer.decode([tokens[role]]) if role in tokens else ""
            for role in _ROLES
            if role in tokens or role in ("bos", "eos", "unk", "pad")
        }
        self.rendered_roles: set[str] = set()
        self._render: Render = self._write_plain
        self.variables: frozenset[str] = frozenset({"messages", "add_generation_prompt"})
        self.source = _plain_source(self._marks) if source is None else source
        if source is not None:
            template, self.variables = _compile(source)
            self._render = lambda values: run_template(template, {**self._marks, **values}, limits)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        tools: Tools | None = None,
        **variables: Any,
    ) -> str:
        """Render a conversation as text, like ``apply_chat_template(..., tokenize=False)``.

        Args:
            messages: conversation; each message has a `role` and its `content`.
            add_generation_prompt: True to end the text where the assistant's answer begins.
            tools: JSON schemas of the functions that the assistant may call.
            variables: further variables of the template, such as ``enable_thinking``.

        Raises:
            DataError: the template refuses this conversation, or exceeds its limits.
        """
        if self.reads_parts:
            messages = [_as_parts(message) for message in messages]
        values = {"messages": messages, "add_generation_prompt": add_generation_prompt, **variables}
        try:
            return self._render(values if tools is None else {**values, "tools": tools})
        except Exception as error:  # a template may raise any exception
            raise DataError(
                f"the chat template cannot render the conversation ({error}). Correct the messages "
                "or the template."
            ) from error

    @cached_property
    def reads_parts(self) -> bool:
        """True if the template reads content only as a list of parts, as that of LLaVA does."""
        return not self._shows_text("probe") and self._shows_text(_part("probe"))

    def _shows_text(self, content: Any) -> bool:
        messages = [{"role": "user", "content": content}]
        try:
            text = self._render({"messages": messages, "add_generation_prompt": True})
        except Exception:  # a template may raise any exception
            return False
        return "probe" in text

    def _write_plain(self, values: Mapping[str, Any]) -> str:
        lines = [self._marks["bos_token"]]
        for message in values["messages"]:
            end = self._marks["eos_token"] if message["role"] == "assistant" else ""
            lines.append(f"{message['role'].capitalize()}: {message['content']}{end}\n")
        return "".join([*lines, "Assistant:" if values["add_generation_prompt"] else ""])

    def encode(
        self,
        messages: Sequence[Message],
        tools: Tools | None = None,
        begin: str = "",
        **variables: Any,
    ) -> tuple[str, list[int]]:
        """Render a conversation up to the assistant's answer; return the text and its token ids.

        Unless `parse_special` is set, names of special tokens inside messages are encoded as text,
        so that a message cannot forge an end-of-turn token.

        Args:
            messages, tools, variables: as in `render`.
            begin: beginning of the answer, which the model continues. The caller escapes the names
                of special tokens in it, see `escape_specials`.

        Raises:
            DataError: the template refuses this conversation, or exceeds its limits.
        """
        if not self._parse_special:
            messages = [_escape(self._tokenizer, message) for message in messages]
        text = self.render(messages, add_generation_prompt=True, tools=tools, **variables) + begin
        return text, self._tokenizer.encode_chat(text)

    def save(self, directory: Path) -> None:
        """Write the template as the default chat template of a directory.

        A `tool_use` template that is not contained in this template is removed, because
        transformers would use it instead of this template in conversations with tools.
        """
        replace_file(directory / TEMPLATE_FILE, self.source)
        other = directory / _TOOL_FILE
        if other.is_file() and other.read_text(encoding="utf-8") not in self.source:
            other.unlink()

    def end_mark(self) -> str:
        """Return the text that the template writes after a final assistant message."""
        example = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "answer"}]
        return self.render(example).rpartition("answer")[2]


def _part(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _as_parts(message: Message) -> Message:
    """Return a message with its text as a list of parts."""
    content = message.get("content")
    return {**message, "content": _part(content)} if isinstance(content, str) else message


def _escape(tokenizer: Tokenizer, value: Any) -> Any:
    """Escape the names of special tokens in all texts of a message, except its role."""
    if isinstance(value, str):
        return tokenizer.escape_specials(value)
    if isinstance(value, Mapping):
        return {k: v if k == "role" else _escape(tokenizer, v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_escape(tokenizer, item) for item in value]
    return value


def _plain_source(marks: Mapping[str, str]) -> str:
    """Return the Jinja source of the default chat template, for models without their own.

    The source contains the special tokens as literal text, since another library may use other
    tokens as ``bos_token`` and ``eos_token``.
    """
    begin, end = json.dumps(marks["bos_token"]), json.dumps(marks["eos_token"])
    return (
        f"{{{{- {begin} }}}}\n"
        "{%- for message in messages %}\n"
        "    {{- message['role'] | capitalize + ': ' + message['content'] }}\n"
        f"    {{%- if message['role'] == 'assistant' %}}{{{{- {end} }}}}{{% endif %}}\n"
        "    {{- '\\n' }}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}{{- 'Assistant:' }}{% endif %}"
    )


def find_template(folder: Path) -> str | None:
    """Return the chat template of a model directory or GGUF file; None if it has none.

    The template is read from ``chat_template.jinja`` or, without this file, from
    ``chat_template.json`` or tokenizer_config.json. Of several templates (also those in
    ``additional_chat_templates``), ``default`` is used, and ``tool_use`` for conversations with
    tools, as in transformers. These two templates are joined into one source.

    Args:
        folder: model directory, or a GGUF file.

    Raises:
        ConfigError: a file is damaged, or contains several templates without a default.
    """
    if is_gguf(folder):
        source = read_gguf_header(folder).metadata.get("tokenizer.chat_template")
        return source if isinstance(source, str) and source else None
    try:
        file = folder / CONFIG_FILE
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        source, for_tools = config.get("chat_template"), None
        if (folder / _JSON_FILE).is_file():
            file = folder / _JSON_FILE
            source = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
        if (folder / TEMPLATE_FILE).is_file():
            source = (folder / TEMPLATE_FILE).read_text(encoding="utf-8")
        elif isinstance(source, list):
            named = {entry["name"]: entry["template"] for entry in source}
            source, for_tools = named["default"], named.get("tool_use")
        if (folder / _TOOL_FILE).is_file():
            for_tools = (folder / _TOOL_FILE).read_text(encoding="utf-8")
        # A template that a run exported has it already.
        if source and for_tools and not source.startswith(f"{{% if tools %}}{for_tools}"):
            source = f"{{% if tools %}}{for_tools}{{% else %}}{source}{{% endif %}}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{str(folder)!r} has a damaged chat template ({type(error).__name__}: {error}). "
            "Correct the template, or use another one with --template FILE in training."
        ) from error
    return source or None


def _compile(source: str) -> tuple[Any, frozenset[str]]:
    """Compile a template with transformers' filters; return it and the names of its variables."""
    try:
        from jinja2 import TemplateError, meta, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise MissingDependencyError("jinja2", "chat", "the tokenizer's chat template") from error

    class Generation(Extension):
        """Jinja extension that ignores ``{% generation %}`` tags."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        names = meta.find_undeclared_variables(environment.parse(source))
        return environment.from_string(source), frozenset(names) - environment.globals.keys()
    except TemplateError as error:
        raise ConfigError(
            f"the chat template is not valid ({error}). Correct the template, or use another one "
            "with --template FILE in training."
        ) from error
