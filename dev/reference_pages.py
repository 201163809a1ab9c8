"""Reference pages of the documentation site that are read from the code.

They list the options of every command, the config fields of `bmforge train`, the error types, the
metrics of the server, and the public names of every package. `dev/site_hooks.py` adds them to the
site when it is built, so they are never out of date.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tyro
from docstring_parser import DocstringStyle, parse
from prometheus_client import CollectorRegistry

from bmforge import errors
from bmforge.cli.commands import COMMANDS, Command
from bmforge.cli.data import SUBCOMMANDS as DATA_COMMANDS
from bmforge.cli.options import EvaluateCommand
from bmforge.cli.parse import is_inlined, split_default
from bmforge.parallel import Layout
from bmforge.recipes.registry import TASKS, Task
from bmforge.serve.metrics import Metrics
from bmforge.task_names import TASK_NAMES
from bmforge.train import TrainConfig

# Package -> title of its page, in the order of the site.
PACKAGES = {
    "data": "Data",
    "tokenizers": "Tokenizers",
    "models": "Models",
    "parallel": "Parallelism",
    "train": "Training",
    "recipes": "Training tasks",
    "tune.delta": "Adapters",
    "tune.prompt": "Prompts",
    "compress": "Compression",
    "infer": "Inference",
    "serve": "Server",
    "nn": "Layers",
    "errors": "Error types",
    "testing": "Test utilities",
}


class Option(NamedTuple):
    """One field of a dataclass of options, as a row of a table.

    `group` describes the group of the field, such as the limits of a server; "" is none.
    """

    path: str
    type: str
    default: str
    help: str
    group: str = ""


def describe_type(hint: Any) -> str:
    """Return a short name of a type: choices of a Literal, `A or B` of a union."""
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    arguments = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return ", ".join(str(choice) for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe_type(a) for a in arguments))
    if hint is type(None):
        return "None"
    if origin is not None:
        inside = ", ".join("..." if a is Ellipsis else describe_type(a) for a in arguments)
        return f"{getattr(origin, '__name__', str(origin))}[{inside}]"
    return getattr(hint, "__name__", str(hint))


def describe_default(field: dataclasses.Field[Any]) -> str:
    """Return the default of a field, "required" without one."""
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is dataclasses.MISSING:
        return "required"
    if value == "" or (isinstance(value, dict | list | tuple) and not value):
        return "empty"
    return f"`{value.as_posix()}`" if isinstance(value, Path) else f"`{value}`"


def find_options(kind: type[Any], prefix: str = "", group: str = "") -> Iterator[Option]:
    """Yield the fields of a dataclass, nested ones with dotted names."""
    hints = typing.get_type_hints(kind, include_extras=True)
    docs = (inspect.getdoc(base) or "" for base in reversed(kind.__mro__))
    parsed = (parse(doc, DocstringStyle.GOOGLE) for doc in docs)
    texts = {p.arg_name: " ".join((p.description or "").split()) for d in parsed for p in d.params}
    for field in dataclasses.fields(kind):
        if not field.init:
            continue
        hint = hints[field.name]
        marks = getattr(hint, "__metadata__", ())
        renamed = next((m.name for m in marks if getattr(m, "name", None)), field.name)
        name = prefix + renamed
        plain = typing.get_args(hint)[0] if marks else hint
        if dataclasses.is_dataclass(plain):
            inside = prefix if is_inlined(marks) else f"{name}."
            inner = typing.cast(type[Any], plain)
            is_group = "is_group" in field.metadata
            about = f"{field.name}: {first_sentence(inner)}" if is_group else group
            yield from find_options(inner, inside, about)
        else:
            text, default = texts.get(field.name, ""), describe_default(field)
            if default in ("`None`", "empty"):
                text, stated = split_default(text)
                default = stated or default
            name = name.upper() if tyro.conf.Positional in marks else name
            yield Option(name, describe_type(hint), default, text, group)


def table(options: list[Option], dashes: bool) -> str:
    """Return options as Markdown tables: one of those without a group, and one of each group.

    Args:
        options: the rows.
        dashes: spell names as on the command line, else as in a TOML file.
    """
    groups: dict[str, list[Option]] = {}
    for option in options:
        groups.setdefault(option.group, []).append(option)
    parts = [
        (f"Group {group}\n\n" if group else "") + _rows(rows, dashes)
        for group, rows in groups.items()
    ]
    return "\n".join(parts)


def _rows(options: list[Option], dashes: bool) -> str:
    lines = ["| option | values | default | meaning |\n|---|---|---|---|\n"]
    for option in options:
        positional = option.path.isupper()
        name = option.path if positional or not dashes else f"--{option.path.replace('_', '-')}"
        cells = [f"`{name}`", option.type, option.default, option.help]
        lines.append(f"| {' | '.join(c.replace('|', chr(92) + '|') for c in cells)} |\n")
    return "".join(lines)


def first_sentence(kind: type[Any]) -> str:
    """Return the first paragraph of a class's docstring."""
    return " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())


