"""Which deltas work for one call and which for the next, while the model stays as it was told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from torch import nn

from bmforge.errors import ConfigError
from bmforge.tune.delta.held import deltas_of, find_delta
from bmforge.tune.delta.rows import end_choice_

__all__ = ["DeltaChoice", "DeltaNames", "check_names", "choosing_deltas", "tell_choice"]

DeltaChoice: TypeAlias = str | Sequence[str] | None
"""The same as people give it: one name, several, () for the base alone, or None."""

DeltaNames: TypeAlias = tuple[str, ...] | None
"""Names of deltas that work, and no others; None is what `use_deltas` says."""


def check_names(model: nn.Module, given: DeltaChoice) -> DeltaNames:
    """Return the names of deltas of a model, in the order in which these came to it.

    Args:
        model: with deltas, or none.
        given: what to choose.

    Raises:
        ConfigError: a name that the model does not know, or of a delta that cannot be switched on.
    """
    if given is None:
        return None
    names = (given,) if isinstance(given, str) else tuple(given)
    for name in names:
        delta = find_delta(model, name)
        if delta.merged or not delta.is_attached():
            state = "merged" if delta.merged else "detached"
            raise ConfigError(f"delta {name!r} is {state}, so it is not one to choose.")
    return tuple(name for name in deltas_of(model) if name in names)


def tell_choice(model: nn.Module, names: DeltaNames) -> str:
    """Return a text that is the same for choices that are the same, "" for the base alone."""
    shares = {name: _share(model, name, names) for name in deltas_of(model)}
    working = {name: share for name, share in shares.items() if share}
    return repr(working) if working else ""


@contextmanager
def choosing_deltas(
    model: nn.Module, names: DeltaNames = None
) -> Iterator[Callable[[DeltaNames], None]]:
    """Have a function that lets deltas work, by names, for all rows of the calls that follow.

    At the end those work again that `use_deltas` named; what is chosen has the weight that it gave,
    or 1. Between two calls only what differs is switched.

    Args:
        model: with deltas, or none.
        names: those that work at first.
    """
    deltas = deltas_of(model)
    now = {name: _share(model, name, None) for name in deltas}

    def choose(names: DeltaNames) -> None:
        if names is not None:
            end_choice_(model)
        for name, delta in deltas.items():
            share = _share(model, name, names)
            if now[name] != share:
                now[name] = share
                for held in delta.held:
                    held.part.share = share

    try:
        choose(names)
        yield choose
    finally:
        choose(None)


def _share(model: nn.Module, name: str, names: DeltaNames) -> float:
    weight = float(deltas_of(model)[name].weight)
    return weight if names is None else (weight or 1.0) if name in names else 0.0
