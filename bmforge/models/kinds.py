"""The kinds of change there are: what each does to the modules that it names.

A kind is a line in `KINDS`, a dataclass of options, and a function that finds the place of a part;
the parts themselves are in `nn`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bmforge.errors import ConfigError, suggest
from bmforge.models.resize import resize_
from bmforge.models.sizes import Sizes
from bmforge.nn.attention import Attention
from bmforge.nn.int8 import store_int8
from bmforge.nn.low_rank import ExpertsLowRank, LowRank
from bmforge.nn.moe import Experts
from bmforge.nn.packing import QuantSpec
from bmforge.nn.part import BesidePart, attach_part_, beside_parts, find_like, move_parts_
from bmforge.nn.prefix import Prefix
from bmforge.nn.prompt import Prompt
from bmforge.nn.quantized import plain_weights, store_packed
from bmforge.surgery import replace_module_

__all__ = ["KINDS", "Kind", "add_parts_", "find_kind"]


@dataclass(frozen=True)
class Kind:
    """What is to be known of one kind of change.

    Args:
        options: dataclass of its options.
        apply: changes the modules of these names: (model, names, options, name of the parts).
        about: what it does, for error messages and documentation.
    """

    options: type[Any]
    apply: Callable[[nn.Module, Sequence[str], Any, str], None]
    about: str


@dataclass(frozen=True)
class LowRankOptions:
    """Options of "low_rank".

    Args:
        rank: R.
        alpha: what is added is scaled by alpha / R; None is 1.
        dropout: of what goes in, in training.
    """

    rank: int
    alpha: float | None = None
    dropout: float = 0.0


@dataclass(frozen=True)
class LengthOptions:
    """Options of "prefix" and "prompt".

    Args:
        length: keys and values of every layer, or tokens.
        std: standard deviation of freshly drawn ones.
    """

    length: int
    std: float = 0.02

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.length < 1:
            raise ConfigError(f"length={self.length} must be at least 1.")
        if not (self.std >= 0 and math.isfinite(self.std)):
            raise ConfigError(f"std={self.std} must be finite and at least 0.")


@dataclass(frozen=True)
class NoOptions:
    """Options of a kind that has none."""


def add_low_rank_(
    model: nn.Module, names: Sequence[str], options: LowRankOptions, name: str
) -> None:
    """Put a low-rank part beside linear layers, heads or stacked experts."""

    def build(module: nn.Module) -> BesidePart:
        part = ExpertsLowRank if isinstance(module, Experts) else LowRank
        return part.beside(module, options.rank, options.alpha, options.dropout)

    add_parts_(model, names, name or "low_rank", build)


def add_parts_(
    model: nn.Module, names: Sequence[str], name: str, build: Callable[[nn.Module], BesidePart]
) -> None:
    """Put a part beside each of these modules; nothing is changed where one of them cannot be.

    Args:
        model: any.
        names: of its modules.
        name: of the parts.
        build: module -> its part.
    """
    modules = [model.get_submodule(n) for n in names]
    if not name.isidentifier():
        raise ConfigError(f"name={name!r} must be a word that an attribute can have.")
    taken = [n for n, module in zip(names, modules, strict=True) if hasattr(module, name)]
    if taken:
        raise ConfigError(
            f"{taken[0]} already has {name!r}: give the change another name, or leave it out."
        )
    parts = [build(module) for module in modules]
    for module, part in zip(modules, parts, strict=True):
        part.train(module.training)
        attach_part_(module, name, part)


def store_as_int8_(model: nn.Module, names: Sequence[str], options: NoOptions, name: str) -> None:
    """Keep the weights of layers as int8 rows; tied ones stay tied."""
    stored: dict[int, Any] = {}
    _refuse_name(name)
    _check_ties(model, names)
    new = {n: store_int8(model.get_submodule(n), stored) for n in names}
    _put_in_place_(model, new)


def quantize_layers_(model: nn.Module, names: Sequence[str], spec: QuantSpec, name: str) -> None:
    """Pack the weights of layers; tied ones stay tied."""
    _refuse_name(name)
    _check_ties(model, names)
    new: dict[str, Any] = {}
    problems = []
    for n in names:
        try:
            new[n] = store_packed(model.get_submodule(n), spec)
        except ConfigError as error:
            problems.append(f"{n}: {error}")
    if problems:
        more = f" And {len(problems) - 5} more." if len(problems) > 5 else ""
        raise ConfigError(f"{' '.join(problems[:5])}{more} Leave them out of `where`.")
    filled: dict[int, Any] = {}
    for n, module in new.items():
        plain: Any = model.get_submodule(n)
        if isinstance(plain, Experts):
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
    """Put storage forms in the place of plain modules; what stands beside those comes along."""
    for n, module in new.items():
        if taken := [p for p, _ in beside_parts(model.get_submodule(n)) if hasattr(module, p)]:
            kind = type(module).__name__
            raise ConfigError(f"the part beside {n} has a name that a {kind} needs: {taken[0]!r}.")
    for n, module in new.items():
        old = replace_module_(model, n, module)
        move_parts_(old, module)
        for slot, part in old.named_children():  # a prompt behind a table
            setattr(module, slot, part)


def _refuse_name(name: str) -> None:
    if name:
        raise ConfigError(f"name={name!r} has no effect: nothing new stands beside a module.")


def _check_ties(model: nn.Module, names: Sequence[str]) -> None:
    """Raise where a weight is shared with a module that is not among `names`."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    for shared in owners.values():
        left = [owner for owner in shared if owner not in names]
        if left and len(left) < len(shared):
            inside = next(owner for owner in shared if owner in names)
            raise ConfigError(f"{inside} shares its weight with {left[0]}: name both in `where`.")


