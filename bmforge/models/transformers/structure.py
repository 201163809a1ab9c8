"""Finds the main modules of a transformers model: body, output layer, stacks of blocks."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

from bmforge.nn.foreign_experts import is_foreign_experts
from bmforge.nn.low_rank import linear_sizes

__all__ = [
    "Structure",
    "accepted_arguments",
    "find_structure",
    "has_whole_groups",
    "linear_names",
]

# Layers that route tokens to experts; quantizing them would change which experts are selected.
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate", "e_score_correction_bias"})
# Lists of these modules are no stacks of blocks, but for example several embeddings (MarkupLM).
_NO_BLOCKS = frozenset({"ModuleList", "ModuleDict", "Embedding", "Linear"})
# Packed formats have groups of at least 32 columns.
_LEAST_INPUTS = 32


@dataclass(frozen=True)
class Structure:
    """Names of the main modules of a transformers model; "" for a module that it lacks.

    Args:
        body: module that computes the input of the output layer.
        head: output layer of the vocabulary.
        embed: token embedding.
        stacks: containers of blocks, starting with the text decoder's.
    """

    body: str
    head: str
    embed: str
    stacks: tuple[str, ...]


def find_structure(module: Any) -> Structure:
    """Find the main modules of a transformers model."""
    names = {id(part): name for name, part in module.named_modules()}
    body = module.base_model
    body_name = names.get(id(body), "") if body is not module else ""
    head = names.get(id(module.get_output_embeddings()), "")
    try:
        embed = names.get(id(module.get_input_embeddings()), "")
    except (NotImplementedError, AttributeError):
        embed = ""
    return Structure(body_name, head, embed, tuple(_find_stacks(module, embed)))


def _find_stacks(module: Any, embed: str) -> list[str]:
    """Return the names of the modules that hold lists of blocks, the text decoder's first.

    A list with a single block counts only if there are no longer lists, as in ALBERT, whose layers
    share weights.
    """
    return _rank_stacks(module, embed, 2) or _rank_stacks(module, embed, 1)


def _rank_stacks(module: Any, embed: str, least: int) -> list[str]:
    ranked: list[tuple[tuple[bool, bool, int, int], str]] = []
    classes = set(module._no_split_modules or ())
    owner = embed.rpartition(".")[0]
    for name, part in module.named_modules():
        if any(name.startswith(f"{other}.") for _, other in ranked):
            continue
        if not isinstance(part, (nn.ModuleList, nn.ModuleDict)) or len(part) < least:
            continue
        size = sum(parameter.numel() for parameter in part.parameters())
        kinds = {type(block).__name__ for block in part.children()}
        if not size or kinds <= _NO_BLOCKS:
            continue
        is_known = bool(kinds & classes)
        # Convolutions before the blocks may have more parameters than the blocks (SpeechT5).
        matrices = sum(p.numel() for p in part.parameters() if p.dim() == 2)
        ranked.append(((name.rpartition(".")[0] == owner, is_known, matrices, size), name))
    ranked.sort(key=lambda pair: pair[0], reverse=True)
    preferred = [name for rank, name in ranked if rank[0] or rank[1]]
    return preferred or [name for _, name in ranked[:1]]


def linear_names(module: nn.Module, stacks: tuple[str, ...]) -> list[str]:
    """Return the names of linear layers and experts in the blocks to quantize or shard.

    Routers and layers with few inputs, such as the coefficients of Gemma 3n, are excluded.
    """
    inside = tuple(f"{name}." for name in stacks)
    return [
        name
        for name, part in module.named_modules()
        if name.startswith(inside) and _is_matrix(part) and name.rpartition(".")[2] not in _ROUTERS
    ]


def _is_matrix(part: nn.Module) -> bool:
    sizes = linear_sizes(part)
    is_wide = sizes is not None and sizes[0] >= _LEAST_INPUTS
    return (is_wide and getattr(part, "weight", None) is not None) or is_foreign_experts(part)


def has_whole_groups(part: nn.Module) -> bool:
    """Return True if a layer's number of inputs is a multiple of 32, as packed formats require."""
    sizes = linear_sizes(part)
    return sizes is None or sizes[0] % _LEAST_INPUTS == 0


def accepted_arguments(module: nn.Module) -> tuple[frozenset[str], bool]:
    """Return the argument names of `forward`, and whether it accepts other keyword arguments."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    names = frozenset(p.name for p in parameters)
    return names, any(p.kind == p.VAR_KEYWORD for p in parameters)
