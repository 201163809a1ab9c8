"""Configuration of sparsity: method, pattern and schedule."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from bmforge.errors import ConfigError, suggest

__all__ = ["PruneConfig"]

_CHOICES = {
    "method": ("magnitude", "wanda", "sparsegpt", "movement"),
    "pattern": ("free", "2:4", "2:4-both", "2:4-both-greedy"),
    "scope": ("layer", "row", "global"),
}


@dataclass(frozen=True)
class PruneConfig:
    """Settings of unstructured and 2:4 sparsity; the zeros of a weight serve as its mask.

    Args:
        method: weights to prune: "magnitude": smallest weights; "wanda": smallest weight times
            input norm; "sparsegpt": smallest loss increase, with error compensation; "movement":
            weights that training moves towards zero.
        sparsity: fraction of zeros in the matrices selected by `where`.
        pattern: "free" (unstructured); "2:4": two of every four weights along the input;
            "2:4-both": along input and output, the best of the 90 masks of 4 x 4;
            "2:4-both-greedy": the same, selected greedily.
        scope: weights that are ranked together: each matrix ("layer"), each "row", or all
            ("global").
        where: name globs of modules; if empty, the blocks' linear layers and experts.
        begin_step: number of training steps before the first pruning.
        steps: number of training steps over which the sparsity grows to its target by a cubic
            schedule; 0 to prune immediately.
        every_steps: number of training steps between pruning updates.
        damp: fraction of the Hessian's mean diagonal that is added to the diagonal (sparsegpt
            only).
        block_columns: number of columns whose zeros are selected together (sparsegpt only).
    """

    method: Literal["magnitude", "wanda", "sparsegpt", "movement"] = "magnitude"
    sparsity: float = 0.5
    pattern: Literal["free", "2:4", "2:4-both", "2:4-both-greedy"] = "free"
    scope: Literal["layer", "row", "global"] = "layer"
    where: tuple[str, ...] = ()
    begin_step: int = 0
    steps: int = 0
    every_steps: int = 10
    damp: float = 0.01
    block_columns: int = 128

    def __post_init__(self) -> None:
        """Raise a `ConfigError` that lists contradictory settings and settings without effect."""
        object.__setattr__(self, "where", _as_tuple(self.where))
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"unknown value: prune.{name}={getattr(self, name)!r} (supported: "
                    f"{', '.join(choices)}).{suggest(str(getattr(self, name)), choices)}"
                )
        problems = [*self._range_problems(), *self._method_problems()]
        if problems:
            raise ConfigError(f"prune: {'; '.join(problems)}.")

    def _range_problems(self) -> list[str]:
        problems = []
        if not 0 < self.sparsity < 1:
            problems.append(f"sparsity={self.sparsity} must be above 0 and below 1")
        for name, least in (
            ("begin_step", 0),
            ("steps", 0),
            ("every_steps", 1),
            ("block_columns", 4),
        ):
            if getattr(self, name) < least:
                problems.append(f"{name}={getattr(self, name)} must be at least {least}")
        if not self.damp > 0:
            problems.append(f"damp={self.damp} must be above 0")
        if self.block_columns % 4:
            problems.append(f"block_columns={self.block_columns} must be a multiple of 4")
        if self.pattern != "free":
            if self.sparsity != 0.5:
                problems.append(
                    f"sparsity={self.sparsity} has no effect with pattern={self.pattern!r}, "
                    "which zeroes half of the weights; leave sparsity out"
                )
            problems += self._without_effect("scope", f"with pattern={self.pattern!r}")
        return problems

    def _method_problems(self) -> list[str]:
        problems = []
        if self.is_calibrated and (self.steps or self.begin_step):
            problems.append(
                f"method={self.method!r} uses calibration data once: steps={self.steps} and "
                f"begin_step={self.begin_step} must be 0"
            )
        if self.method == "movement" and not self.steps:
            problems.append('method="movement" needs training steps: set `steps`')
        if self.pattern != "free" and self.steps:
            problems.append(f"pattern={self.pattern!r} is applied at once: leave `steps` out")
        if self.is_calibrated and self.scope == "global":
            problems.append(
                f"scope='global' is not supported: the scores of {self.method} are comparable "
                "within one matrix only"
            )
        if self.method == "sparsegpt":
            problems += self._without_effect("scope", "with sparsegpt")
            if self.pattern not in ("free", "2:4"):
                problems.append(f"pattern={self.pattern!r} is not supported by sparsegpt")
        else:
            for name in ("damp", "block_columns"):
                problems += self._without_effect(name, f"with method={self.method!r}")
        if not self.steps:
            problems += self._without_effect("every_steps", "without steps")
        return problems

    def _without_effect(self, name: str, when: str) -> list[str]:
        usual = next(field.default for field in fields(self) if field.name == name)
        value = getattr(self, name)
        return [] if value == usual else [f"{name}={value!r} has no effect {when}"]

    @property
    def is_calibrated(self) -> bool:
        """True if the method needs calibration batches."""
        return self.method in ("wanda", "sparsegpt")


def _as_tuple(where: Any) -> tuple[str, ...]:
    return (where,) if isinstance(where, str) else tuple(where)
