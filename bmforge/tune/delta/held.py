"""Where the parts of deltas stand, and what a model notes of its deltas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol, Self

from torch import nn
from torch.distributed.tensor import DTensor

from bmforge.errors import ConfigError, suggest
from bmforge.nn.attention import Attention
from bmforge.nn.mlp import MLP
from bmforge.nn.moe import MoE
from bmforge.records import laid_out
from bmforge.surgery import persistent_tensors

__all__ = [
    "AdapterLike",
    "base_weights_of",
    "is_in_mixture",
    "Held",
    "delta_tensors",
    "deltas_of",
    "find_delta",
    "is_laid_out",
    "part_around",
    "refuse_laid_out",
    "whole_model",
]

_DELTAS, _BASE_WEIGHTS = "_deltas", "_base_weights"


class Held(NamedTuple):
    """Where a part of a delta stands, or stood.

    Args:
        owner: name of the module that has it.
        slot: what it is called there.
        part: it.
    """

    owner: str
    slot: str
    part: Any


class AdapterLike(Protocol):
    """What a model's record knows of an adapter; `base.AttachedDelta` is one."""

    kind: Any
    name: str
    weight: float
    merged: bool
    held: tuple[Held, ...]
    options: Mapping[str, Any]

    def is_attached(self) -> bool:
        """Return True if its modules are attached."""
        ...

    def names(self) -> list[str]:
        """Return the names of its tensors in the model."""
        ...

    def wholes(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the base that it trains whole."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield its parameters."""
        ...

    def check_weight(self, weight: float) -> None:
        """Raise `ConfigError` for a weight that it cannot have."""
        ...

    def weigh_(self, weight: float) -> Self:
        """Set the factor on its output."""
        ...


def deltas_of(model: nn.Module) -> dict[str, Any]:
    """Return the deltas of a model by name, detached ones included: its own record."""
    found: dict[str, Any] = model.__dict__.setdefault(_DELTAS, {})
    return found


def base_weights_of(model: nn.Module) -> dict[str, Any]:
    """Return the base's value of every parameter that holds merged adapters, by name."""
    weights: dict[str, Any] = model.__dict__.setdefault(_BASE_WEIGHTS, {})
    return weights


def delta_tensors(model: nn.Module) -> set[str]:
    """Return the names of all tensors that a model's deltas brought, or train whole."""
    deltas = deltas_of(model).values()
    return {name for delta in deltas for name in (*delta.names(), *delta.wholes())}


def find_delta(model: nn.Module, name: str) -> Any:
    """Return a delta by its name.

    Raises:
        ConfigError: the model has none of that name.
    """
    known = deltas_of(model)
    if name not in known:
        there = f" It has {', '.join(map(repr, known))}." if known else " It has none."
        raise ConfigError(f"the model has no delta {name!r}.{suggest(name, known)}{there}")
    return known[name]


def refuse_laid_out(model: nn.Module, what: str) -> None:
    """Raise `ConfigError` where a model is laid out over processes, or streams.

    Who shares a model out, and then shares new parts out as well, says so by its `takes_parts`.
    """
    if getattr(model, "takes_parts", False):
        return
    record = laid_out(model)
    if is_laid_out(model) or (record is not None and record.streamers):
        raise ConfigError(
            f"{type(model).__name__} is laid out already: {what} before parallelize (or before its "
            "blocks stream)."
        )


def is_laid_out(model: nn.Module) -> bool:
    """Tell whether a model is laid out over processes, be it one."""
    record = laid_out(model)
    if record is not None and record.layout is not None:
        return True
    return any(isinstance(tensor, DTensor) for tensor in persistent_tensors(model).values())


# Last projection of a part of a block -> classes of that part.
_LAST: dict[str, tuple[type[nn.Module], ...]] = {
    "o_proj": (Attention,),
    "down_proj": (MLP,),
    "experts": (MoE,),
}


def part_around(model: nn.Module, name: str) -> str:
    """Return the part of a block whose result is that of its last projection `name`, or `name`.

    Of an expert for all tokens it is the mixture that it is in.
    """
    owner, _, last = name.rpartition(".")
    if last not in _LAST or not isinstance(model.get_submodule(owner), _LAST[last]):
        return name
    around = owner.rpartition(".")[0]
    return around if isinstance(model.get_submodule(around), MoE) else owner


def is_in_mixture(model: nn.Module, name: str) -> bool:
    """Tell whether a module is inside a mixture of experts, where rows are tokens of any row."""
    parts = name.split(".")
    return any(
        isinstance(model.get_submodule(".".join(parts[:count])), MoE)
        for count in range(1, len(parts))
    )


def whole_model(model: nn.Module) -> nn.Module:
    """Return a description of the whole model where this is a stage of it, or the model."""
    whole = getattr(model, "whole", None)
    return whole() if callable(whole) else model
