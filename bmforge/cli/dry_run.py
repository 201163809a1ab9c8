"""`bmforge train TASK --dry-run`: shows the layout for N processes, and checks the data."""

from __future__ import annotations

from functools import partial
from typing import Any

from bmforge.errors import ConfigError
from bmforge.parallel import launched_processes
from bmforge.parallel.planner.dry_run import DryRun, dry_run
from bmforge.recipes.build import describe_model
from bmforge.recipes.registry import Recipe
from bmforge.recipes.resident_models import list_resident_models
from bmforge.recipes.run import check_recipe

__all__ = ["parse_world", "show_dry_run"]


def parse_world(text: str | None) -> int:
    """Return the number of processes given by `--world`, by default that of the launcher.

    Raises:
        ConfigError: the option is not a positive integer.
    """
    if text is None:
        return launched_processes()
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"--world {text} is not a number of processes (allowed: whole numbers above 0). "
            "Pass a number, such as --dry-run --world 64."
        )
    return int(text)


def show_dry_run(recipe: Recipe, config: Any, processes: int) -> str:
    """Check a run as its start does, and describe its layout.

    Args:
        recipe: the recipe.
        config: config of the run; without data.paths, its data is not checked.
        processes: number of processes.

    Raises:
        BmforgeError: as at the start of the run.
    """
    checked = recipe.run(config, partial(check_recipe, processes=processes))
    config, model = checked.config, checked.model
    result = dry_run(
        partial(describe_model, config),
        config.layout,
        processes,
        precision=config.train.precision,
        master_weights=config.train.master_weights,
        recompute=config.recompute,
        prefetch=config.prefetch,
    )
    described = _describe(type(model).__name__, result, processes)
    for resident in list_resident_models(config, model, processes):
        size = resident.bytes_per_process(result.holders) / 2**30
        memory = "of host memory for" if resident.is_offloaded else "on"
        described += f"\n{resident.name:>10}: {size:.2f} GiB {memory} every process"
    return described


def _describe(family: str, result: DryRun, world_size: int) -> str:
    axes = " x ".join(f"{name}={length}" for name, length in result.axes.items() if length > 1)
    lines = [
        f"{family}, {result.parameters:,} parameters, on {world_size} processes: {axes or 'one'}",
        f"{'rank':>10}{'blocks':>8}{'parameters':>16}{'weights':>12}{'with AdamW':>12}  stages",
    ]
    for share in result.shares:
        weights, trained = share.parameter_bytes / 2**30, share.trained_bytes / 2**30
        # Gradients and AdamW's two states have the same sizes and layout as the trained weights.
        lines.append(
            f"{share.rank:>10}{share.blocks:>8}{share.parameters:>16,}{weights:>8.2f} GiB"
            f"{weights + 3 * trained:>8.2f} GiB  {', '.join(map(str, share.stages))}"
        )
    return "\n".join(lines)
