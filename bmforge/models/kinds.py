"""Kinds of changes to a model (adapters, quantization, resizing), and functions to apply them.

A kind is an entry of `KINDS`: a dataclass of options and a function that changes modules. The
modules that are added, and the kinds of adapters, are defined in `nn`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from bmforge.errors import ConfigError, suggest
from bmforge.models.resize import resize_
from bmforge.models.sizes import Sizes
from bmforge.nn.foreign_experts import is_foreign_experts
from bmforge.nn.int8 import store_int8
from bmforge.nn.moe import Experts
from bmforge.nn.packing import QuantSpec
from bmforge.nn.part import adapters_of, has_other_hooks, move_parts_
from bmforge.nn.part_kinds import PART_KINDS, Kind, NoOptions, refuse_name
from bmforge.nn.quantized import plain_weights, store_packed
from bmforge.nn.uncalled_modules import find_uncalled
from bmforge.surgery import replace_module_

__all__ = ["KINDS", "find_kind"]


def store_as_int8_(model: nn.Module, names: Sequence[str], options: NoOptions, name: str) -> None:
    """Store the weights of layers as int8 with one scale per row; tied weights stay tied."""
    stored: dict[int, Any] = {}
    refuse_name(name)
    _check_ties(model, names)
    new = {n: store_int8(model.get_submodule(n), stored) for n in names}
    _put_in_place_(model, new)


def quantize_layers_(model: nn.Module, names: Sequence[str], spec: QuantSpec, name: str) -> None:
    """Quantize the weights of layers; tied weights stay tied."""
    refuse_name(name)
    _check_ties(model, names)
    find_read: Any = getattr(model, "read_outside", None)
    read = find_read(names) if callable(find_read) else []
    if uncalled := [*find_uncalled(model, names), *read]:
        raise ConfigError(
            f"other modules use the weight of {', '.join(uncalled[:3])} directly, without "
            "calling the module, so the module cannot be replaced. Exclude it from `where`."
        )
    new: dict[str, Any] = {}
    problems = []
    for n in names:
        try:
            new[n] = store_packed(model.get_submodule(n), spec)
        except ConfigError as error:
            problems.append(f"{n}: {error}")
    if problems:
        more = f" And {len(problems) - 5} more." if len(problems) > 5 else ""
        raise ConfigError(f"{' '.join(problems[:5])}{more} Exclude these layers from where=.")
    filled: dict[int, Any] = {}
    for n, module in new.items():
        plain: Any = model.get_submodule(n)
        if isinstance(plain, Experts) or is_foreign_experts(plain):
            for key, stack in plain_weights(plain):
                if not stack.is_meta:
                    module.fill_(key, stack)
        elif id(plain.weight) in filled:
            module.share_(filled[id(plain.weight)])
        else:
            filled[id(plain.weight)] = module
            for _, weight in plain_weights(plain):
                if not weight.is_meta:
                    module.fill_(weight)
    _put_in_place_(model, new)


def _put_in_place_(model: nn.Module, new: Mapping[str, nn.Module]) -> None:
    """Replace modules with their quantized versions, to which their adapters are moved."""
    if hooked := [n for n in new if has_other_hooks(model.get_submodule(n))]:
        raise ConfigError(
            f"{', '.join(hooked[:3])} cannot be replaced, because the module has forward hooks "
            "(such as pruning gates) that would be lost. Remove the hooks first."
        )
    for n, module in new.items():
        if taken := [p for p, _ in adapters_of(model.get_submodule(n)) if hasattr(module, p)]:
            kind = type(module).__name__
            raise ConfigError(
                f"an adapter of {n} has the name {taken[0]!r}, which is also an attribute of "
                f"{kind}. Choose another name for the adapter."
            )
    for n, module in new.items():
        old = replace_module_(model, n, module)
        move_parts_(old, module)
        for slot, part in old.named_children():  # such as a soft prompt of an embedding
            setattr(module, slot, part)


def _check_ties(model: nn.Module, names: Sequence[str]) -> None:
    """Raise `ConfigError` if a weight is shared with a module outside of `names`."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    for shared in owners.values():
        left = [owner for owner in shared if owner not in names]
        if left and len(left) < len(shared):
            inside = next(owner for owner in shared if owner in names)
            raise ConfigError(
                f"{inside} shares its weight with {left[0]}. Select both modules with where=."
            )


def resize_blocks_(model: nn.Module, names: Sequence[str], sizes: Sizes, name: str) -> None:
    """Resize the layers of a model (see `resize.resize_`)."""
    refuse_name(name)
    if getattr(model, "spec", None) is None:
        raise ConfigError(
            f"a {type(model).__name__} cannot be resized (supported: model families of bmforge). "
            "Use another model."
        )
    resize_(model, names, sizes)


KINDS: Mapping[str, Kind] = {
    **PART_KINDS,
    "int8": Kind(NoOptions, store_as_int8_, "weights of linear layers stored as int8 rows"),
    "quantize": Kind(QuantSpec, quantize_layers_, "weights of layers quantized to integers"),
    "resize": Kind(Sizes, resize_blocks_, "layers with other sizes or without a sublayer"),
}


def find_kind(name: str) -> Kind:
    """Return the kind of change with the given name.

    Raises:
        ConfigError: this version does not support the kind.
    """
    if name not in KINDS:
        raise ConfigError(
            f"unknown kind of change: {name!r} (supported: "
            f"{', '.join(KINDS)}).{suggest(name, KINDS)} A newer version of bmforge may have "
            "written it. Update bmforge."
        )
    return KINDS[name]
