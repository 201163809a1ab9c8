"""Computes the global batch size from gradient accumulation, and checks it."""

from __future__ import annotations

import dataclasses
from typing import Any

from bmforge.errors import ConfigError
from bmforge.parallel import Layout
from bmforge.parallel.check import step_problems
from bmforge.value_ranges import check_values

__all__ = ["resolve_batch"]


def resolve_batch(config: Any, world_size: int) -> Any:
    """Return the data config with the global batch size computed from gradient accumulation.

    Raises:
        ConfigError: a size is below 1, two global batch sizes are given, or the pipeline
            schedule does not support this number of micro-batches.
    """
    check_values(config.data, "data.")
    data, rows = config.data, config.layout.row_groups(world_size)
    steps = getattr(data, "grad_accum_steps", None)
    if steps is not None:
        data = _accumulate(data, steps, rows, type(config)().data.global_batch_size)
    _check_schedule(data, config.layout, rows)
    return data


def _accumulate(data: Any, steps: int, rows: int, usual: int) -> Any:
    product = data.micro_batch_size * steps * rows
    if data.global_batch_size not in (usual, product):
        raise ConfigError(
            f"data.global_batch_size={data.global_batch_size} must be equal to "
            f"micro_batch_size={data.micro_batch_size} x grad_accum_steps={steps} x "
            f"{rows} data-parallel processes = {product}. Leave data.global_batch_size or "
            "data.grad_accum_steps out."
        )
    return dataclasses.replace(data, global_batch_size=product, grad_accum_steps=None)


def _check_schedule(data: Any, layout: Layout, rows: int) -> None:
    count = -(-data.global_batch_size // (data.micro_batch_size * rows))
    problems = step_problems(layout, count)
    if problems:
        raise ConfigError(
            f"data.global_batch_size={data.global_batch_size} / "
            f"(data.micro_batch_size={data.micro_batch_size} x {rows} data-parallel processes) "
            f"= {count} micro-batches does not fit this run: {'; '.join(problems)}."
        )
