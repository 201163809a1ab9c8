"""Several deltas on one model: listing, switching, weighing, choosing by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.errors import ConfigError, ShapeError, suggest
from bmforge.nn.part import BesidePart
from bmforge.tune.delta.delta import Delta
from bmforge.tune.delta.held import Held, deltas_of, is_in_mixture

__all__ = ["delta_rows", "find_delta", "list_deltas", "use_deltas"]


def list_deltas(model: nn.Module) -> dict[str, Delta]:
    """Return the deltas of a model by name, in the order in which they came."""
    return dict(deltas_of(model))


def find_delta(model: nn.Module, name: str) -> Delta:
    """Return a delta by its name.

    Raises:
        ConfigError: the model has none of that name.
    """
    known = deltas_of(model)
    if name not in known:
        there = f" It has {', '.join(map(repr, known))}." if known else " It has none."
        raise ConfigError(f"the model has no delta {name!r}.{suggest(name, known)}{there}")
    return known[name]


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
    for name, factor in factors.items():
        if deltas_of(model)[name].kind in ("prefix", "prompt") and factor not in (0, 1):
            find_delta(model, name).weigh_(factor)  # says why not
    for name, delta in deltas_of(model).items():
        delta.weigh_(factors.get(name, 0.0))


@contextmanager
def delta_rows(model: nn.Module, rows: Sequence[str | None]) -> Iterator[None]:
    """Inside it every row of a batch has the delta that it names, or none.

    Several users' deltas can be trained so in one batch, each with its own rows' loss: backward may
    run inside or outside of it, but where blocks are recomputed in backward, inside.

    Args:
        model: with deltas, all attached.
        rows: name of a delta, or None, for every row.

    Raises:
        ConfigError: a name that the model does not know, or a delta that all rows must share.
    """
    for name in dict.fromkeys(name for name in rows if name is not None):
        delta = find_delta(model, name)
        if not all(_has_rows(model, held) for held in delta.held):
            raise ConfigError(
                f"delta {name!r}, a {type(delta).__name__}, is for all rows of a batch: what it "
                "changes has no rows of its own. Use use_deltas."
            )
    found = deltas_of(model)
    before = {name: delta.weight for name, delta in found.items()}
    device = next(model.parameters()).device
    try:
        for name, delta in found.items():
            mine = [number for number, one in enumerate(rows) if one == name]
            delta.weigh_((before[name] or 1.0) if mine else 0.0)
            index = None if len(mine) == len(rows) else torch.tensor(mine, device=device)
            for held in delta.held:
                if isinstance(held.part, BesidePart):
                    held.part.rows = index
        handle = model.register_forward_pre_hook(_check_rows(len(rows)), with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
    finally:
        for name, delta in found.items():
            delta.weigh_(before[name])
            for held in delta.held:
                if isinstance(held.part, BesidePart):
                    held.part.rows = None


def _has_rows(model: nn.Module, held: Held) -> bool:
    """Tell whether what a part sees has the batch's rows first."""
    if not isinstance(held.part, BesidePart) or is_in_mixture(model, held.owner):
        return False
    return not getattr(model.get_submodule(held.owner), "asks_parts", False)


def _check_rows(count: int) -> Any:
    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = args[0] if args else kwargs.get("input_ids")
        if isinstance(ids, Tensor) and ids.shape[0] != count:
            raise ShapeError(f"the batch has {ids.shape[0]} rows, delta_rows names {count}.")

    return check
