"""Conversations as text: by the tokenizer's own chat template, or a plain one.

A template is a program in a file that came from elsewhere, so it runs in Jinja's sandbox, where it
can reach nothing but text and lists, and change nothing it is given.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from bmforge.errors import ConfigError, DataError, MissingDependencyError
from bmforge.gguf_header import is_gguf, read_gguf_header
from bmforge.tokenizers import Tokenizer
from bmforge.tokenizers.template_limits import TemplateLimits, run_template
from bmforge.tokenizers.tokenizer_json import CONFIG_FILE

__all__ = ["TEMPLATE_FILE", "ChatTemplate", "Message", "find_template", "split_answers"]

TEMPLATE_FILE = "chat_template.jinja"
Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
Render = Callable[[Sequence[Message], bool, Tools | None], str]


class ChatTemplate:
    """Writes conversations.

    Args:
        source: the template's text; None writes ``Role: text`` and a newline for every message, the
            end token behind what the assistant says.
        tokenizer: its begin and end tokens are what the template calls `bos_token` and `eos_token`.
        limits: of one conversation; None lets a template take what it takes.

    Attributes:
        source: the template's text, of the plain one as well.

    Raises:
        ConfigError: the source is no template.
        MissingDependencyError: there is a source, and jinja2 is not installed.
    """

    def __init__(
        self, source: str | None, tokenizer: Tokenizer, limits: TemplateLimits | None = None
    ) -> None:
        tokens = tokenizer.special_ids
        self._marks = {
            f"{role}_token": tokenizer.decode([tokens[role]]) if role in tokens else ""
            for role in ("bos", "eos", "unk", "pad")
        }
        self._render: Render = self._write_plain
        self.source = _plain_source(self._marks) if source is None else source
        if source is not None:
            template = _compile(source)
            self._render = lambda messages, asks, tools: run_template(
                template,
                {"messages": messages, "add_generation_prompt": asks, **self._marks}
                | ({} if tools is None else {"tools": tools}),
                limits,
            )

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        tools: Tools | None = None,
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: each has a `role` and its `content`.
            add_generation_prompt: end where the assistant begins to speak.
            tools: functions that the assistant may call, as JSON schemas.

        Raises:
            DataError: the template refuses this conversation, or it takes longer than it may.
        """
        try:
            return self._render(messages, add_generation_prompt, tools)
        except Exception as error:  # a template may raise whatever it likes
            raise DataError(f"the chat template cannot write this conversation: {error}") from error

    def _write_plain(self, messages: Sequence[Message], asks: bool, tools: Tools | None) -> str:
        lines = [self._marks["bos_token"]]
        for message in messages:
            end = self._marks["eos_token"] if message["role"] == "assistant" else ""
            lines.append(f"{message['role'].capitalize()}: {message['content']}{end}\n")
        return "".join([*lines, "Assistant:" if asks else ""])

    def end_mark(self) -> str:
        """Return what is written behind an answer that ends a conversation."""
        said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "answer"}]
        return self.render(said).rpartition("answer")[2]


def _plain_source(marks: Mapping[str, str]) -> str:
    """Return the plain template for others to run: with the marks themselves, not their roles.

    Who opens the tokenizer may give a role to another token, or to none.
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
    """Return the chat template of a tokenizer's directory or GGUF file; None without one.

    It is in ``chat_template.jinja``, or in tokenizer_config.json: one, or several of which the one
    called "default" is taken.

    Raises:
        ConfigError: a file is damaged, or has templates of which none is the default.
    """
    if is_gguf(folder):
        found = read_gguf_header(folder).metadata.get("tokenizer.chat_template")
        return found if isinstance(found, str) and found else None
    try:
        if (folder / TEMPLATE_FILE).is_file():
            return (folder / TEMPLATE_FILE).read_text(encoding="utf-8")
        file = folder / CONFIG_FILE
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        found = config.get("chat_template")
        if isinstance(found, list):
            found = {entry["name"]: entry["template"] for entry in found}["default"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{str(folder)!r} has a damaged chat template ({type(error).__name__}: {error}). "
            "Correct it, or give one with --template FILE."
        ) from error
    return found or None


def _compile(source: str) -> Any:
    """Return a template that runs in the sandbox, with what transformers lets templates use."""
    try:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise MissingDependencyError("jinja2", "chat", "the tokenizer's chat template") from error

    class Generation(Extension):
        """``{% generation %}`` marks answers for others; here they are found by their place."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ConfigError(
            f"the chat template is not valid ({error}). Correct it, or give one with --template "
            "FILE."
        ) from error


def split_answers(template: ChatTemplate, messages: Sequence[Message]) -> list[tuple[str, bool]]:
    """Return a conversation's text in pieces, and of each whether the assistant has to write it.

    Raises:
        DataError: the template writes the beginning of a conversation differently once it goes on.
    """
    pieces: list[tuple[str, bool]] = []
    done = ""
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        upto = template.render(messages[: number + 1])
        prompts = (template.render(messages[:number], asks) for asks in (True, False))
        prompt = next((p for p in prompts if upto.startswith(p) and p.startswith(done)), None)
        if prompt is None:
            raise DataError(
                f"the chat template does not write messages 1 to {number + 1} as the beginning of "
                "the whole conversation, so its answers cannot be told from the rest. Divide the "
                "conversation, or give another template with --template FILE."
            )
        pieces += [(prompt[len(done) :], False), (upto[len(prompt) :], True)]
        done = upto
    return pieces
