"""`bmforge compress`: compress a model with a recipe, one phase after the other."""

from __future__ import annotations

import dataclasses

from bmforge.cli.compress_options import CompressCommand
from bmforge.errors import ConfigError
from bmforge.parallel.distributed import restarts_failed
from bmforge.recipes.compress import (
    StoppedError,
    describe_phases,
    read_recipe,
    run_compress,
    store_teacher_answers,
)

__all__ = ["run_compress_command"]


def run_compress_command(command: CompressCommand) -> None:
    """Compress a model; with `--dry-run`, only describe the phases."""
    if command.answers is not None and (command.dry_run or command.format is not None):
        raise ConfigError(
            "answers cannot be used together with dry_run or format. Leave dry_run and format out, "
            "or leave answers out."
        )
    config = read_recipe(command.recipe, command.model, command.out)
    if command.format is not None:
        config = dataclasses.replace(config, format=command.format)
    if command.dry_run:
        print(describe_phases(config))
        return
    if command.answers is not None:
        store_teacher_answers(config, command.answers)
        return
    try:
        run_compress(config)
    except StoppedError:
        if not restarts_failed():
            raise
