"""The table of allowed values is what the config classes accept."""

from __future__ import annotations

import math
from typing import Any

import pytest

from bmforge.cli.train_options import FIELDS
from bmforge.errors import ConfigError
from bmforge.recipes import TASKS
from bmforge.recipes.adapters import KINDS
from bmforge.train import OptimConfig, ScheduleConfig, TrainConfig, build_schedule
from bmforge.train.optim.build import _UNUSED
from bmforge.value_ranges import VALUES, Choice, Range, find_problem, list_problems


def test_every_path_is_a_field_of_a_task() -> None:
    assert {path.replace("_", "-") for path in VALUES} <= FIELDS


def test_the_defaults_of_every_task_are_allowed() -> None:
    for task in TASKS.values():
        for form in task.forms:
            assert list_problems(form.config()) == []


def test_every_name_is_supported_by_the_classes() -> None:
    def names(path: str) -> tuple[str, ...]:
        allowed = VALUES[path]
        assert isinstance(allowed, Choice)
        return allowed.names

    assert names("adapter.kind") == tuple(KINDS)
    assert names("train.optim.name") == tuple(_UNUSED)
    for name in names("train.schedule.kind"):
        floor = 0.0 if name == "constant" else 0.1
        build_schedule(ScheduleConfig(kind=name, warmup_steps=1, min_lr_ratio=floor), 4)
    for name in names("train.schedule.decay_kind"):
        build_schedule(ScheduleConfig(kind="wsd", decay_kind=name), 4)


@pytest.mark.parametrize(
    ("allowed", "inside", "outside", "words"),
    [
        (Range(least=1), (1, math.inf), (0, -math.inf, math.nan), "at least 1"),
        (Range(above=0, or_none=True), (1e-9, None), (0, math.nan), "above 0, or None"),
        (Range(least=0, is_finite=True), (0, 5), (-1, math.inf), "at least 0, and finite"),
        (Range(is_finite=True), (-1,), (math.inf, math.nan), "finite"),
        (Range(least=0, most=1), (0, 1), (-1, 2), "from 0 to 1"),
        (Range(above=0, below=1), (0.5, "auto"), (0, 1), "above 0 and below 1"),
    ],
)
def test_ranges(
    allowed: Range, inside: tuple[Any, ...], outside: tuple[float, ...], words: str
) -> None:
    assert [allowed.find_problem("x", value) for value in inside] == [None] * len(inside)
    for value in outside:
        assert allowed.find_problem("x", value) == f"x={value} must be {words}."


def test_a_config_and_the_command_line_give_the_same_sentence() -> None:
    problem = find_problem("train.optim.lr", -1e-4)
    assert problem == "train.optim.lr=-0.0001 must be at least 0, and finite."
    with pytest.raises(ConfigError) as caught:
        TrainConfig(optim=OptimConfig(lr=-1e-4))
    assert str(caught.value) == problem
