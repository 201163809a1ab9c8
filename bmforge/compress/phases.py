"""In which order a model is made small: what changes shapes by itself, what keeps them together."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bmforge.compress.config import CompressConfig
from bmforge.errors import ConfigError

__all__ = ["PHASES", "Phase", "PhaseSteps", "split_phases"]

# Phase -> the parts of a config that it carries out; distillation goes along in each.
PHASES = {
    "structure": ("structure",),
    "experts": ("moefy",),
    "weights": ("prune", "quantize"),
}


@dataclass(frozen=True)
class PhaseSteps:
    """Steps of training in each phase; without any it is done after training only.

    Args:
        structure: while shapes shrink.
        experts: after MLPs have become experts.
        weights: with zeros and with what will be integers, or of distillation alone.
    """

    structure: int = 0
    experts: int = 0
    weights: int = 0

    def __post_init__(self) -> None:
        """Check that none is negative."""
        for name in PHASES:
            if getattr(self, name) < 0:
                raise ConfigError(f"steps.{name}={getattr(self, name)} must be at least 0.")


@dataclass(frozen=True)
class Phase:
    """One phase.

    Args:
        name: in `PHASES`.
        config: what is done in it.
        steps: of training.
    """

    name: str
    config: CompressConfig
    steps: int


def split_phases(config: CompressConfig, steps: PhaseSteps) -> tuple[Phase, ...]:
    """Return the phases of a config, in the one order.

    Raises:
        ConfigError: steps of a phase that does nothing; nothing to do; or a teacher without steps.
    """
    everything = [part for parts in PHASES.values() for part in parts]
    found = []
    for name, parts in PHASES.items():
        count = getattr(steps, name)
        is_wanted = any(getattr(config, part) is not None for part in parts)
        # A teacher alone teaches where nothing else happens.
        is_last = name == "weights" and config.distill is not None and count > 0
        if not is_wanted and not is_last:
            if count:
                raise ConfigError(
                    f"steps.{name}={count} has no effect: the recipe says nothing of "
                    f"{' or '.join(parts)}."
                )
            continue
        left_out = dict.fromkeys(part for part in everything if part not in parts)
        teacher = config.distill if count else None
        found.append(Phase(name, replace(config, distill=teacher, **left_out), count))
    if not found:
        raise ConfigError(
            "the recipe asks for nothing: give at least one of structure, moefy, prune, quantize, "
            "or distill with steps.weights."
        )
    if config.distill is not None and not any(phase.steps for phase in found):
        raise ConfigError(
            "distill has no effect without steps: give some of steps.structure, steps.experts and "
            "steps.weights."
        )
    return tuple(found)
