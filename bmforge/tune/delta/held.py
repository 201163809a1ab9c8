"""Where the parts of deltas stand, and what a model notes of its deltas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor

from bmforge.errors import ConfigError
from bmforge.nn.attention import Attention
from bmforge.nn.mlp import MLP
from bmforge.nn.moe import MoE
from bmforge.records import laid_out
from bmforge.surgery import persistent_tensors

if TYPE_CHECKING:
    from bmforge.tune.delta.delta import Delta

__all__ = ["Held", "deltas_of", "is_laid_out", "part_around", "refuse_laid_out"]

_DELTAS = "_deltas"


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


def deltas_of(model: nn.Module) -> dict[str, Delta]:
    """Return the deltas of a model by name, detached ones included: its own record."""
    found: dict[str, Delta] = model.__dict__.setdefault(_DELTAS, {})
    return found


def refuse_laid_out(model: nn.Module, what: str) -> None:
    """Raise `ConfigError` where a model is laid out over processes, or streams."""
    record = laid_out(model)
    if is_laid_out(model) or (record is not None and record.streamer is not None):
        raise ConfigError(
            f"{type(model).__name__} is laid out already: {what} before parallelize (or before its "
            "blocks stream)."
        )


def is_laid_out(model: nn.Module) -> bool:
    """Tell whether tensors of a model are divided over processes, or could be."""
    return any(isinstance(tensor, DTensor) for tensor in persistent_tensors(model).values())


# Last projection of a part of a block -> classes of that part.
_LAST: dict[str, tuple[type[nn.Module], ...]] = {
    "o_proj": (Attention,),
    "down_proj": (MLP,),
    "experts": (MoE,),
}


def part_around(model: nn.Module, name: str) -> str:
    """Return the part of a block whose result is that of its last projection `name`, or `name`."""
    owner, _, last = name.rpartition(".")
    is_last = last in _LAST and isinstance(model.get_submodule(owner), _LAST[last])
    return owner if is_last else name
