"""Runs a training task: reads its config from a file and options, then trains or shows it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from bmforge.cli import parse
from bmforge.cli.dry_run import parse_world, show_dry_run
from bmforge.cli.parse import take_option, take_switch
from bmforge.cli.train_help import describe_fields
from bmforge.compat.cpm_pretrain.ds_config import apply_ds_config
from bmforge.config import dump_toml
from bmforge.errors import ConfigError
from bmforge.interrupts import before_output
from bmforge.parallel.distributed import launched_processes, restarts_failed
from bmforge.recipes import TASKS, find_recipe
from bmforge.recipes.adapters import default_rate
from bmforge.recipes.registry import Recipe, read_config, read_config_values
from bmforge.recipes.start import complete_model_config, read_changes, record_given

__all__ = ["run_task"]

# Number of steps that --profile traces.
_PROFILED_STEPS = 3
# Default number of epochs on conversations, as in TRL, transformers and LLaMA-Factory.
_EPOCHS = 3.0


def run_task(task: str, arguments: Sequence[str]) -> None:
    """Start or resume a training task.

    Args:
        task: name of the task.
        arguments: command line arguments after the task name.
    """
    with before_output():
        recipe, config = _read_task(task, arguments)
    if config is not None and recipe.run(config).stopped and not restarts_failed():
        raise KeyboardInterrupt  # so that a shell script that runs this command stops too


def _read_task(task: str, arguments: Sequence[str]) -> tuple[Recipe, Any]:
    """Return the recipe and the config of a run; the config is None if it was only shown."""
    remaining = list(arguments)
    file, model = take_option(remaining, "--config"), take_option(remaining, "--model")
    recipe = find_recipe(task, model, _peek_option(remaining, "--init-from"), file)
    shows, tries = take_switch(remaining, "--print-config"), take_switch(remaining, "--dry-run")
    traces = take_switch(remaining, "--profile")
    old_file, plans = take_option(remaining, "--ds-config"), take_option(remaining, "--layout")
    world, changes = take_option(remaining, "--world"), take_option(remaining, "--changes")
    command = f"train {task}" + ("" if model is None else f" --model {model}")
    default = read_config(recipe, file)
    # Derived fields, such as the number of heads, are recomputed from the changed fields.
    default.model = default.model.without_derived()
    _set_adapter_rate(default, remaining, file)
    _set_epochs(recipe.task, default, remaining, file)
    config = _parse_run(recipe, remaining, command, default)
    config = record_given(config, file, parse.spell_switches(recipe.config, remaining))
    if changes is not None:
        config.changes = read_changes(changes)
    if shows or tries or plans is not None:
        config = complete_model_config(config)
    if traces and not config.train.profile_steps:
        config.train = dataclasses.replace(config.train, profile_steps=_PROFILED_STEPS)
    if old_file is not None:
        size = parse_world(world) if tries else launched_processes()
        config = apply_ds_config(config, old_file, size)
    if plans is not None:
        config = _choose_layout(config, plans, parse_world(world) if tries else None)
    if shows:
        print(dump_toml(config), end="")
    elif tries:
        print(show_dry_run(recipe, config, parse_world(world)))
    if shows or tries:
        return recipe, None
    if world is not None:
        raise ConfigError(
            f"--world {world} has no effect without --dry-run. Leave it out, and start several "
            "processes with torchrun."
        )
    return recipe, config


def _parse_run(recipe: Recipe, arguments: Sequence[str], command: str, default: Any) -> Any:
    """Parse the options of a run; take `changes` and the parameter groups from `default`."""
    run, model, groups = default.changes, default.model.changes, default.train.optim.groups
    default.changes, default.model.changes = (), ()
    default.train = _with_groups(default.train, ())
    about = describe_fields(TASKS[recipe.task].about)
    config = parse.parse_options(recipe.config, arguments, command, default, about)
    config.changes, config.model.changes = run, model
    config.train = _with_groups(config.train, groups)
    return config


def _set_adapter_rate(default: Any, arguments: Sequence[str], file: str | None) -> None:
    """Set the default learning rate for training an adapter, unless a config file sets one.

    Adapters need a higher learning rate than the whole model. The option --lr overrides this
    default.
    """
    kind = _peek_option(arguments, "--adapter.kind") or default.adapter.kind
    values = read_config_values(file)
    if kind is None or "lr" in values.get("train", {}).get("optim", {}):
        return
    rank = _peek_option(arguments, "--adapter.rank") or default.adapter.rank
    full_rate = default.train.optim.lr
    rate = default_rate(kind, int(rank) if str(rank).isdecimal() else None, full_rate)
    optim = dataclasses.replace(default.train.optim, lr=rate)
    default.train = dataclasses.replace(default.train, optim=optim)


def _set_epochs(task: str, default: Any, arguments: Sequence[str], file: str | None) -> None:
    """Set a run on conversations to three epochs, unless steps or epochs are set.

    Raises:
        ConfigError: both steps and epochs are set.
    """
    has_steps = "steps" in read_config_values(file).get("train", {})
    spellings = ("--steps", "--train.steps")
    steps = [v for name in spellings if (v := _peek_option(arguments, name)) is not None]
    epochs = _peek_option(arguments, "--epochs")
    if steps and epochs is not None:
        raise ConfigError(
            f"--epochs {epochs} and --steps {steps[0]} both set the length of the run. Leave one "
            "of them out."
        )
    if steps:
        default.epochs = None
    elif task == "conversations" and default.epochs is None and not has_steps:
        default.epochs = _EPOCHS


def _with_groups(train: Any, groups: tuple[Any, ...]) -> Any:
    optim = dataclasses.replace(train.optim, groups=groups)
    return dataclasses.replace(train, optim=optim)


def _choose_layout(config: Any, word: str, world: int | None) -> Any:
    """Return the config with the planner's layout for `world` or the launched processes."""
    from bmforge.cli.auto_layout import apply_auto_layout

    if word != "auto":
        raise ConfigError(
            f"--layout {word!r} is not supported (supported: auto). Set the fields of the layout "
            "separately, such as --layout.zero 3."
        )
    return apply_auto_layout(config, world or launched_processes(), joins=world is None)


def _peek_option(arguments: Sequence[str], name: str) -> str | None:
    """Return the value of an option without removing it from the arguments."""
    spelt = [a.replace("_", "-") if a.startswith("--init_from") else a for a in arguments]
    last = [i for i, a in enumerate(spelt) if a.partition("=")[0] == name][-1:]
    return take_option(spelt[last[0] :], name) if last else None
