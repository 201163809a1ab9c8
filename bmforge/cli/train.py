"""`bmforge train TASK`: parses the arguments; torch is imported only for a run."""

from __future__ import annotations

from collections.abc import Sequence

from bmforge.cli.early_checks import check_arguments
from bmforge.cli.foreign_options import suggest_option
from bmforge.cli.train_help import SHORT_NAMES, SWITCHES, describe_task, list_tasks
from bmforge.cli.train_options import FIELDS
from bmforge.errors import ConfigError
from bmforge.interrupts import before_output
from bmforge.logging import log_loading
from bmforge.task_names import check_task

__all__ = ["run_train"]

_HELP = ("-h", "--help")


def run_train(arguments: Sequence[str]) -> None:
    """Start or resume a training run."""
    if not arguments or arguments[0] in (*_HELP, "--help-all"):
        print(list_tasks())
        return
    task, options = arguments[0], _spell_out(arguments[1:])
    check_task(task)
    if any(option in _HELP for option in options):
        print(describe_task(task))
        return
    with before_output():
        _check_names(options)
        check_arguments(task, options)
        log_loading()
        # Imported lazily: it imports torch, and every recipe and model.
        from bmforge.cli.train_run import run_task

    run_task(task, ["--help" if option == "--help-all" else option for option in options])


def _check_names(arguments: Sequence[str]) -> None:
    """Raise `ConfigError` for an option that no task has; each task checks all other options."""
    options = [f"--{name}" for name in FIELDS] + SWITCHES
    for argument in arguments:
        name = argument.partition("=")[0].replace("_", "-")
        spellings = {name, name.replace("--no-", "--", 1), name.replace(".no-", ".", 1)}
        if name.startswith("--") and spellings.isdisjoint(options):
            advice = suggest_option("train", name, [*options, *SHORT_NAMES])
            raise ConfigError(
                f"unknown option of bmforge train: {name}.{advice} --help lists the common "
                "options; together with --model, --help-all lists all of them."
            )


def _spell_out(arguments: Sequence[str]) -> list[str]:
    """Replace short option names with the full names of their fields."""
    out = []
    for argument in arguments:
        name, mark, value = argument.partition("=")
        out.append(SHORT_NAMES.get(name.replace("_", "-"), name) + mark + value)
    return out
