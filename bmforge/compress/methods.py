"""Creates the methods that a config enables and attaches them to a model in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from bmforge.batch import Batch
from bmforge.compress.config import CompressConfig
from bmforge.compress.method import METHOD_NAMES, Method
from bmforge.compress.moefy import ExpertsMethod
from bmforge.compress.prune import prune
from bmforge.compress.prune.structure import StructureMethod
from bmforge.compress.quantize import FakeQuantize
from bmforge.errors import ConfigError

__all__ = ["attach_methods"]

Batches = Sequence[Batch] | None
Attach = Callable[[nn.Module, Any, Batches], Method]


def attach_methods(
    model: nn.Module, config: CompressConfig, batches: Batches, own: Sequence[Method] = ()
) -> list[Method]:
    """Attach the methods of a config, and custom ones, in the order of `METHOD_NAMES`.

    Args:
        model: any model; changed in place.
        config: compression settings.
        batches: calibration batches.
        own: custom methods that are not attached yet.

    Raises:
        ConfigError: a method is duplicated or unknown, gates are combined with a method that
            depends on the current shapes, batches are unused or missing, or settings do not fit the
            model.
    """
    _check(config, batches, own)
    attached: list[Method] = []
    for name in METHOD_NAMES:
        part, attach = _PARTS[name]
        settings = getattr(config, part)
        if settings is not None:
            attached.append(
                attach(model, settings, batches if config.needs_calibration(part) else None)
            )
        for method in own:
            if method.name == name:
                method.attach_(model)
                attached.append(method)
    return attached


def _check(config: CompressConfig, batches: Batches, own: Sequence[Method]) -> None:
    unknown = [method.name for method in own if method.name not in METHOD_NAMES]
    if unknown:
        raise ConfigError(
            f"unknown compression method: {unknown[0]!r} (known, in this order: "
            f"{', '.join(METHOD_NAMES)})."
        )
    names = [name for name, (part, _) in _PARTS.items() if getattr(config, part) is not None]
    names += [method.name for method in own]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"{', '.join(twice)} is configured twice. Use one configuration, or call compress "
            "twice."
        )
    _check_gates(config, own)
    if batches is not None and not config.is_calibrated:
        raise ConfigError(
            f"batches have no effect, because {', '.join(config.names) or 'the config'} uses no "
            "calibration data. Leave batches out."
        )
    if batches is None and config.is_calibrated:
        raise ConfigError(
            "there is no calibration data, but a method of the config needs activations. Pass "
            "compress(..., batches=...), or calibration texts in a recipe."
        )


def _check_gates(config: CompressConfig, own: Sequence[Method]) -> None:
    """Raise an error if gates change the shapes that another method depends on."""
    settings = [(name, getattr(config, part)) for name, (part, _) in _PARTS.items()]
    settings += [(method.name, getattr(method, "config", None)) for method in own]
    if not any(
        name == "structure" and getattr(config_of_method, "gates", ())
        for name, config_of_method in settings
    ):
        return
    for name, config_of_method in settings:
        if needed := _needs_shapes(name, config_of_method):
            raise ConfigError(
                f"structured pruning with gates changes the tensor shapes that {needed} needs. Run "
                "the structured pruning first, in a separate job (the phase `structure` in a "
                "recipe for `bmforge compress`)."
            )


def _needs_shapes(name: str, settings: Any) -> str:
    """Return the name of a method's setting that depends on the current shapes, or ""."""
    if settings is None:
        return ""
    if name == "experts":
        return "moefy"
    if name == "zeros" and getattr(settings, "pattern", "free") != "free":
        return f"prune.pattern={settings.pattern!r}"
    if name == "quantize" and getattr(settings, "training", "none") != "none":
        return f"quantize.training={settings.training!r}"
    return ""


def _attach_structure(model: nn.Module, config: Any, batches: Batches) -> Method:
    method = StructureMethod(config, batches or ())
    method.attach_(model)
    return method


def _attach_zeros(model: nn.Module, config: Any, batches: Batches) -> Method:
    return prune(model, config, batches=batches)


def _attach_integers(model: nn.Module, config: Any, batches: Batches) -> Method:
    method = FakeQuantize(config, batches)
    method.attach_(model)
    return method


def _attach_experts(model: nn.Module, config: Any, batches: Batches) -> Method:
    method = ExpertsMethod(config, batches or ())
    method.attach_(model)
    return method


# Method name -> (field of the config, function that attaches the method).
_PARTS: Mapping[str, tuple[str, Attach]] = {
    "structure": ("structure", _attach_structure),
    "experts": ("moefy", _attach_experts),
    "zeros": ("prune", _attach_zeros),
    "quantize": ("quantize", _attach_integers),
}
