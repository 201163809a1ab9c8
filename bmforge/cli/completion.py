"""`bmforge completion SHELL`: prints a completion script, generated from the options.

The script is static, so pressing the tab key does not start Python.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from bmforge.cli.commands import COMMANDS
from bmforge.cli.data import SUBCOMMANDS
from bmforge.cli.options import CompletionCommand, EvaluateCommand
from bmforge.cli.parse import find_options, is_switch
from bmforge.cli.train_help import SHORT_NAMES, SWITCHES
from bmforge.cli.train_options import FIELDS
from bmforge.task_names import OLD_NAMES, PUBLISHED, TASK_NAMES

__all__ = ["complete_script", "list_words", "run_completion"]

# Values of an option: names to choose from, "switch" for no value, "any" for a file or other text.
Value = tuple[str, ...] | Literal["switch", "any"]
# Beginning of a command line, such as ("data", "show") -> subcommands and options that may follow.
Words = Mapping[tuple[str, ...], Mapping[str, Value]]


def run_completion(command: CompletionCommand) -> None:
    """Print the completion script of a shell."""
    print(complete_script(command.shell), end="")


def complete_script(shell: str) -> str:
    """Return the completion script for bash, zsh or fish."""
    return _SHELLS[shell](list_words())


def list_words() -> Words:
    """Return the possible next words for each beginning of a command line.

    The keys of the dict are tuples of the words after `bmforge`. A value is a dict from each
    possible next word to the arguments that it accepts; for subcommands and tasks this is "any".
    """
    words: dict[tuple[str, ...], Mapping[str, Value]] = {(): dict.fromkeys(COMMANDS, "any")}
    for name, command in COMMANDS.items():
        if command.options is not None:
            words[name,] = _options(command.options)
    layout: dict[str, Value] = {
        f"--{name}": "any" for name in sorted(FIELDS) if name.startswith("layout.")
    }
    words["evaluate",] = {**_options(EvaluateCommand), **layout}
    words["data",] = dict.fromkeys(SUBCOMMANDS, "any")
    for name, (_, options, _) in SUBCOMMANDS.items():
        words["data", name] = _options(options)
    tasks: dict[str, Value] = dict.fromkeys((*TASK_NAMES, *PUBLISHED, *OLD_NAMES), "any")
    words["train",] = {"--help": "switch", **tasks}
    train = [*SHORT_NAMES, *SWITCHES, *(f"--{name}" for name in sorted(FIELDS))]
    words["completion",] = {"--help": "switch", **dict.fromkeys(_SHELLS, "any")}
    words["train", "*"] = {"--help": "switch", **dict.fromkeys(train, "any")}
    return words


def _options(kind: Any) -> dict[str, Value]:
    """Return a dict from each option of a dataclass to the values that it accepts.

    Positional arguments are excluded.
    """
    options: dict[str, Value] = {"--help": "switch"}
    for name, hint in find_options(kind, positional=False):
        options[f"--{name}"] = "switch" if is_switch(hint) else tuple(_choices(hint)) or "any"
    return options


def _choices(hint: Any) -> Iterator[str]:
    """Yield the values that an option accepts; yield nothing if the option accepts any text."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        yield from map(str, arguments)
    elif origin in (types.UnionType, typing.Union):
        for argument in arguments:
            yield from _choices(argument)


def _bash(words: Words) -> str:
    rows, values, nested = [], [], []
    for path, options in words.items():
        pattern = " ".join(path)
        rows.append(f'        "{pattern}") words="{" ".join(options)}" ;;')
        if any(not word.startswith("--") for word in options):
            nested.append(f'"{pattern}"')
        for option, value in options.items():
            if isinstance(value, tuple):
                values.append(f'        "{pattern} {option}") words="{" ".join(value)}" ;;')
    fields = {"words": "\n".join(rows), "values": "\n".join(values), "nested": "|".join(nested)}
    return _BASH.format(**fields)


def _zsh(words: Words) -> str:
    # zsh runs the bash function in its bash emulation, which sets COMP_WORDS and COMPREPLY.
    return f"#compdef bmforge\nautoload -U +X bashcompinit && bashcompinit\n{_bash(words)}"


def _fish(words: Words) -> str:
    lines = ["complete -c bmforge -f"]
    for path, options in words.items():
        seen = [
            "test (count (commandline -opc)) -gt 2"
            if part == "*"
            else f"__fish_seen_subcommand_from {part}"
            for part in path
        ]
        subcommands = [word for word in options if not word.startswith("--")]
        if subcommands:
            seen.append(f"not __fish_seen_subcommand_from {' '.join(subcommands)}")
        condition = "; and ".join(seen)
        if subcommands:
            lines.append(f"complete -c bmforge -n '{condition}' -a '{' '.join(subcommands)}'")
        for option, value in options.items():
            if option.startswith("--"):
                end = {"switch": "", "any": " -rF"}.get(
                    value if isinstance(value, str) else "", f" -xa '{' '.join(value)}'"
                )
                lines.append(f"complete -c bmforge -n '{condition}' -l {option[2:]}{end}")
        if path and not subcommands:
            lines.append(f"complete -c bmforge -n '{condition}' -F")
    return "\n".join(lines) + "\n"


_BASH = """_bmforge() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} words=""
    local path=""
    if (( COMP_CWORD > 1 )); then path=${{COMP_WORDS[1]}}; fi
    if (( COMP_CWORD > 2 )); then
        case "$path" in
            data) path="data ${{COMP_WORDS[2]}}" ;;
            train) path="train *" ;;
        esac
    fi
    case "$path $previous" in
{values}
    esac
    if [[ -z $words ]]; then
        case "$path" in
{words}
        esac
        # Where only options follow, names of files are completed unless a dash is typed.
        case "$path" in
            {nested}) ;;
            *) if [[ $cur != -* ]]; then words=""; fi ;;
        esac
    fi
    COMPREPLY=()
    if [[ -n $words ]]; then COMPREPLY=( $(compgen -W "$words" -- "$cur") ); fi
}}
complete -o default -F _bmforge bmforge
"""

_SHELLS: Mapping[str, Callable[[Words], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
