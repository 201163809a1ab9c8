"""Calls reward functions with the arguments that TRL passes to them.

In addition to prompts, completions and dataset columns, a function may accept ``trainer_state``
(``global_step`` and ``max_steps``), ``log_extra(column, values)``, which adds a column to
``completions.jsonl``, and ``log_metric(name, value)``, which adds a metric to the run.
"""

from __future__ import annotations

import asyncio
import inspect
import statistics
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

__all__ = [
    "LOG_ARGUMENTS",
    "STATE_ARGUMENT",
    "InvalidReturnError",
    "RewardReply",
    "call_reward",
    "describe_error",
    "find_required_columns",
]

STATE_ARGUMENT = "trainer_state"
LOG_ARGUMENTS = ("log_extra", "log_metric")
# Arguments that every call passes, in addition to the columns.
_ALWAYS = ("prompts", "completions", "completion_ids", STATE_ARGUMENT, *LOG_ARGUMENTS)
# Directories whose code is not the user's.
_LIBRARIES = (
    str(Path(__file__).resolve().parents[1]),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)


class InvalidReturnError(TypeError):
    """Raised if a reward function returns something else than a list."""


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
        InvalidReturnError: the function does not return a list.
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
    try:
        rewards = iter(out)
    except TypeError:
        kind = "None" if out is None else type(out).__name__
        raise InvalidReturnError(
            f"the function returned {kind} (expected a list of {count} numbers)"
        ) from None
    for column, cells in columns.items():
        if len(cells) != count:
            raise ValueError(
                f"log_extra({column!r}, ...) was called with {len(cells)} values for {count} "
                "answers. Pass one value per answer."
            )
    means = {name: statistics.fmean(each) for name, each in values.items()}
    return RewardReply(list(rewards), columns, means)


def find_required_columns(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the arguments of a reward function that only a column of the dataset can supply."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # functions of C extensions may have no signature
        return ()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(
        parameter.name
        for parameter in parameters
        if parameter.kind in kinds
        and parameter.default is parameter.empty
        and parameter.name not in _ALWAYS
    )


def describe_error(error: BaseException) -> str:
    """Describe an exception of a reward function, with the file and line of the user's code."""
    if isinstance(error, InvalidReturnError):
        return str(error)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*_LIBRARIES, "<"))
    ]
    location = f" in {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
    return f"the function raised {error!r:.500}{location}"


async def _wait_for(out: Any) -> Any:
    return await out