def resize_blocks_(model: nn.Module, names: Sequence[str], sizes: Sizes, name: str) -> None:
    """Make layers another size; see `resize.resize_`."""
    _refuse_name(name)
    if getattr(model, "spec", None) is None:
        raise ConfigError("only models of bmforge know how their layers are made.")
    resize_(model, names, sizes)


def put_prefixes_(
    model: nn.Module, names: Sequence[str], options: LengthOptions, name: str
) -> None:
    """Put trained keys and values before those of attentions."""

    def build(attn: Any) -> Prefix:
        heads = attn.k_proj.out_features // attn.head_dim
        return Prefix(heads, options.length, attn.head_dim, options.std)

    _fill_slots_(model, names, "prefix", Attention, build, name)


def put_prompts_(model: nn.Module, names: Sequence[str], options: LengthOptions, name: str) -> None:
    """Put trained rows behind those of the token embedding."""

    tokens: Any = getattr(model, "embed", None)

    def build(table: Any) -> Prompt:
        if table is not tokens:
            raise ConfigError("rows of a prompt are looked up in a model's token embedding, embed.")
        return Prompt(options.length, table.embedding_dim, options.std)

    _fill_slots_(model, names, "prompt", nn.Embedding, build, name)


def _fill_slots_(
    model: nn.Module,
    names: Sequence[str],
    slot: str,
    kind: type[nn.Module],
    build: Callable[[Any], nn.Module],
    name: str,
) -> None:
    """Put a part into a slot that modules of a kind have, one each."""
    _refuse_name(name)
    modules = {n: model.get_submodule(n) for n in names}
    for n, module in modules.items():
        if not isinstance(module, kind):
            raise ConfigError(
                f"{n} is a {type(module).__name__}, which has no place for a {slot}: name modules "
                f"of kind {kind.__name__}."
            )
        if getattr(module, slot, None) is not None:
            raise ConfigError(f"{n} already has a {slot}.")
    parts = []
    for module in modules.values():
        like = find_like(module)
        with torch.device(like.device):
            parts.append(build(module).to(like.dtype).train(module.training))
    for module, part in zip(modules.values(), parts, strict=True):
        setattr(module, slot, part)


KINDS: Mapping[str, Kind] = {
    "low_rank": Kind(LowRankOptions, add_low_rank_, "a low-rank part beside linear layers"),
    "int8": Kind(NoOptions, store_as_int8_, "weights of layers kept as int8 rows"),
    "quantize": Kind(QuantSpec, quantize_layers_, "weights of layers packed as integers"),
    "prefix": Kind(LengthOptions, put_prefixes_, "trained keys and values before attention's own"),
    "prompt": Kind(LengthOptions, put_prompts_, "trained rows behind the token embedding"),
    "resize": Kind(Sizes, resize_blocks_, "layers of other sizes, or without a part"),
}


def find_kind(name: str) -> Kind:
    """Return a kind of change by its name.

    Raises:
        ConfigError: this version has no such kind.
    """
    if name not in KINDS:
        raise ConfigError(
            f"a change of kind {name!r} is not known to this version of bmforge."
            f"{suggest(name, KINDS)} Known: {', '.join(KINDS)}. A newer version may have written "
            "it: update bmforge."
        )
    return KINDS[name]
