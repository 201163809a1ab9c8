"""What `bmforge train --help` says, and what a task's own help says besides its fields."""

from __future__ import annotations

from bmforge.recipes import RECIPES, TASKS
from bmforge.recipes.registry import Recipe

__all__ = ["describe_run", "list_tasks"]

_SWITCHES = {
    "--model NAME_OR_DIR": "a preset, a family, or a directory or hub id of a model to start from",
    "--config FILE": "a TOML file with fields; options come after it",
    "--changes JSON": "changes of the model, as JSON or a file of it",
    "--layout auto": "let the planner choose the layout",
    "--ds-config FILE": "also read DeepSpeed's configuration file",
    "--print-config": "print the whole config as TOML and stop",
    "--dry-run --world N": "say what each of N processes would hold, and stop",
    "--profile": "trace three steps",
}


def list_tasks() -> str:
    """Return what `bmforge train --help` says."""
    tasks = "\n".join(f"  {name:<18}{task.about}" for name, task in TASKS.items())
    recipes = "\n".join(f"  {name:<18}{recipe.about}" for name, recipe in RECIPES.items())
    return (
        "usage: bmforge train TASK --model NAME_OR_DIR [--config FILE] [--ds-config FILE] "
        "[--changes JSON] [--layout auto] [--print-config] [--dry-run --world N] [--profile] "
        "[--field.path VALUE ...]\n\n"
        f"{tasks}\n\nold names, each a task with a model:\n{recipes}\n\n"
        "`bmforge train TASK --model NAME_OR_DIR --help` lists the options."
    )


def describe_run(recipe: Recipe) -> str:
    """Return what stands above the fields in the help of a task with a model."""
    switches = "\n".join(f"  {name:<22}{about}" for name, about in _SWITCHES.items())
    return f"{TASKS[recipe.task].about}\n\nbesides the fields below:\n{switches}\n"
