"""Changes to a model as data: adapters, quantized layers, resized layers.

A model is defined by its family's config and an ordered list of changes. `Model.change_` applies a
change and records it in the config. Loading a checkpoint replays the changes on the meta device
before weights are read. The kinds of changes are in `kinds.py`;
`docs/explanation/changed_models.md` shows how to add one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from bmforge.config import config_from_dict
from bmforge.errors import ConfigError
from bmforge.models.kinds import find_kind
from bmforge.nn.part import Derived, tensor_notes
from bmforge.nn.part_kinds import rename_options
from bmforge.nn.random_init import init_from_note_
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

# Key in config.json that transformers ignores.
CHANGES_KEY = "bmforge"
# Key where other programs look for a quantization method; they refuse unknown ones.
QUANTIZATION_KEY, QUANT_METHOD = "quantization_config", "bmforge"
_VERSION = 1


@dataclass(frozen=True)
class Change:
    """Change to a model: kind, modules and options.

    Args:
        kind: name in `kinds.KINDS`.
        where: name globs (see `surgery`) of the modules to change.
        options: options of the kind.
        name: name of the added adapters, so that a module can have several; "" uses the default
            name of the kind.
        weight: factor on the output of the added adapters; 0 disables them.
    """

    kind: str
    where: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    weight: float = 1.0

    def __post_init__(self) -> None:
        """Convert `where` (one glob or a list) to a tuple."""
        where: Any = (self.where,) if isinstance(self.where, str) else self.where
        if not isinstance(where, (list, tuple)) or not all(isinstance(w, str) for w in where):
            raise ConfigError(
                f"where={self.where!r} must be a module glob or a list of globs, such as "
                "'layers.*.attn.q_proj'."
            )
        object.__setattr__(self, "where", tuple(where))
        object.__setattr__(self, "options", dict(self.options))

    def to_json(self) -> dict[str, Any]:
        """Return the change as a dict that JSON can encode."""
        named: dict[str, Any] = {"name": self.name} if self.name else {}
        named |= {"weight": self.weight} if self.weight != 1 else {}
        return {"kind": self.kind, "where": list(self.where), "options": self.options, **named}

    @classmethod
    def from_json(cls, value: Any) -> Change:
        """Build a change from the output of `to_json`.

        Raises:
            ConfigError: the format is invalid, or this version does not support the kind.
        """
        if not isinstance(value, dict):
            raise ConfigError(
                f"a change must be an object with the fields 'kind' and 'where', not {value!r}. "
                "Correct the entry."
            )
        fields = {"kind", "where", "options", "name", "weight"}
        if set(value) - fields or not {"kind", "where"} <= set(value):
            wrong = sorted(set(value) - fields) or sorted({"kind", "where"} - set(value))
            raise ConfigError(
                f"a change has unknown or missing fields: {', '.join(wrong)} (allowed: "
                f"{', '.join(sorted(fields))}; kind and where are required)."
            )
        where = value["where"]
        where = [where] if isinstance(where, str) else where
        change = config_from_dict(cls, {**value, "where": where}, "change.")
        find_kind(change.kind)
        return replace(change, options=rename_options(change.options))


def apply_change_(model: nn.Module, change: Change, seed: int = 0) -> None:
    """Apply a `Change` in place to a model that is not parallelized; it may be on the meta device.

    This works on any module; only `Model.change_` also records the change.

    Args:
        model: model to change.
        change: kind, modules and options of the change.
        seed: random seed of the initialization of new tensors.

    Raises:
        ConfigError: the kind or an option is unknown, a glob matches nothing, or a module is
            not supported. The model is then unchanged.
    """
    model_name = type(model).__name__
    before = {id(tensor) for tensor in persistent_tensors(model).values()}
    try:
        kind = find_kind(change.kind)
        options = config_from_dict(kind.options, dict(change.options), "options.")
        if not change.where:
            raise ConfigError("where=() selects no module. Pass at least one module pattern.")
        names = match_names([n for n, _ in model.named_modules() if n], change.where)
        kind.apply(model, names, options, change.name)
    except ConfigError as error:
        raise ConfigError(f"cannot apply change {change.kind!r} to {model_name}: {error}") from None
    if change.weight != 1:
        for module in model.modules():
            own = {id(tensor) for tensor in module._parameters.values() if tensor is not None}
            if hasattr(module, "adapter_weight") and not own & before:
                module.adapter_weight = change.weight
    notes = changed_modules(model)
    for name, tensor in persistent_tensors(model).items():
        owner, _, key = name.rpartition(".")
        described = tensor_notes(notes[owner]) if owner in notes else {}
        note = described.get(key)
        # Quantized tensors are computed from the weight that they replace, so they are not
        # initialized.
        is_new = not any(isinstance(other.initial, Derived) for other in described.values())
        if note is not None and is_new and id(tensor) not in before and not tensor.is_meta:
            init_from_note_(tensor, name, note, 0.0, seed)


def changed_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return a dict from name to module of the adapters and replaced (quantized) layers."""
    return {name: module for name, module in model.named_modules() if tensor_notes(module)}


def freeze_base_(model: nn.Module, trained_names: Collection[str] = ()) -> nn.Module:
    """Freeze all parameters except those of adapters and of `trained_names`; return the model.

    Args:
        model: model to freeze.
        trained_names: names of further parameters to train, such as those of a new head.
    """
    trained = {
        id(parameter) for name, parameter in model.named_parameters() if name in trained_names
    }
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
    """Encode changes as the value of `CHANGES_KEY` in config.json."""
    return {"version": _VERSION, "changes": [change.to_json() for change in changes]}


def quantization_to_json(changes: Sequence[Change]) -> dict[str, Any] | None:
    """Return the quantization entry of config.json; None if no weights are quantized."""
    schemes = [change.options for change in changes if change.kind == "quantize"]
    return {"quant_method": QUANT_METHOD, "schemes": schemes} if schemes else None


def changes_from_json(value: Any, config: str) -> tuple[Change, ...]:
    """Parse the value of `CHANGES_KEY` in config.json.

    Args:
        value: value to parse.
        config: name of the config, for error messages.

    Raises:
        ConfigError: the version is newer than supported, or the format is invalid.
    """
    if not isinstance(value, dict) or not isinstance(value.get("changes"), list):
        raise ConfigError(
            f"{config}: {CHANGES_KEY!r} must be an object with the fields 'version' and 'changes', "
            f"not {value!r}."
        )
    if value.get("version") != _VERSION:
        raise ConfigError(
            f"{config}: config.json has changes in the format version {value.get('version')!r} "
            f"(supported: {_VERSION}). Update bmforge."
        )
    try:
        return tuple(Change.from_json(item) for item in value["changes"])
    except ConfigError as error:
        raise ConfigError(f"{config}: {error}") from None
