"""Maps each parameter of a transformers model to the tensors stored in checkpoints.

transformers 5 renames, splits and merges tensors when it loads and saves. Its saving code is run
once on meta tensors, whose views reveal offsets, shapes and strides. Every stored tensor is thus
identified as a rectangular region (box) of one parameter, or as several regions whose rows follow
each other or alternate, so that slices of it can be read and written.
"""

from __future__ import annotations

import importlib
import itertools
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bmforge.models.transformers.box_rule import BoxRule
from bmforge.models.weights import OWN_PREFIX, PACKED_KEYS, WeightRule
from bmforge.surgery import persistent_tensors

__all__ = ["StoredNames", "find_stored_names"]


class _Tracking(TorchFunctionMode):
    """Mode for running a conversion on meta tensors, which records how copies are made.

    Attributes:
        joined: mapping from the id of a concatenated tensor to (tensor, parts, dim).
        merged: mapping from the id of a copy with merged dims to (copy, original view).
        zeros: mapping from the id of a tensor of zeros, which pads a stored tensor, to the tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.joined: dict[int, tuple[Tensor, list[Tensor], int]] = {}
        self.merged: dict[int, tuple[Tensor, Tensor]] = {}
        self.zeros: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Return the input of a copy unchanged, and record concatenations, reshapes and zeros."""
        kwargs = kwargs or {}
        if func in (Tensor.contiguous, Tensor.clone):
            return args[0]
        out = func(*args, **kwargs)
        if func is torch.cat:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
            self.joined[id(out)] = out, list(args[0]), dim % out.dim()
        elif func is Tensor.reshape and _storage_of(out) != _storage_of(args[0]):
            self.merged[id(out)] = out, args[0]
        elif func is Tensor.new_zeros:
            self.zeros[id(out)] = out
        return out


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


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
            by_name.setdefault(rule.parameter, []).append(rule)
        incomplete = self._incomplete(set(names), changed)
        out: list[WeightRule] = []
        for name in names:
            own = [] if name in changed else by_name.get(name, [])
            if any(rule.source in incomplete for rule in own) or not own:
                out.append(WeightRule(name, self._own_name(name, by_name)))
            else:
                out += own
        return out

    def _incomplete(self, names: set[str], changed: Collection[str]) -> set[str]:
        """Return the names of stored tensors that contain a removed or changed parameter."""
        return {r.source for r in self.rules if r.parameter not in names or r.parameter in changed}

    def _own_name(self, name: str, rules: Mapping[str, list[WeightRule]]) -> str:
        owner, _, key = name.rpartition(".")
        own = rules.get(f"{owner}.weight", [])
        if key in PACKED_KEYS and len(own) == 1 and own[0].part is None:
            return own[0].source.removesuffix("weight") + key
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
    """Return a dict from the id of each tensor's storage to (parameter name, stored tensor)."""
    state = module.state_dict(keep_vars=True)
    return {
        tensor.untyped_storage()._cdata: (first[id(state[name])], tensor)
        for name, tensor in stored.items()
    }


def _rules_of(
    published: str, tensor: Tensor, owners: Mapping[int, tuple[str, Tensor]], tracking: _Tracking
) -> list[WeightRule] | None:
    """Return the `WeightRule`s of a stored tensor; None if some values come from no parameter."""
    if id(tensor) in tracking.joined:
        return _rules_of_parts(published, *tracking.joined[id(tensor)][1:], owners, tracking)
    if id(tensor) in tracking.merged:
        return _rules_of_merged(published, *tracking.merged[id(tensor)], owners, tracking)
    owner = owners.get(_storage_of(tensor))
    if owner is None:
        member = _view_of_member(tensor, tracking)
        return None if member is None else _rules_of(published, member, owners, tracking)
    name, full = owner
    if tensor.shape == full.shape and tensor.stride() == full.stride():
        return [WeightRule(name, published)]
    view = _find_box(tensor, full)
    return None if view is None else [BoxRule(name, published, box=view[0], order=view[1])]


