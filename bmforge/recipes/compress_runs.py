"""Training runs of compression phases: their configs, and checks before the first phase."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Any

from bmforge.compress.phases import Phase
from bmforge.config import config_from_dict, config_to_dict
from bmforge.errors import ConfigError
from bmforge.parallel import launched_processes
from bmforge.recipes.adapter_dirs import find_source
from bmforge.recipes.compression_phases import PhaseConfig
from bmforge.recipes.registry import Recipe, find_recipe
from bmforge.recipes.run import check_recipe

__all__ = ["check_runs", "check_task", "make_phase_run"]


def check_task(config: Any, phases: tuple[Phase, ...]) -> None:
    """Raise `ConfigError` for phases with steps but no task, or a task but no phase with steps."""
    if not any(phase.steps for phase in phases):
        for name in ("task", "run"):
            if getattr(config, name):
                raise ConfigError(
                    f"{name} has no effect, because no phase of the recipe has training steps. "
                    "Set steps.structure, steps.experts or steps.weights, or leave it out."
                )
        return
    if not config.task:
        raise ConfigError(
            "the recipe has phases with training steps, but no training task. Set task = "
            '"pretrain", and the options of this task under [run].'
        )
    taken = {"run_dir", "init_from", "export", "compress", "model"} & set(config.run)
    if taken:
        raise ConfigError(
            f"run.{min(taken)} has no effect, because the recipe sets this option itself. "
            f"Remove run.{min(taken)}."
        )
    find_recipe(config.task, str(find_source(config.model).model))


def make_phase_run(config: Any, phase: Phase, source: Path, run_dir: Path) -> tuple[Recipe, Any]:
    """Return the task's recipe and the config of its run for a phase."""
    # `source` is the model after the previous phase.
    recipe = find_recipe(config.task, str(source))
    settings_class = dataclasses.make_dataclass(
        f"Small{recipe.config.__name__}",
        [("compress", PhaseConfig, field(default_factory=PhaseConfig))],
        bases=(recipe.config,),
        kw_only=True,
    )
    settings_class.__doc__, settings_class.__module__ = recipe.config.__doc__, __name__
    usual = config_to_dict(recipe.config())
    usual.pop("model")  # the model's sizes are read from `init_from`
    run_values = _merge(usual, {**config.run, "run_dir": str(run_dir), "init_from": str(source)})
    run_values = _merge(run_values, {"train": {"steps": phase.steps}})
    settings: Any = config_from_dict(settings_class, run_values, "run.")
    settings.compress = PhaseConfig(config=phase.config, calibration=config.calibration)
    settings.model_changes = ()
    return recipe, settings


def check_runs(config: Any, phases: Sequence[Phase], source: Path, *, reads_data: bool) -> None:
    """Check the training options of all phases as their runs do.

    Args:
        config: the recipe.
        phases: phases of the recipe.
        source: directory of the original model; later phases start from smaller ones.
        reads_data: whether to read and encode the training data, which all phases share.
    """
    for phase in filter(lambda phase: phase.steps, phases):
        recipe, settings = make_phase_run(config, phase, source, config.out / "phases" / "check")
        check = partial(check_recipe, processes=launched_processes(), reads_data=reads_data)
        recipe.run(settings, check)
        reads_data = False


def _merge(usual: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return `usual`, a nested dict of default values, updated with `changes`."""
    out = dict(usual)
    for name, value in changes.items():
        both = isinstance(value, dict) and isinstance(out.get(name), dict)
        out[name] = _merge(out[name], value) if both else value
    return out
