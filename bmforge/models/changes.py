"""Changes to a model, as data: what was put beside its layers, or in their place.

A model is its family's config and an ordered list of changes. `Model.change_` applies one and the
config remembers it; opening a checkpoint replays them on meta before weights are read. What kinds
there are stands in `kinds.py`; `docs/changes.md` shows how a part of your own becomes one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from bmforge.config import config_from_dict
from bmforge.errors import ConfigError
from bmforge.models.kinds import find_kind
from bmforge.nn.draw import draw_tensor_
from bmforge.nn.part import Derived, tensor_notes
from bmforge.surgery import match_names, persistent_tensors

__all__ = [
    "CHANGES_KEY",
    "QUANTIZATION_KEY",
    "QUANT_METHOD",
    "Change",
    "apply_change_",
    "changed_modules",
    "changes_from_json",
    "changes_to_json",
    "freeze_base_",
    "quantization_to_json",
]

# Under this key of config.json; transformers reads past it.
CHANGES_KEY = "bmforge"
# Others, transformers too, look here for how weights are packed, and refuse what they do not know.
QUANTIZATION_KEY, QUANT_METHOD = "quantization_config", "bmforge"
_VERSION = 1


@dataclass(frozen=True)
class Change:
    """One change of a model.

    Args:
        kind: a name in `kinds.KINDS`.
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
        where: Any = (self.where,) if isinstance(self.where, str) else self.where
        if not isinstance(where, (list, tuple)) or not all(isinstance(w, str) for w in where):
            raise ConfigError(
                f"where={self.where!r} must be the name glob of a module, or a list of them, such "
                "as 'layers.*.attn.q_proj'."
            )
        object.__setattr__(self, "where", tuple(where))
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
        found = tensor_notes(notes[owner]) if owner in notes else {}
        note = found.get(key)
        # A storage form was made of the weight whose place it takes.
        is_drawn = not any(isinstance(one.draw, Derived) for one in found.values())
        if note is not None and is_drawn and id(tensor) not in before and not tensor.is_meta:
            draw_tensor_(tensor, name, note, 0.0, seed)


def changed_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return name -> module of the parts beside modules and the storage forms of a model."""
    return {name: module for name, module in model.named_modules() if tensor_notes(module)}


def freeze_base_(model: nn.Module, but: Collection[str] = ()) -> nn.Module:
    """Switch gradients off for all but what changes have put in to be trained; return the model.

    Args:
        model: any.
        but: names of further parameters that are trained, such as those of a freshly drawn head.
    """
    trained = {id(parameter) for name, parameter in model.named_parameters() if name in but}
    trained |= {
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


def quantization_to_json(changes: Sequence[Change]) -> dict[str, Any] | None:
    """Return what config.json says to others of packed weights; None where there are none."""
    schemes = [change.options for change in changes if change.kind == "quantize"]
    return {"quant_method": QUANT_METHOD, "schemes": schemes} if schemes else None


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
