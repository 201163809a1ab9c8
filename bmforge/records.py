"""Records of a model's parallel layout, and of where a tensor's values are stored.

Parallel layouts, weight streaming and offloading write these records; other packages read them with
`find_parallel_record` (for a model) and `metadata_of` (for a tensor). Nothing else is set on
modules and tensors from outside.
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
    "UnitRules",
    "TensorStorage",
    "ParallelRecord",
    "TensorMetadata",
    "Span",
    "Stack",
    "Unit",
    "as_stack_",
    "fill_slot_",
    "find_units",
    "find_parallel_record",
    "set_metadata_",
    "parallel_record_of",
    "metadata_of",
    "swap_",
    "units_of",
]


class Span(NamedTuple):
    """Range of block indices on this pipeline stage: `first` to `last` - 1, of `total` blocks.

    Earlier stages compute the input of block `first`; later stages continue with block `last`.
    """

    first: int
    last: int
    total: int


class _Slots:
    """Attributes of a container of blocks that parallel layouts set.

    Attributes:
        span: blocks that run on this stage; if None, all blocks.
        token_cut: object that shards the tokens over ranks; None if they are not sharded.
    """

    span: Span | None = None
    token_cut: Any = None


class Stack(_Slots, nn.ModuleDict):
    """Container of blocks that run in order, with keys "0", "1", ..."""


def as_stack_(container: nn.Module) -> Any:
    """Add the layout attributes to a container of blocks if they are missing; return it."""
    kind = type(container)
    if not isinstance(container, _Slots):
        container.__class__ = type(kind.__name__, (_Slots, kind), {})
    return container


def fill_slot_(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute that a module's class declares for use by parallel layouts."""
    assert hasattr(module, name), f"{type(module).__name__} has no attribute {name!r}"
    setattr(module, name, value)


@dataclass(frozen=True)
class Unit:
    """A module that is sharded or recomputed as a whole.

    Args:
        name: name of the module in the model.
        module: instance in the model.
        is_gathered: whether its parameters, if sharded, are all-gathered together.
        is_block: whether it is a transformer block, which can be recomputed, compiled,
            streamed, or have its activations offloaded.
        stage: index of its pipeline stage; None without a pipeline.
    """

    name: str
    module: nn.Module
    is_gathered: bool
    is_block: bool
    stage: int | None = None


class UnitRules(Protocol):
    """Interface of `models.LayoutRules`: which modules are sharded or recomputed as a unit."""

    @property
    def zero_units(self) -> tuple[str, ...]:
        """Globs of the modules whose parameters are all-gathered together."""

    @property
    def recompute_units(self) -> tuple[str, ...]:
        """Globs of the modules whose activations can be recomputed."""


def find_units(model: nn.Module, rules: UnitRules | None) -> tuple[Unit, ...]:
    """Return a model's units in module order: those of `rules`, or by default its repeated blocks.

    Raises:
        ConfigError: a rule matches no module.
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
    """Return the recorded units of a model; if none are recorded, the result of `find_units`."""
    record = find_parallel_record(model)
    if record is not None and record.units is not None:
        return record.units
    own: Any = getattr(model, "layout_rules", None)
    return find_units(model, own() if callable(own) else None)


@dataclass
class ParallelRecord:
    """Record of how `parallelize` and other functions have changed a model.

    Args:
        mesh: device mesh with all axes.
        layout: the parallel layout.
        precision: dtype of the computation in blocks.
        master_weights: whether trained parameters are stored in fp32.
        prefetch: number of units whose parameters are all-gathered in advance.
        pipeline: runner of the pipeline stages, if there are several.
        whole: the full model on the meta device if there is a pipeline; otherwise None.
        streamers: weight streamers, one per device.
        units: units in module order; with a pipeline only those of this stage.
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

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelRecord:
        """Copy the units and share everything else: a copied model uses the same process groups."""
        copied = copy.copy(self)
        copied.units = copy.deepcopy(self.units, memo)
        return copied


_RECORD = "_parallel_record"


def find_parallel_record(model: nn.Module) -> ParallelRecord | None:
    """Return the record of a model's parallel layout, or None if it was not parallelized."""
    record: ParallelRecord | None = model.__dict__.get(_RECORD)
    return record


def parallel_record_of(model: nn.Module) -> ParallelRecord:
    """Return the record of a model's parallel layout, creating an empty record if needed."""
    record: ParallelRecord = model.__dict__.setdefault(_RECORD, ParallelRecord())
    return record


class TensorStorage(Protocol):
    """Stores a tensor's local values outside of the tensor's own memory.

    Attributes:
        dtype: dtype of the stored values.
        is_on_disk: whether the values are on disk; they are then read only when they are needed.
    """

    dtype: torch.dtype
    is_on_disk: bool

    def fill(self, target: Tensor) -> None:
        """Copy all values into a contiguous CPU tensor."""

    def put(self, start: int, values: Tensor) -> None:
        """Store `values`, beginning at element `start` of the flattened tensor."""


@dataclass(frozen=True)
class TensorMetadata:
    """Record of the storages that hold the values and the gradient of one tensor.

    It must not reference the tensor, because both would then never be freed.

    Args:
        master: storage of the trained values, possibly in a wider dtype than the tensor.
        origin: storage from which the values are streamed when the block runs; the tensor's own
            memory is then not valid.
        offloaded_gradient: queue that receives the gradient as soon as backward has computed it.
    """

    master: TensorStorage | None = None
    origin: TensorStorage | None = None
    offloaded_gradient: Any = None


_NOTHING = TensorMetadata()
_SIDES = WeakIdKeyDictionary()


def metadata_of(tensor: Tensor) -> TensorMetadata:
    """Return the record of where a tensor's values are stored; empty if there is none."""
    return _SIDES.get(tensor, _NOTHING) if len(_SIDES) else _NOTHING


def set_metadata_(tensor: Tensor, **facts: Any) -> None:
    """Record where a tensor's values or gradient are stored, in its `TensorMetadata`."""
    side = replace(metadata_of(tensor), **facts)
    if side == _NOTHING:
        _SIDES.pop(tensor, None)
    else:
        _SIDES[tensor] = side


def swap_(old: Tensor, new: Tensor) -> None:
    """Give `old` the storage and dtype of `new`, in place.

    The tensor object `old` and its `TensorMetadata` are kept. `new` is not usable afterwards.
    """
    side = _SIDES.pop(old, None)
    torch.utils.swap_tensors(old, new)
    old.__dict__.update(new.__dict__)  # swap_tensors swapped the attributes too
    if side is not None:
        _SIDES[old] = side
