"""Builds a transformers model and a bmforge model with the same weights, for comparison.

The module needs transformers (the `dev` extra). Nothing is downloaded, since weights are random.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging as transformers_logging

from bmforge.models import Model
from bmforge.models.weights import assemble_source, group_by_source

__all__ = ["Twin", "build_reference", "make_twin", "to_reference_names"]


@dataclass(frozen=True)
class Twin:
    """A transformers model and a bmforge model with the same weights.

    Args:
        reference: the transformers model, in eval mode, with eager attention.
        model: the same model, loaded by bmforge from `directory`.
        directory: directory with the saved transformers model.
    """

    reference: Any
    model: Any
    directory: Path


def build_reference(hf_class: Any, fields: Mapping[str, Any], seed: int = 0) -> Any:
    """Return a transformers model with random weights, also in norms and biases.

    Args:
        hf_class: model class, such as ``transformers.GPT2LMHeadModel``.
        fields: fields of the model's config.
        seed: random seed of the weights.
    """
    torch.manual_seed(seed)
    model = hf_class(hf_class.config_class(**fields, attn_implementation="eager")).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def make_twin(
    model_class: type[Model], hf_class: Any, fields: Mapping[str, Any], directory: Path
) -> Twin:
    """Build a random transformers model on the CPU, save it, and load it with bmforge."""
    transformers_logging.disable_progress_bar()
    reference = build_reference(hf_class, fields)
    reference.save_pretrained(directory)
    return Twin(reference, model_class.from_pretrained(directory), directory)


def to_reference_names(model: Model, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a dict of tensors from bmforge's names and shapes to transformers' format."""
    groups = group_by_source(rule for rule in model.active_rules() if rule.parameter in tensors)
    return {name: assemble_source(rules, tensors.__getitem__) for name, rules in groups.items()}
