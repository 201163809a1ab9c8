"""`bmforge train TASK --dry-run --world N`: shows the layout for N processes."""

from __future__ import annotations

import os
from typing import Any

from bmforge.errors import ConfigError
from bmforge.parallel.planner.dry_run import DryRun, dry_run
from bmforge.recipes.adapters import attach_adapter
from bmforge.recipes.micro_batches import settle_batch
from bmforge.recipes.resident_models import list_resident_models
from bmforge.recipes.reward import RewardConfig, with_reward_head
from bmforge.recipes.start import family_of, with_changes

__all__ = ["launched_processes", "parse_world", "show_dry_run"]


def parse_world(text: str | None) -> int:
    """Return the number of processes given by `--world`.

    Raises:
        ConfigError: the option is missing, or is not a positive integer.
    """
    if text is None or not text.isdecimal() or int(text) < 1:
        problem = "is missing" if text is None else f"{text} is not a number of processes"
        raise ConfigError(
            f"--world {problem}. Pass the number of processes, such as --dry-run --world 64."
        )
    return int(text)


def launched_processes() -> int:
    """Return the number of processes that the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def show_dry_run(config: Any, world_size: int) -> str:
    """Build the layout of a recipe's config for `world_size` processes and describe it.

    Raises:
        ConfigError: the layout is invalid; the message lists all problems.
    """
    # If the layout has problems, all of them are reported together below.
    if not config.layout.problems(world_size):
        settle_batch(config, world_size)
    if isinstance(config, RewardConfig):
        config = with_reward_head(config)
    family = family_of(config.model)

    def build() -> Any:
        model = family.from_config(with_changes(config), device="meta")
        attach_adapter(model, config)
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
        weights = share.parameter_bytes / 2**30
        # Gradients and AdamW's two states have the same sizes and layout as the weights.
        lines.append(
            f"{share.rank:>10}{share.blocks:>8}{share.parameters:>16,}{weights:>8.2f} GiB"
            f"{4 * weights:>8.2f} GiB  {', '.join(map(str, share.stages))}"
        )
    return "\n".join(lines)
