"""Splits a compression recipe into phases: structure, experts, then sparsity and quantization."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bmforge.compress.config import CompressConfig
from bmforge.errors import ConfigError

__all__ = ["PHASES", "Phase", "PhaseSteps", "split_phases"]

# Phase -> fields of the config that it applies; distillation is active in every phase.
PHASES = {
    "structure": ("structure",),
    "experts": ("moefy",),
    "weights": ("prune", "quantize"),
}


@dataclass(frozen=True)
class PhaseSteps:
    """Training steps of each phase; a phase with 0 steps compresses the model without training.

    Args:
        structure: training steps of structured pruning (default: 0).
        experts: training steps after MLPs are split into experts (default: 0).
        weights: training steps with sparsity and fake quantization, or with distillation only
            (default: 0).
    """

    structure: int = 0
    experts: int = 0
    weights: int = 0

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a negative number of steps."""
        for name in PHASES:
            if getattr(self, name) < 0:
                raise ConfigError(f"steps.{name}={getattr(self, name)} must be at least 0.")


@dataclass(frozen=True)
class Phase:
    """One phase of a recipe.

    Args:
        name: name in `PHASES`.
        config: compression settings of this phase.
        steps: number of training steps.
    """

    name: str
    config: CompressConfig
    steps: int


def split_phases(config: CompressConfig, steps: PhaseSteps) -> tuple[Phase, ...]:
    """Split a config into its phases, in order.

    Raises:
        ConfigError: a phase has steps but no method, the config is empty, or a teacher is set but
            no phase has steps.
    """
    everything = [part for parts in PHASES.values() for part in parts]
    phases = []
    for name, parts in PHASES.items():
        count = getattr(steps, name)
        is_wanted = any(getattr(config, part) is not None for part in parts)
        # Distillation alone counts as the weights phase.
        is_last = name == "weights" and config.distill is not None and count > 0
        if not is_wanted and not is_last:
            if count:
                raise ConfigError(
                    f"steps.{name}={count} has no effect, because the recipe does not use "
                    f"{' or '.join(parts)}. Leave steps.{name} out."
                )
            continue
        left_out = dict.fromkeys(part for part in everything if part not in parts)
        teacher = config.distill if count else None
        phases.append(Phase(name, replace(config, distill=teacher, **left_out), count))
    if not phases:
        raise ConfigError(
            "the recipe has no compression method. Configure at least one of structure, moefy, "
            "prune, quantize, or distill with steps.weights."
        )
    if config.distill is not None and not any(phase.steps for phase in phases):
        raise ConfigError(
            "distill has no effect without training steps. Set steps.structure, steps.experts "
            "or steps.weights."
        )
    return tuple(phases)
