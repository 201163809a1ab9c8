"""Compares the shapes of presets with those of transformers' models, on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bmforge.models import Model

__all__ = ["check_preset_shapes", "count_preset"]


def count_preset(model_class: type[Model], name: str) -> int:
    """Return the number of parameters of a preset; tied parameters count once."""
    model = model_class.from_config(model_class.config_class.preset(name), device="meta")
    return sum(p.numel() for p in model.parameters())


def check_preset_shapes(
    model_class: type[Model], hf_class: Any, name: str, renamed: Mapping[str, str] | None = None
) -> None:
    """Compare a preset's shapes with those of transformers' model for the same config.

    Args:
        model_class: class of the model.
        hf_class: transformers' class.
        name: name of the preset.
        renamed: dict from transformers' parameter name to the name in checkpoint files, for the
            parameters for which they differ.
    """
    model = model_class.from_config(model_class.config_class.preset(name), device="meta")
    fields = {k: v for k, v in model.config.to_hf().items() if k != "model_type"}
    with torch.device("meta"):
        reference = hf_class(hf_class.config_class(**fields))
    shapes = {
        rule.source: rule.source_shape(tuple(model.get_parameter(rule.parameter).shape))
        for rule in model.active_rules()
    }
    names = renamed or {}
    assert shapes == {names.get(n, n): tuple(p.shape) for n, p in reference.named_parameters()}
