"""Several deltas on one model: listing, switching, weighing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from bmforge.errors import ConfigError
from bmforge.tune.delta.delta import Delta
from bmforge.tune.delta.held import deltas_of, find_delta
from bmforge.tune.delta.rows import end_choice_

__all__ = ["list_deltas", "use_deltas"]


def list_deltas(model: nn.Module) -> dict[str, Delta]:
    """Return the deltas of a model by name, in the order in which they came."""
    return dict(deltas_of(model))


def use_deltas(
    model: nn.Module,
    names: Sequence[str] | str,
    weights: Mapping[str, float] | Sequence[float] | None = None,
) -> None:
    """Switch these deltas on and all others off.

    Args:
        model: with deltas; laid out or not.
        names: of those that are to work; () switches all off.
        weights: factor on what each changes, by name or in the order of `names`; None is 1.

    Raises:
        ConfigError: an unknown name, or a weight that a delta cannot have; nothing is changed then.
    """
    chosen = [names] if isinstance(names, str) else list(names)
    for name in chosen:
        find_delta(model, name)
    if isinstance(weights, Mapping):
        if unknown := [name for name in weights if name not in chosen]:
            raise ConfigError(f"weights has {unknown[0]!r}, which is not among names={chosen}.")
        factors = {name: float(weights.get(name, 1.0)) for name in chosen}
    else:
        given = [1.0] * len(chosen) if weights is None else list(weights)
        if len(given) != len(chosen):
            raise ConfigError(f"{len(given)} weights for {len(chosen)} deltas: one for each.")
        factors = dict(zip(chosen, map(float, given), strict=True))
    end_choice_(model)
    for name, factor in factors.items():
        if deltas_of(model)[name].kind in ("prefix", "prompt") and factor not in (0, 1):
            find_delta(model, name).weigh_(factor)  # says why not
    for name, delta in deltas_of(model).items():
        delta.weigh_(factors.get(name, 0.0))