def _view_of_member(tensor: Tensor, tracking: _Tracking) -> Tensor | None:
    """Return a view within one of several concatenated tensors as a view of that tensor itself.

    Return None if `tensor` is no view of a recorded concatenation, or extends over several of the
    concatenated tensors.
    """
    for joined, members, dim in tracking.joined.values():
        view = _find_box(tensor, joined) if _storage_of(joined) == _storage_of(tensor) else None
        if view is None:
            continue
        box, order = view
        first = 0
        for member in members:
            start, stop = box[dim][0] - first, box[dim][1] - first
            if start >= 0 and stop <= member.shape[dim]:
                shifts = [first if index == dim else 0 for index in range(member.dim())]
                own = (
                    slice(a - shift, b - shift, s) if keeps else a - shift
                    for (a, b, s, keeps), shift in zip(box, shifts, strict=True)
                )
                return member[tuple(own)].permute(order)
            first += member.shape[dim]
    return None


def _rules_of_merged(
    published: str,
    out: Tensor,
    view: Tensor,
    owners: Mapping[int, tuple[str, Tensor]],
    tracking: _Tracking,
) -> list[WeightRule] | None:
    """Return the `WeightRule`s of a stored tensor `out`, a reshape of `view` that merges dims.

    An example is merging the dims (head, 2, H / 2) of rotary pairs into rows. There is one rule for
    each index of the merged dims except the largest, which is a strided slice of rows. So the rows
    of different rules are interleaved in `out`.
    """
    dim = next(d for d, size in enumerate(out.shape) if view.shape[d] != size)
    count = view.dim() - out.dim() + 1
    sizes = view.shape[dim : dim + count]
    if (
        count < 2
        or math.prod(sizes) != out.shape[dim]
        or view.shape[dim + count :] != out.shape[dim + 1 :]
    ):
        return None
    largest = max(range(count), key=lambda d: sizes[d])
    strides = [math.prod(sizes[d + 1 :]) for d in range(count)]
    rules: list[WeightRule] = []
    for index in itertools.product(*(range(1 if d == largest else n) for d, n in enumerate(sizes))):
        own = [slice(None) if d == largest else coordinate for d, coordinate in enumerate(index)]
        piece = view[(slice(None),) * dim + tuple(own)]
        single = _rules_of(published, piece, owners, tracking)
        if single is None or len(single) > 1 or single[0].part is not None:
            return None
        first = sum(coordinate * stride for coordinate, stride in zip(index, strides, strict=True))
        part = (first, out.shape[dim])
        rules.append(
            replace(_as_box(single[0], piece.shape), part=part, part_dim=dim, step=strides[largest])
        )
    return rules


def _as_box(rule: WeightRule, shape: Sequence[int]) -> BoxRule:
    """Return the rule of a region, or of a whole parameter of this shape, as a `BoxRule`."""
    if isinstance(rule, BoxRule):
        return rule
    box = tuple((0, size, 1, True) for size in shape)
    return BoxRule(rule.parameter, rule.source, box=box, order=tuple(range(len(shape))))


def _rules_of_parts(
    published: str,
    members: Sequence[Tensor],
    dim: int,
    owners: Mapping[int, tuple[str, Tensor]],
    tracking: _Tracking,
) -> list[WeightRule] | None:
    """Return the `WeightRule`s of a concatenation of `members`; zero padding has no rule."""
    total = sum(member.shape[dim] for member in members)
    out: list[WeightRule] = []
    first = 0
    for member in members:
        own = [] if id(member) in tracking.zeros else _rules_of(published, member, owners, tracking)
        if own is None or any(rule.part is not None and rule.part_dim != dim for rule in own):
            return None
        for rule in own:
            offset = first + (rule.part[0] if rule.part else 0)
            out.append(replace(_as_box(rule, member.shape), part=(offset, total), part_dim=dim))
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
    """Return the parameter dim with which a view dim of this size and stride agrees, or None."""
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
