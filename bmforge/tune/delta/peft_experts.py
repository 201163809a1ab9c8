"""Loads PEFT's LoRA adapters on stacked experts (`target_parameters`).

PEFT has one pair of factors per stack of experts, with fused gate and up projections; bmforge has
one pair per expert matrix. The loaded adapter computes the same outputs; it is saved in bmforge's
format.
Source: PEFT 0.21, `ParamWrapper`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.errors import CheckpointError

__all__ = ["expert_owner", "read_experts"]

_NAME = re.compile(r"(?:model\.)?(layers\.\d+\.mlp\.experts)(?:\.base_layer)*")


def expert_owner(model: nn.Module, name: str) -> str | None:
    """Return bmforge's name of the stacked experts that transformers calls `name`, if any."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    module: Any = model
    for part in match[1].split("."):
        module = getattr(module, part, None)
    return match[1] if hasattr(module, "stack_sizes") else None


def read_experts(
    name: str, part: Any, pairs: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Convert PEFT's factors to the tensors of a bmforge adapter on stacked experts.

    Args:
        name: name of the adapter module, used in messages.
        part: the adapter module, an `ExpertsLowRank`.
        pairs: LoRA factors "A" and "B" of each stacked expert parameter that PEFT adapts; their
            shapes determine the expert matrices to which they belong. The update of matrices
            without factors is zero.

    Returns:
        dict from tensor name in `part` to tensor.

    Raises:
        CheckpointError: a factor is missing, or the shapes match no expert matrices.
    """
    factors: dict[str, Tensor] = {}
    for key in part.keys:
        down, up = getattr(part, f"{key}_down"), getattr(part, f"{key}_up")
        factors[f"{key}_down"], factors[f"{key}_up"] = down.detach(), torch.zeros_like(up)
    for pair in pairs.values():
        if set(pair) != {"A", "B"}:
            raise CheckpointError(
                f"{name} has only one of the two LoRA factors A and B: {', '.join(sorted(pair))}. "
                "Copy the adapter again."
            )
        factors |= _read_stack(name, part, pair["A"], pair["B"])
    return factors


def _read_stack(name: str, part: Any, first: Tensor, second: Tensor) -> dict[str, Tensor]:
    experts = int(getattr(part, f"{part.keys[0]}_down").shape[0])
    flat = first.reshape(experts, -1, first.shape[-1])
    other = second.reshape(second.shape[0], -1, experts).permute(2, 0, 1)
    stacks = [["down_proj"], [key for key in part.keys if key != "down_proj"]]
    # The matrices of a stack are (out, in) or (in, out); PEFT does not transpose them.
    for up, down in ((other, flat), (flat.mT, other.mT)):
        for keys in stacks:
            rows = [int(getattr(part, f"{key}_up").shape[1]) for key in keys]
            wide = getattr(part, f"{keys[0]}_down").shape[2]
            if (up.shape[1], down.shape[2]) == (sum(rows), wide):
                chunks = zip(keys, up.split(rows, 1), strict=True)
                factors = {f"{key}_up": chunk for key, chunk in chunks}
                return factors | {f"{key}_down": down for key in keys}
    raise CheckpointError(
        f"the LoRA factors of {name} have the shapes {tuple(first.shape)} and "
        f"{tuple(second.shape)}, which do not match a stack of {experts} experts. Load the base "
        "model of the adapter."
    )
