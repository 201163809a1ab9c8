"""Records of a model's parallel layout and of a tensor's storage outside of its own memory.

Layouts, weight streaming and offloading register here what other packages ask for, so that nothing
is set on modules and tensors from outside: `laid_out` is a model's record, `side_of` a tensor's.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from bmforge.surgery import find_modules, find_repeated_blocks

__all__ = [
    "Cuts",
    "Keeper",
    "LaidOut",
    "Side",
    "Span",
    "Stack",
    "Unit",
    "as_stack_",
    "fill_slot_",
    "find_units",
    "laid_out",
    "note_",
    "record_of",
    "side_of",
    "swap_",
    "units_of",
]


class Span(NamedTuple):
    """The blocks of a stack that run on this pipeline stage: `first` to before `last`, of `total`.

    Earlier stages compute the input of the first, later stages continue after the last.
    """

    first: int
    last: int
    total: int


class _Slots:
    """Layout attributes of a container of blocks.

    Attributes:
        span: blocks that run; None is all of them.
        token_cut: shards the tokens over ranks; None is unsharded.
    """

    span: Span | None = None
    token_cut: Any = None


class Stack(_Slots, nn.ModuleDict):
    """Container of blocks that run in order, with keys "0", "1", ..."""


def as_stack_(container: nn.Module) -> Any:
    """Add the layout attributes to a container of blocks if it is no `Stack`; return it."""
    kind = type(container)
    if not isinstance(container, _Slots):
        container.__class__ = type(kind.__name__, (_Slots, kind), {})
    return container


def fill_slot_(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute that the module's class declares for layouts."""
    assert hasattr(module, name), f"{type(module).__name__} has no attribute {name!r}"
    setattr(module, name, value)


@dataclass(frozen=True)
class Unit:
    """A module that is sharded or recomputed as a whole.

    Args:
        name: name of the module in the model.
        module: the module.
        is_gathered: its parameters are all-gathered together if sharded.
        is_block: it is a transformer block: recomputed, compiled, streamed, and its activations
            offloaded.
        stage: index of its pipeline stage; None without a pipeline.
    """

    name: str
    module: nn.Module
    is_gathered: bool
    is_block: bool
    stage: int | None = None


class Cuts(Protocol):
    """Globs of a model's units; `models.LayoutRules` implements it."""

    @property
    def zero_units(self) -> tuple[str, ...]:
        """Modules whose parameters are all-gathered together."""

    @property
    def recompute_units(self) -> tuple[str, ...]:
        """Modules whose activations can be recomputed."""


def find_units(model: nn.Module, rules: Cuts | None) -> tuple[Unit, ...]:
    """Return a model's units in module order, from rules or else its repeated blocks.

    Raises:
        ConfigError: a rule matches nothing.
    """
    if rules is None:
        blocks = find_repeated_blocks(model)
        return tuple(Unit(name, module, True, True) for name, module in blocks.items())
    gathered = find_modules(model, globs=rules.zero_units)
    blocks = find_modules(model, globs=rules.recompute_units)
    return tuple(
        Unit(name, module, name in gathered, name in blocks)
        for name, module in model.named_modules()
        if name in gathered or name in blocks
    )


def units_of(model: nn.Module) -> tuple[Unit, ...]:
    """Return the units of a parallelized model, or those it would have."""
    record = laid_out(model)
    if record is not None and record.units is not None:
        return record.units
    own: Any = getattr(model, "layout_rules", None)
    return find_units(model, own() if callable(own) else None)


@dataclass
class LaidOut:
    """Record of what `parallelize` and other functions did with a model.

    Args:
        mesh: device mesh with all axes.
        layout: the parallel layout.
        precision: dtype of the computation in blocks.
        master_weights: trained parameters are stored in fp32.
        prefetch: number of units whose parameters are gathered ahead.
        pipeline: runner of the pipeline stages, if there are several.
        whole: with a pipeline, the whole model on the meta device.
        streamers: weight streamers, one per device.
        units: units in module order; with a pipeline those of this stage.
    """

    mesh: DeviceMesh | None = None
    layout: Any = None
    precision: str | None = None
    master_weights: bool = True
    prefetch: int = 1
    pipeline: Any = None
    whole: Any = None
    streamers: tuple[Any, ...] = ()
    units: tuple[Unit, ...] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> LaidOut:
        """Copy the units and share the rest: a copied model runs in the same process groups."""
        copied = copy.copy(self)
        copied.units = copy.deepcopy(self.units, memo)
        return copied


_RECORD = "_laid_out"


def laid_out(model: nn.Module) -> LaidOut | None:
    """Return a model's record; None without one."""
    record: LaidOut | None = model.__dict__.get(_RECORD)
    return record


def record_of(model: nn.Module) -> LaidOut:
    """Return a model's record, creating it if needed."""
    record: LaidOut = model.__dict__.setdefault(_RECORD, LaidOut())
    return record


class Keeper(Protocol):
    """Storage of a tensor's local values outside of the tensor's memory.

    Attributes:
        dtype: dtype of the stored values.
        is_on_disk: reading needs the disk, so it is deferred until the values are needed.
    """

    dtype: torch.dtype
    is_on_disk: bool

    def fill(self, target: Tensor) -> None:
        """Copy all values into a contiguous CPU tensor."""

    def put(self, start: int, values: Tensor) -> None:
        """Store `values` from element `start` on."""


@dataclass(frozen=True)
class Side:
    """Record of one tensor.

    It must not reference the tensor, which would keep both alive forever.

    Args:
        master: storage of the trained values, possibly in a wider dtype than the tensor's.
        origin: storage from which the values are streamed when the block runs; the tensor's own
            memory is then meaningless.
        left_gradient: queue that takes the gradient as soon as it is computed.
    """

    master: Keeper | None = None
    origin: Keeper | None = None
    left_gradient: Any = None


_NOTHING = Side()
_SIDES = WeakIdKeyDictionary()


def side_of(tensor: Tensor) -> Side:
    """Return a tensor's record; fast if no tensor has one."""
    return _SIDES.get(tensor, _NOTHING) if len(_SIDES) else _NOTHING


def note_(tensor: Tensor, **facts: Any) -> None:
    """Update fields of a tensor's `Side` record."""
    side = replace(side_of(tensor), **facts)
    if side == _NOTHING:
        _SIDES.pop(tensor, None)
    else:
        _SIDES[tensor] = side


def swap_(old: Tensor, new: Tensor) -> None:
    """Give `old` the memory and dtype of `new`; it stays the same object and keeps its record."""
    side = _SIDES.pop(old, None)
    torch.utils.swap_tensors(old, new)
    old.__dict__.update(new.__dict__)  # swap_tensors swapped the attributes too
    if side is not None:
        _SIDES[old] = side
