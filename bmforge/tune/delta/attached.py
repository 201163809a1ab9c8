"""Registry of a model's adapters and of their modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol, Self

from torch import nn

from bmforge.errors import ConfigError, suggest
from bmforge.nn.attention import Attention
from bmforge.nn.mlp import MLP
from bmforge.nn.moe import MoE
from bmforge.records import find_parallel_record
from bmforge.shards import is_distributed
from bmforge.surgery import persistent_tensors

__all__ = [
    "AdapterLike",
    "base_weights_of",
    "is_in_mixture",
    "AttachedModule",
    "delta_tensors",
    "deltas_of",
    "find_delta",
    "has_deltas",
    "is_parallelized",
    "part_around",
    "refuse_parallelized",
    "whole_model",
]

_DELTAS, _BASE_WEIGHTS = "_deltas", "_base_weights"


class AttachedModule(NamedTuple):
    """One module of an adapter, and the base module to which it is (or was) attached.

    Args:
        owner: name of the base module to which the adapter module is attached.
        slot: attribute name of the adapter module in the base module.
        part: the adapter module.
    """

    owner: str
    slot: str
    part: Any


class AdapterLike(Protocol):
    """Interface of an adapter in a model's registry; `base.AttachedDelta` implements it."""

    kind: Any
    name: str
    weight: float
    merged: bool
    held: tuple[AttachedModule, ...]
    options: Mapping[str, Any]

    def is_attached(self) -> bool:
        """Return True if the adapter's modules are attached."""
        ...

    def names(self) -> list[str]:
        """Return the names of the adapter's tensors in the model."""
        ...

    def fully_trained_parameters(self) -> dict[str, nn.Parameter]:
        """Return the base's parameters that the adapter trains in full."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the adapter's parameters."""
        ...

    def check_weight(self, weight: float) -> None:
        """Raise `ConfigError` for a weight that the adapter does not support."""
        ...

    def weigh_(self, weight: float) -> Self:
        """Set the factor by which the adapter's output is multiplied."""
        ...


def deltas_of(model: nn.Module) -> dict[str, Any]:
    """Return the model's mutable dict from name to adapter, including detached adapters."""
    deltas: dict[str, Any] = model.__dict__.setdefault(_DELTAS, {})
    return deltas


def has_deltas(model: nn.Module) -> bool:
    """Return True if adapters are registered on this model."""
    return bool(model.__dict__.get(_DELTAS))


def base_weights_of(model: nn.Module) -> dict[str, Any]:
    """Return the mutable dict of original values of the base parameters that merging changed."""
    weights: dict[str, Any] = model.__dict__.setdefault(_BASE_WEIGHTS, {})
    return weights


def delta_tensors(model: nn.Module) -> set[str]:
    """Return the names of all tensors that a model's adapters add or train in full."""
    deltas = deltas_of(model).values()
    return {
        name for delta in deltas for name in (*delta.names(), *delta.fully_trained_parameters())
    }


def find_delta(model: nn.Module, name: str) -> Any:
    """Return a model's adapter by its name.

    Raises:
        ConfigError: the model has no adapter with that name.
    """
    deltas = deltas_of(model)
    if name not in deltas:
        listing = (
            f" The model has the adapters {', '.join(map(repr, deltas))}."
            if deltas
            else " The model has no adapters."
        )
        raise ConfigError(f"the model has no adapter {name!r}.{suggest(name, deltas)}{listing}")
    return deltas[name]


def refuse_parallelized(model: nn.Module, what: str) -> None:
    """Raise `ConfigError` if a model is parallelized or streamed.

    The check is skipped for a model with the attribute `takes_parts`, which is set by code that
    parallelizes newly attached modules itself.
    """
    if getattr(model, "takes_parts", False):
        return
    record = find_parallel_record(model)
    if is_parallelized(model) or (record is not None and record.streamers):
        raise ConfigError(
            f"{type(model).__name__} is already parallelized or streamed. {what} before "
            "parallelize() and before streaming."
        )


def is_parallelized(model: nn.Module) -> bool:
    """Return True if a model is parallelized, even over one process."""
    record = find_parallel_record(model)
    if record is not None and record.layout is not None:
        return True
    return any(is_distributed(tensor) for tensor in persistent_tensors(model).values())


# Last projection of an attention or MLP -> classes of that attention or MLP.
_LAST: dict[str, tuple[type[nn.Module], ...]] = {
    "o_proj": (Attention,),
    "down_proj": (MLP,),
    "experts": (MoE,),
}


def part_around(model: nn.Module, name: str) -> str:
    """Return the name of the attention or MLP whose last projection is `name`, or `name` itself.

    For a shared expert of an MoE layer, the result is the MoE layer.
    """
    owner, _, last = name.rpartition(".")
    if last not in _LAST or not isinstance(model.get_submodule(owner), _LAST[last]):
        return name
    around = owner.rpartition(".")[0]
    return around if isinstance(model.get_submodule(around), MoE) else owner


def is_in_mixture(model: nn.Module, name: str) -> bool:
    """Return True if a module is inside an MoE layer, which mixes tokens of all samples."""
    parts = name.split(".")
    return any(
        isinstance(model.get_submodule(".".join(parts[:count])), MoE)
        for count in range(1, len(parts))
    )


def whole_model(model: nn.Module) -> nn.Module:
    """Return the full model on the meta device for a pipeline stage; otherwise `model` itself."""
    find_whole = getattr(model, "whole", None)
    return find_whole() if callable(find_whole) else model