def command_section(name: str, command: Command) -> str:
    """Return the section of one command."""
    head = f"\n## bmforge {name}\n\n"
    if command.options is not None:
        return f"{head}{first_sentence(command.options)}\n\n" + table(
            list(find_options(command.options)), dashes=True
        )
    about = f"{head}{command.about[0].upper()}{command.about[1:]}.\n"
    if name == "data":
        parts = [
            f"\n### bmforge data {sub}\n\n{first_sentence(options)}\n\n"
            + table(list(find_options(options)), dashes=True)
            for sub, (_, options, _) in DATA_COMMANDS.items()
        ]
        return about + "".join(parts)
    if name == "evaluate":
        return f"{about}\n" + table(list(find_options(EvaluateCommand)), dashes=True)
    return f"{about}\n[Fields of a training run](train_config.md) lists the fields of its config.\n"


def render_commands() -> str:
    """Return the page of the command line."""
    rows = [f"| [`{n}`](#bmforge-{n}) | {c.about} |\n" for n, c in COMMANDS.items()]
    head = (
        "# Command line\n\nThis page lists all commands with their options. Arguments in capitals "
        "are positional.\n`bmforge COMMAND --help` prints the same text in the terminal.\n\n"
        "| command | |\n|---|---|\n"
    )
    return head + "".join(rows) + "".join(command_section(n, c) for n, c in COMMANDS.items())


def task_fields(task: Task) -> list[Option]:
    """Return the fields of a task's forms except those of the loop, the layout and the model."""
    rows: dict[str, Option] = {}
    for form in task.forms:
        for option in find_options(form.config):
            if not option.path.startswith(("train.", "layout.", "model.")):
                rows.setdefault(option.path, option)
    return list(rows.values())


def render_config() -> str:
    """Return the page of the config fields of a training run."""
    fields = {name: task_fields(task) for name, task in TASKS.items()}
    shared = set.intersection(*({o.path for o in rows} for rows in fields.values()))
    common = [o for o in fields["pretrain"] if o.path in shared]
    parts = [
        "# Fields of a training run\n\nEvery field is an option of `bmforge train`, such as "
        "`--train.optim.lr 1e-4`, and a key of a TOML file.\nThe fields `model.*` set "
        "the sizes of the model; [the models](api/models.md) lists them by config class.\n",
        "\n## Training loop\n\n" + table(list(find_options(TrainConfig, "train.")), dashes=False),
        "\n## Layout\n\n" + table(list(find_options(Layout, "layout.")), dashes=False),
        "\n## Fields of every task\n\n" + table(common, dashes=False),
    ]
    for name, rows in fields.items():
        own = [o for o in rows if o.path not in shared]
        parts.append(f"\n## Task {name}\n\n{TASK_NAMES[name][0].upper()}{TASK_NAMES[name][1:]}.\n")
        parts.append("\n" + table(own, dashes=False) if own else "")
    return "".join(parts)


def render_errors() -> str:
    """Return the page of the error types."""
    rows = [
        f"| `{kind.__name__}` | {', '.join(f'`{b.__name__}`' for b in kind.__bases__)} | "
        f"{first_sentence(kind)} |\n"
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.BmforgeError)
    ]
    return (
        "# Errors\n\nEvery message gives the value, the allowed values, and the fix. The command "
        "line prints the\nmessage without a traceback and exits with status 2.\n\n"
        "| error | base classes | raised when |\n|---|---|---|\n" + "".join(rows)
    )


def render_metrics() -> str:
    """Return the page of the server's metrics."""
    registry: CollectorRegistry = Metrics()._registry
    rows = []
    for metric in registry.collect():
        suffix = {"counter": "_total", "histogram": "_bucket, _sum, _count"}.get(metric.type, "")
        rows.append(f"| `{metric.name}` | {metric.type} | {suffix} | {metric.documentation} |\n")
    return (
        "# Metrics of the server\n\n`GET /metrics` of `bmforge serve` returns metrics in the text "
        "format of Prometheus. A training run writes its\nmetrics to "
        "[`metrics.jsonl`](../guides/training.md).\n\n"
        "| metric | type | suffixes | meaning |\n|---|---|---|---|\n" + "".join(rows)
    )


def render_package(package: str) -> str:
    """Return the page of a package's public names, as a block that mkdocstrings fills."""
    return f"# {PACKAGES[package]}: bmforge.{package}\n\n::: bmforge.{package}\n"


def render_pages() -> dict[str, str]:
    """Return the texts of all pages, by path below docs/."""
    pages = {
        "commands": render_commands(),
        "train_config": render_config(),
        "errors": render_errors(),
        "server_metrics": render_metrics(),
    }
    pages |= {f"api/{name.replace('.', '_')}": render_package(name) for name in PACKAGES}
    return {f"reference/{name}.md": text for name, text in pages.items()}
