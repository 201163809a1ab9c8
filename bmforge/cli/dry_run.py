"""`bmforge train TASK --dry-run`: shows the layout for N processes, and checks the data."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from bmforge.device import default_device
from bmforge.errors import ConfigError
from bmforge.parallel import World
from bmforge.parallel.planner.dry_run import DryRun, dry_run
from bmforge.recipes.adapters import attach_adapter, resolve_adapter
from bmforge.recipes.base_weights import (
    check_base_dtype,
    quantize_base_,
    quantizes_base_on_load,
    store_frozen_,
)
from bmforge.recipes.micro_batches import resolve_batch
from bmforge.recipes.preferences import read_pairs, train_preferences
from bmforge.recipes.registry import Recipe
from bmforge.recipes.resident_models import list_resident_models
from bmforge.recipes.reward import RewardConfig, open_reward_data, train_reward, with_reward_head
from bmforge.recipes.sft import open_conversations, train_sft
from bmforge.recipes.start import family_of, with_changes

__all__ = ["check_data", "launched_processes", "parse_world", "show_dry_run"]

# Functions (config, ranks) that read and encode all data of a run, without its model.
_READERS: dict[Callable[[Any], Any], Callable[[Any, World], object]] = {
    train_sft: open_conversations,
    train_preferences: read_pairs,
    train_reward: open_reward_data,
}


def parse_world(text: str | None) -> int:
    """Return the number of processes given by `--world`, by default that of the launcher.

    Raises:
        ConfigError: the option is not a positive integer.
    """
    if text is None:
        return launched_processes()
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"--world {text} is not a number of processes. Pass one, such as --dry-run --world 64."
        )
    return int(text)


def launched_processes() -> int:
    """Return the number of processes that the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_data(recipe: Recipe, config: Any, world_size: int) -> None:
    """Read and encode the data of a run as the run does, which logs its size.

    Tasks other than conversations, preferences and reward are not checked.

    Raises:
        BmforgeError: as at the start of the run.
    """
    read = _READERS.get(recipe.run)
    if read is None or not config.data.paths:
        return
    if isinstance(config, RewardConfig):
        config = with_reward_head(config)
    config = dataclasses.replace(config, data=resolve_batch(config, world_size))
    ranks = World(0, config.layout.row_groups(world_size), default_device())
    read(resolve_adapter(config), ranks)


def show_dry_run(config: Any, world_size: int) -> str:
    """Build the layout of a recipe's config for `world_size` processes and describe it.

    Raises:
        ConfigError: the layout is invalid; the message lists all problems.
    """
    # If the layout has problems, all of them are reported together below.
    if not config.layout.problems(world_size):
        resolve_batch(config, world_size)
    if isinstance(config, RewardConfig):
        config = with_reward_head(config)
    family = family_of(config.model)
    check_base_dtype(config)

    def build() -> Any:
        model = family.from_config(with_changes(config), device="meta")
        if quantizes_base_on_load(config):
            quantize_base_(model, config.base_dtype)
        attach_adapter(model, config)
        store_frozen_(model, config)
        return model

    result = dry_run(
        build,
        config.layout,
        world_size,
        precision=config.train.precision,
        recompute=config.recompute,
        prefetch=config.prefetch,
    )
    described = _describe(family.__name__, result, world_size)
    for resident in list_resident_models(config, build(), world_size):
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
