"""What is known of a model and of its tensors besides themselves: one record each.

A layout, a streamer, an offload note here what others will ask for, so that no one hangs
attributes on modules and tensors: `laid_out` is a model's record, `side_of` a tensor's.
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
    """Which blocks of a stack run in a call: from `first` to before `last`, of `total`.

    A pipeline's stage runs some of them; what comes before arrives, what comes after is carried on.
    """

    first: int
    last: int
    total: int


class _Slots:
    """What a layout may say of a container of blocks.

    Attributes:
        span: which blocks run; None: all that are there.
        token_cut: gives each process its share of the tokens; None: all have all.
    """

    span: Span | None = None
    token_cut: Any = None


class Stack(_Slots, nn.ModuleDict):
    """Blocks that run one after the other, keyed "0", "1", ..."""


def as_stack_(container: nn.Module) -> Any:
    """Return a container of blocks; one of another class than `Stack` gets its slots as well."""
    kind = type(container)
    if not isinstance(container, _Slots):
        container.__class__ = type(kind.__name__, (_Slots, kind), {})
    return container


def fill_slot_(module: nn.Module, name: str, value: Any) -> None:
    """Set what a module's class has left open for a layout; it must declare it."""
    assert hasattr(module, name), f"{type(module).__name__} has no slot {name!r}"
    setattr(module, name, value)


@dataclass(frozen=True)
class Unit:
    """A part of a model that is used as a whole.

    Args:
        name: of the module in the model.
        module: it.
        is_gathered: its parameters are gathered together, where they are sharded.
        is_block: it is one of the blocks: recomputed, compiled, streamed, its activations sent
            away.
        stage: of a pipeline on which it is; None without one.
    """

    name: str
    module: nn.Module
    is_gathered: bool
    is_block: bool
    stage: int | None = None


class Cuts(Protocol):
    """Where a model's units are; `models.LayoutRules` is one."""

    @property
    def zero_units(self) -> tuple[str, ...]:
        """Modules whose parameters are gathered together."""

    @property
    def recompute_units(self) -> tuple[str, ...]:
        """Modules whose activations may be recomputed."""


def find_units(model: nn.Module, rules: Cuts | None) -> tuple[Unit, ...]:
    """Return a model's units in the order of its tree: by rules, or else its repeated blocks.

    Raises:
        ConfigError: a rule matches nothing.
    """
    if rules is None:
        found = find_repeated_blocks(model)
        return tuple(Unit(name, module, True, True) for name, module in found.items())
    gathered = find_modules(model, globs=rules.zero_units)
    blocks = find_modules(model, globs=rules.recompute_units)
    return tuple(
        Unit(name, module, name in gathered, name in blocks)
        for name, module in model.named_modules()
        if name in gathered or name in blocks
    )


def units_of(model: nn.Module) -> tuple[Unit, ...]:
    """Return the units of a model that is laid out, or those by which it would be."""
    record = laid_out(model)
    if record is not None and record.units is not None:
        return record.units
    own: Any = getattr(model, "layout_rules", None)
    return find_units(model, own() if callable(own) else None)


@dataclass
class LaidOut:
    """What `parallelize` and others have done with a model.

    Args:
        mesh: of all axes.
        layout: that it was laid out as.
        precision: in which blocks compute.
        master_weights: trained parameters are fp32, whatever they were before.
        prefetch: how many units ahead parameters are gathered.
        pipeline: what runs the stages, where a pipeline cuts the model, and
        whole: the whole model on meta, as it was before.
        streamers: what brings weights that live elsewhere, one for every device.
        units: what is used as a whole, in the order of the model; of a pipeline those here.
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
        """Share what stands for processes; a copied model runs on the same ones."""
        made = copy.copy(self)
        made.units = copy.deepcopy(self.units, memo)
        return made


_RECORD = "_laid_out"


def laid_out(model: nn.Module) -> LaidOut | None:
    """Return a model's record; None where nobody has noted anything."""
    record: LaidOut | None = model.__dict__.get(_RECORD)
    return record


def record_of(model: nn.Module) -> LaidOut:
    """Return a model's record, a new one where there is none, to note something in."""
    record: LaidOut = model.__dict__.setdefault(_RECORD, LaidOut())
    return record


class Keeper(Protocol):
    """What keeps the values of a tensor's part on this process outside of the tensor's memory.

    Attributes:
        dtype: of what is kept.
        is_on_disk: reading takes a disk, so it is put off until the values are needed.
    """

    dtype: torch.dtype
    is_on_disk: bool

    def fill(self, target: Tensor) -> None:
        """Copy all of it into a contiguous host tensor."""

    def put(self, start: int, values: Tensor) -> None:
        """Keep `values` from element `start` on."""


@dataclass(frozen=True)
class Side:
    """What is known of one tensor.

    Nothing in it may hold the tensor, which would keep both for ever.

    Args:
        master: keeps its values, maybe wider ones than the tensor's, where they are trained.
        origin: where its values come from whenever its block runs; its own memory says nothing.
        left_gradient: its gradient, where that leaves as it is produced.
    """

    master: Keeper | None = None
    origin: Keeper | None = None
    left_gradient: Any = None


_NOTHING = Side()
_SIDES = WeakIdKeyDictionary()


def side_of(tensor: Tensor) -> Side:
    """Return what is known of a tensor; quick where nothing is known of any."""
    return _SIDES.get(tensor, _NOTHING) if len(_SIDES) else _NOTHING


def note_(tensor: Tensor, **facts: Any) -> None:
    """Change what is known of a tensor: fields of its `Side`."""
    side = replace(side_of(tensor), **facts)
    if side == _NOTHING:
        _SIDES.pop(tensor, None)
    else:
        _SIDES[tensor] = side


def swap_(old: Tensor, new: Tensor) -> None:
    """Give `old` the memory and the dtype of `new`; it stays the same object, with its side."""
    side = _SIDES.pop(old, None)
    torch.utils.swap_tensors(old, new)
    old.__dict__.update(new.__dict__)  # what others have noted on it went along
    if side is not None:
        _SIDES[old] = side
