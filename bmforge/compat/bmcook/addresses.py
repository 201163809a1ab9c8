"""Looks up modules by the (partial) ModelCenter names in BMCook's configs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from torch import nn

from bmforge.compat.model_center.model.module_names import module_names
from bmforge.compress.distill.capture import INTO
from bmforge.compress.matrices import has_weight_matrix
from bmforge.errors import ConfigError, suggest
from bmforge.models import Model
from bmforge.models.formats.model_center import apply_name_rules
from bmforge.nn.low_rank import linear_sizes

__all__ = ["modules_with", "read_pair"]


def has_matrix(module: nn.Module) -> bool:
    """Return True if a module has a weight matrix."""
    return has_weight_matrix(module) or linear_sizes(module) is not None


def modules_with(
    model: nn.Module,
    patterns: Sequence[str],
    key: str,
    accepts: Callable[[nn.Module], bool] = has_matrix,
) -> dict[str, str]:
    """Return a dict from bmforge name to ModelCenter name of modules that match a pattern.

    Args:
        model: any model; a pattern may occur in a module's bmforge name or in its ModelCenter name.
        patterns: substrings of module names.
        key: config key of the patterns, for error messages.
        accepts: function that selects the modules to search.

    Raises:
        ConfigError: a pattern matches no module name.
    """
    has_gate = any(name.endswith("gate_proj") for name, _ in model.named_modules())
    old_names: dict[str, str] = {}
    for name, module in model.named_modules():
        if name and accepts(module):
            old_name = apply_name_rules(f"{name.removeprefix('model.')}.weight", has_gate)
            old_names[name] = old_name.removesuffix(".weight")
    matched: dict[str, str] = {}
    for pattern in patterns:
        hits = {
            name: old
            for name, old in old_names.items()
            if pattern in f"{name}.weight" or pattern in f"{old}.weight"
        }
        if not hits:
            hint = suggest(pattern, old_names.values())
            raise ConfigError(
                f"{key}: {pattern!r} matches no module name.{hint} Use a part of a module's name."
            )
        matched.update(hits)
    return matched


def find_old_module(model: nn.Module, name: str) -> str:
    """Return the bmforge name of a module, given its ModelCenter name or its bmforge name.

    Raises:
        ConfigError: the model has no module of that name.
    """
    modules = dict(model.named_modules())
    old_names: dict[str, list[str]] = {}
    if callable(published := getattr(model, "published_modules", None)):
        old_names = published()
    elif isinstance(model, Model):
        old_names = module_names(model, type(model).__name__)
    # Old versions of ModelCenter call the only stack of a decoder "decoder".
    encoder_name = re.sub(r"^decoder\.", "encoder.", name)
    for candidate in (
        *(name, f"model.{name}"),
        *old_names.get(name, ()),
        *old_names.get(encoder_name, ()),
    ):
        if candidate in modules:
            return candidate
    raise ConfigError(f"{type(model).__name__} has no module {name!r}.{suggest(name, modules)}")


def read_pair(text: str, models: Sequence[nn.Module]) -> list[str]:
    """Parse "[post]a.b:[pre]c.d" into two modules, with bmforge's names.

    Args:
        text: a pair of modules; "[post]" means a module's output, "[pre]" its input.
        models: student and teacher, in which the modules are looked up.

    Raises:
        ConfigError: the text is not such a pair, or a model has no module of that name.
    """
    sides = [side.partition("]") for side in text.split(":")]
    if len(sides) != 2 or any(kind not in ("[post", "[pre") for kind, _, _ in sides):
        raise ConfigError(f"{text!r} is not a pair of modules, such as '[post]a.b:[pre]a.b'.")
    return [
        ("" if kind == "[post" else INTO) + find_old_module(model, name)
        for model, (kind, _, name) in zip(models, sides, strict=True)
    ]
