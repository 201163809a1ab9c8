"""Maps each parameter of a transformers model to the tensors stored in checkpoints.

transformers 5 renames, splits and merges tensors when it loads and saves. Its saving code is run
once on meta tensors, whose views reveal offsets, shapes and strides. Every stored tensor is thus
identified as a rectangular region (box) of one parameter or a concatenation of such regions, so
that slices of it can be read and written.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bmforge.models.weights import OWN_PREFIX, PACKED_KEYS, WeightRule
from bmforge.shards import Box
from bmforge.surgery import persistent_tensors

__all__ = ["BoxRule", "StoredNames", "find_stored_names"]


@dataclass(frozen=True)
class BoxRule(WeightRule):
    """Rule for a stored tensor, or part of one, that is a region (box) of a permuted parameter.

    Args:
        box: one tuple (start, stop, step, True if the stored tensor has this dim) per dim of the
            parameter.
        order: index of each dim of the stored tensor among the parameter's stored dims.
        part: (offset of the region in the stored tensor, size of the stored tensor) along the
            stored dim `part_dim`; None if the region is the whole stored tensor.
    """

    box: tuple[tuple[int, int, int, bool], ...] = ()
    order: tuple[int, ...] = ()

    def _own_shape(self) -> list[int]:
        sizes = [len(range(a, b, s)) for a, b, s, keeps in self.box if keeps]
        return [sizes[dim] for dim in self.order]

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the stored tensor."""
        full_shape = self._own_shape()
        if self.part is not None:
            full_shape[self.part_dim] = self.part[1]
        return tuple(full_shape)

    def source_slices(self, box: Box) -> tuple[slice, ...] | None:
        """Return the stored tensor's slices for a region of the parameter; None if disjoint."""
        spans = []
        for dim in range(len(self.box)):
            first, last = self._overlap(dim, box)
            if first >= last:
                return None
            if self.box[dim][3]:
                spans.append(slice(first, last))
        slices = [spans[dim] for dim in self.order]
        if self.part is not None:
            own = slices[self.part_dim]
            slices[self.part_dim] = slice(own.start + self.part[0], own.stop + self.part[0])
        return tuple(slices)

    def _overlap(self, dim: int, box: Box) -> tuple[int, int]:
        """Return the range of dim `dim` in the stored tensor that a region of the parameter covers.

        The range is (start, stop), and empty (start >= stop) if they are disjoint.
        """
        start, stop, step, _ = self.box[dim]
        low, high = box.offsets[dim], box.offsets[dim] + box.lengths[dim]
        first = max(0, -(-(low - start) // step))
        last = min(len(range(start, stop, step)), -(-(high - start) // step))
        return first, last

    def target(self, local: Tensor, box: Box) -> Tensor:
        """Return a view of the elements of a rank's shard that are read from the stored tensor."""
        index: list[Any] = []
        for dim, (start, _, step, keeps) in enumerate(self.box):
            first, last = self._overlap(dim, box)
            low = start + first * step - box.offsets[dim]
            index.append(slice(low, low + (last - first - 1) * step + 1, step) if keeps else low)
        return local[tuple(index)]

    def source_view(self, target: Tensor) -> Tensor:
        """Return a view of `target` with its dims in the stored tensor's order."""
        return target.permute(self.order)

    @property
    def is_renaming(self) -> bool:
        """Always False: the stored tensor differs from the parameter."""
        return False

    def to_source(self, tensor: Tensor) -> Tensor:
        """Return the stored tensor (or part of one), computed from the full parameter."""
        index = tuple(slice(a, b, s) if keeps else a for a, b, s, keeps in self.box)
        return tensor[index].permute(self.order)

    def stored_numel(self, shape: tuple[int, ...]) -> int:
        """Return the number of elements in the stored tensor that belong to this parameter."""
        return math.prod(self._own_shape())


class _Tracking(TorchFunctionMode):
    """Mode for running a conversion on meta tensors: copies stay views, `torch.cat` is recorded.

    Attributes:
        joined: mapping from the id of a concatenated tensor to (tensor, parts, dim).
    """

    def __init__(self) -> None:
        super().__init__()
        self.joined: dict[int, tuple[Tensor, list[Tensor], int]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Return the input of a copy unchanged, and record the inputs of each `torch.cat`."""
        kwargs = kwargs or {}
        if func in (Tensor.contiguous, Tensor.clone):
            return args[0]
        out = func(*args, **kwargs)
        if func is torch.cat:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
            self.joined[id(out)] = out, list(args[0]), dim
        return out


@dataclass(frozen=True)
class StoredNames:
    """Mapping between a model's parameters and the tensors in its checkpoints.

    Args:
        rules: rules of all stored tensors.
        opaque: names of stored tensors that are not regions of parameters, and therefore can be
            neither read nor written.
    """

    rules: tuple[WeightRule, ...]
    opaque: tuple[str, ...] = ()

    def of(self, names: Iterable[str], changed: Collection[str]) -> list[WeightRule]:
        """Return the `WeightRule`s for tensor names, in the order of `names`.

        Args:
            names: names of the model's tensors.
            changed: names of tensors that the original checkpoint does not contain.

        Raises:
            ConfigError: a tensor is stored in a form that bmforge cannot slice.
        """
        by_name: dict[str, list[WeightRule]] = {}
        for rule in self.rules:
            by_name.setdefault(rule.ours, []).append(rule)
        incomplete = self._incomplete(set(names), changed)
        out: list[WeightRule] = []
        for name in names:
            own = [] if name in changed else by_name.get(name, [])
            if any(rule.theirs in incomplete for rule in own) or not own:
                out.append(WeightRule(name, self._own_name(name, by_name)))
            else:
                out += own
        return out

    def _incomplete(self, names: set[str], changed: Collection[str]) -> set[str]:
        """Return the names of stored tensors that contain a removed or changed parameter."""
        return {r.theirs for r in self.rules if r.ours not in names or r.ours in changed}

    def _own_name(self, name: str, rules: Mapping[str, list[WeightRule]]) -> str:
        owner, _, key = name.rpartition(".")
        own = rules.get(f"{owner}.weight", [])
        if key in PACKED_KEYS and len(own) == 1 and own[0].part is None:
            return own[0].theirs.removesuffix("weight") + key
        return OWN_PREFIX + name


def find_stored_names(module: Any) -> StoredNames:
    """Map the parameters of a transformers model to the tensors that transformers would save.

    Args:
        module: transformers model with its parameters on the meta device.
    """
    loading = importlib.import_module("transformers.core_model_loading")
    tensors = persistent_tensors(module)
    tied = dict(getattr(module, "all_tied_weights_keys", None) or {})
    first = {id(tensor): name for name, tensor in tensors.items()}
    stored: dict[str, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) in first and name not in tied:
            stored.setdefault(name, tensor.detach())
    owners = _owners(module, stored, first)
    with _Tracking() as tracking:
        files = loading.revert_weight_conversion(module, dict(stored))
    rules: list[WeightRule] = []
    opaque: list[str] = []
    for published, tensor in files.items():
        own_rules = _rules_of(published, tensor, owners, tracking)
        if own_rules is None:
            opaque.append(published)
        else:
            rules += own_rules
    return StoredNames(tuple(rules), tuple(opaque))


def _owners(
    module: Any, stored: Mapping[str, Tensor], first: Mapping[int, str]
) -> dict[int, tuple[str, Tensor]]:
    """Return a dict from the id of each parameter's storage to (name, tensor)."""
    state = module.state_dict(keep_vars=True)
    return {
        tensor.untyped_storage()._cdata: (first[id(state[name])], tensor)
        for name, tensor in stored.items()
    }


def _rules_of(
    published: str, tensor: Tensor, owners: Mapping[int, tuple[str, Tensor]], tracking: _Tracking
) -> list[WeightRule] | None:
    """Return the `WeightRule`s of a stored tensor; None if it has values of no parameter."""
    if id(tensor) in tracking.joined:
        _, members, dim = tracking.joined[id(tensor)]
        return _rules_of_parts(published, members, dim % tensor.dim(), owners, tracking)
    owner = owners.get(tensor.untyped_storage()._cdata)
    if owner is None:
        return None
    name, full = owner
    if tensor.shape == full.shape and tensor.stride() == full.stride():
        return [WeightRule(name, published)]
    view = _find_box(tensor, full)
    return None if view is None else [BoxRule(name, published, box=view[0], order=view[1])]


def _rules_of_parts(
    published: str,
    members: Sequence[Tensor],
    dim: int,
    owners: Mapping[int, tuple[str, Tensor]],
    tracking: _Tracking,
) -> list[WeightRule] | None:
    total = sum(member.shape[dim] for member in members)
    out: list[WeightRule] = []
    first = 0
    for member in members:
        member_rules = _rules_of(published, member, owners, tracking)
        if member_rules is None or len(member_rules) > 1:
            return None
        rule = member_rules[0]
        if not isinstance(rule, BoxRule):
            box = tuple((0, size, 1, True) for size in member.shape)
            rule = BoxRule(rule.ours, published, box=box, order=tuple(range(member.dim())))
        out.append(replace(rule, part=(first, total), part_dim=dim))
        first += member.shape[dim]
    return out


def _find_box(
    view: Tensor, owner: Tensor
) -> tuple[tuple[tuple[int, int, int, bool], ...], tuple[int, ...]] | None:
    """Return `BoxRule`'s box and order for a view of contiguous `owner`; None if not a box."""
    offset, starts = view.storage_offset(), []
    for stride in owner.stride():
        starts.append(offset // stride if stride else 0)
        offset -= starts[-1] * stride
    sizes: list[tuple[int, int, int, bool]] = [(s, s + 1, 1, False) for s in starts]
    owner_of: list[int] = []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        dim = _dim_of(size, stride, owner, sizes)
        if dim is None:
            return None
        step = max(1, stride // owner.stride(dim)) if size > 1 else 1
        stop = starts[dim] + (size - 1) * step + 1
        if stop > owner.shape[dim]:
            return None
        sizes[dim] = (starts[dim], stop, step, True)
        owner_of.append(dim)
    owner_dims = sorted(owner_of)
    return tuple(sizes), tuple(owner_dims.index(dim) for dim in owner_of)


def _dim_of(size: int, stride: int, owner: Tensor, sizes: Sequence[tuple[Any, ...]]) -> int | None:
    """Return the dim of the parameter that corresponds to a dim of a view, or None."""
    free = [dim for dim in range(owner.dim()) if not sizes[dim][3]]
    for dim in free:
        own = owner.stride(dim)
        if size > 1 and stride % own == 0 and (size - 1) * (stride // own) < owner.shape[dim]:
            return dim
    if size > 1:
        return None
    exact = [dim for dim in free if owner.shape[dim] == 1 or owner.stride(dim) == stride]
    return next(iter(exact or free), None)


def rename_stored(module: Any, names: Iterable[str]) -> dict[str, str]:
    """Return a dict from a checkpoint's tensor names to transformers' current names.

    Checkpoints of old versions, or of a base model without a head, have other names; transformers'
    own rules rename them. The returned names are those before tensors are split or merged.
    """
    loading = importlib.import_module("transformers.core_model_loading")
    mapping = importlib.import_module("transformers.conversion_mapping")
    conversions = mapping.get_model_conversion_mapping(module)
    renamings = [c for c in conversions if isinstance(c, loading.WeightRenaming)]
    converters = [c for c in conversions if not isinstance(c, loading.WeightRenaming)]
    state = module.state_dict(keep_vars=True)
    prefix = module.base_model_prefix or None
    return {
        name: loading.rename_source_key(name, renamings, converters, prefix, state)[0]
        for name in names
    }


def matches_any(name: str, patterns: Iterable[str] | None) -> bool:
    """Return True if any of transformers' regular expressions matches a name."""
    return any(re.search(pattern, name) for pattern in patterns or ())
