"""Changes to a model, as data: what was put beside its layers, or in their place.

A model is its family's config and an ordered list of changes. `Model.change_` applies one and the
config remembers it; opening a checkpoint replays them on meta before weights are read. The parts
themselves are in `nn`, so a kind of change is a line in `KINDS` here and a function that finds its
place. `docs/changes.md` shows how a part of your own becomes one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bmforge.config import config_from_dict
from bmforge.errors import ConfigError, suggest
from bmforge.models.init import draw_tensor_
from bmforge.models.resize import resize_
from bmforge.models.sizes import Sizes
from bmforge.nn.attention import Attention
from bmforge.nn.int8 import store_int8
from bmforge.nn.low_rank import ExpertsLowRank, LowRank
from bmforge.nn.moe import Experts
from bmforge.nn.part import (
    BesidePart,
    Derived,
    attach_part_,
    beside_parts,
    move_parts_,
    tensor_notes,
)
from bmforge.nn.prefix import Prefix
from bmforge.nn.prompt import Prompt
from bmforge.surgery import match_names, persistent_tensors, replace_module_

__all__ = [
    "CHANGES_KEY",
    "KINDS",
    "Change",
    "Kind",
    "apply_change_",
    "changed_modules",
    "changes_from_json",
    "changes_to_json",
    "freeze_base_",
]

# Under this key of config.json; transformers reads past it.
CHANGES_KEY = "bmforge"
_VERSION = 1


@dataclass(frozen=True)
class Change:
    """One change of a model.

    Args:
        kind: a name in `KINDS`.
        where: name globs (see `surgery`) of the modules that it changes.
        options: of the kind; see there.
        name: of the parts that stand beside modules, so that several can; "" takes the kind's.
    """

    kind: str
    where: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    name: str = ""

    def __post_init__(self) -> None:
        """Bring `where`, which may be one glob or a list, into one form."""
        where = (self.where,) if isinstance(self.where, str) else tuple(self.where)
        object.__setattr__(self, "where", where)
        object.__setattr__(self, "options", dict(self.options))

    def to_json(self) -> dict[str, Any]:
        """Return the change as plain JSON values."""
        named = {"name": self.name} if self.name else {}
        return {"kind": self.kind, "where": list(self.where), "options": self.options, **named}

    @classmethod
    def from_json(cls, value: Any) -> Change:
        """Read what `to_json` made.

        Raises:
            ConfigError: another form, or a kind that this version does not know.
        """
        if not isinstance(value, dict):
            raise ConfigError(f"a change is a table with kind and where, not {value!r}.")
        known = {"kind", "where", "options", "name"}
        if set(value) - known or not {"kind", "where"} <= set(value):
            raise ConfigError(
                f"a change has the fields {', '.join(sorted(known))}, of which kind and where are "
                f"needed; this one has {', '.join(sorted(value))}."
            )
        change = config_from_dict(cls, {**value, "where": _listed(value["where"])}, "change.")
        find_kind(change.kind)
        return change


def _listed(where: Any) -> Any:
    return [where] if isinstance(where, str) else where


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
    for n, module in new.items():
        if taken := [p for p, _ in beside_parts(model.get_submodule(n)) if hasattr(module, p)]:
            raise ConfigError(f"the part beside {n} has a name that int8 rows need: {taken[0]!r}.")
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
        like = next(p for p in module.parameters() if p.is_floating_point())
        with torch.device(like.device):
            parts.append(build(module).to(like.dtype).train(module.training))
    for module, part in zip(modules.values(), parts, strict=True):
        setattr(module, slot, part)


KINDS: Mapping[str, Kind] = {
    "low_rank": Kind(LowRankOptions, add_low_rank_, "a low-rank part beside linear layers"),
    "int8": Kind(NoOptions, store_as_int8_, "weights of layers kept as int8 rows"),
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


def apply_change_(model: nn.Module, change: Change, seed: int = 0) -> None:
    """Change a model in place, on meta or with real weights, before it is laid out.

    Works on any module; only a `Model` remembers it (`Model.change_`). New tensors are drawn as
    their part says.

    Args:
        model: any.
        change: what to do where.
        seed: of what is drawn.

    Raises:
        ConfigError: an unknown kind or option, a glob that matches nothing, or modules that cannot
            be changed so; the model is as it was then.
    """
    model_name = type(model).__name__
    before = {id(tensor) for tensor in persistent_tensors(model).values()}
    try:
        kind = find_kind(change.kind)
        options = config_from_dict(kind.options, dict(change.options), "options.")
        if not change.where:
            raise ConfigError("`where` names no module.")
        names = match_names([n for n, _ in model.named_modules() if n], change.where)
        kind.apply(model, names, options, change.name)
    except ConfigError as error:
        raise ConfigError(f"{model_name} cannot have the change {change.kind!r}: {error}") from None
    notes = changed_modules(model)
    for name, tensor in persistent_tensors(model).items():
        owner, _, key = name.rpartition(".")
        note = tensor_notes(notes[owner]).get(key) if owner in notes else None
        # What is derived was made of the weight whose place it takes.
        is_drawn = note is not None and not isinstance(note.draw, Derived)
        if note is not None and is_drawn and id(tensor) not in before and not tensor.is_meta:
            draw_tensor_(tensor, name, note, 0.0, seed)


def changed_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return name -> module of the parts beside modules and the storage forms of a model."""
    return {name: module for name, module in model.named_modules() if tensor_notes(module)}


def freeze_base_(model: nn.Module) -> nn.Module:
    """Switch gradients off for all but what changes have put in to be trained; return the model."""
    trained = {
        id(parameter)
        for part in changed_modules(model).values()
        for key, parameter in part.named_parameters(recurse=False)
        if key in tensor_notes(part) and tensor_notes(part)[key].trains
    }
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)
    return model


def changes_to_json(changes: Sequence[Change]) -> dict[str, Any]:
    """Return what stands in config.json under `CHANGES_KEY`."""
    return {"version": _VERSION, "changes": [change.to_json() for change in changes]}


def changes_from_json(value: Any, config: str) -> tuple[Change, ...]:
    """Read what `changes_to_json` made.

    Args:
        value: what stands in config.json.
        config: whose it is, for messages.

    Raises:
        ConfigError: a newer version wrote it, or it is of another form.
    """
    if not isinstance(value, dict) or not isinstance(value.get("changes"), list):
        raise ConfigError(
            f"{config}: config.json has {value!r} under {CHANGES_KEY!r}; it must be a table with "
            "version and changes."
        )
    if value.get("version") != _VERSION:
        raise ConfigError(
            f"{config}: config.json has changes of version {value.get('version')!r}; this bmforge "
            f"reads version {_VERSION}. Update bmforge."
        )
    try:
        return tuple(Change.from_json(item) for item in value["changes"])
    except ConfigError as error:
        raise ConfigError(f"{config}: {error}") from None
