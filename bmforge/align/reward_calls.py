"""Calls reward functions with the arguments that TRL passes to them.

In addition to prompts, completions and dataset columns, a function may accept ``trainer_state``
(``global_step`` and ``max_steps``), ``log_extra(column, values)``, which adds a column to
``completions.jsonl``, and ``log_metric(name, value)``, which adds a metric to the run.
"""

from __future__ import annotations

import asyncio
import inspect
import statistics
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

__all__ = ["LOG_ARGUMENTS", "STATE_ARGUMENT", "RewardReply", "call_reward"]

STATE_ARGUMENT = "trainer_state"
LOG_ARGUMENTS = ("log_extra", "log_metric")


class RewardReply(NamedTuple):
    """Result of one call of a reward function.

    Args:
        rewards: return value of the function, one reward per answer.
        columns: dict from column name to the values that the function logged, one per answer.
        metrics: dict from metric name to the mean of the values that the function logged.
    """

    rewards: Any
    columns: dict[str, list[Any]]
    metrics: dict[str, float]


def call_reward(function: Callable[..., Any], batch: Mapping[str, Any]) -> RewardReply:
    """Call a reward function with the arguments that it accepts; await it if it is async.

    Args:
        function: reward function with TRL's signature.
        batch: ``prompts``, ``completions``, ``completion_ids``, the other columns of the dataset,
            and the state of the run under `STATE_ARGUMENT`.

    Raises:
        ValueError: the function logs a column with a wrong number of values.
        Exception: any exception of the function is passed on.
    """
    columns: dict[str, list[Any]] = {}
    values: dict[str, list[float]] = {}

    def log_extra(column: str, entries: Any) -> None:
        columns[column] = list(entries)

    def log_metric(name: str, value: float) -> None:
        values.setdefault(name, []).append(float(value))

    arguments = {**batch, "log_extra": log_extra, "log_metric": log_metric}
    if STATE_ARGUMENT in batch:
        arguments[STATE_ARGUMENT] = SimpleNamespace(**batch[STATE_ARGUMENT])
    parameters = inspect.signature(function).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        names = {parameter.name for parameter in parameters}
        arguments = {name: value for name, value in arguments.items() if name in names}
    out = function(**arguments)
    out = asyncio.run(_wait_for(out)) if inspect.isawaitable(out) else out
    count = len(batch["completions"])
    for column, entries in columns.items():
        if len(entries) != count:
            raise ValueError(
                f"log_extra({column!r}, ...) was called with {len(entries)} values for {count} "
                "answers. Pass one value per answer."
            )
    means = {name: statistics.fmean(each) for name, each in values.items()}
    return RewardReply(out, columns, means)


async def _wait_for(out: Any) -> Any:
    return await out
