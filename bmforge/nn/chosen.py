"""Experts that all tokens of a call share: no sorting, no copies, one product after the other."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bmforge.nn.part import beside_parts
from bmforge.surgery import wrappers_of

__all__ = ["run_chosen", "takes_chosen"]


def takes_chosen(experts: Any, kind: type) -> bool:
    """Tell whether `run_chosen` computes what these experts do, in the best way there is.

    Backward would make a gradient of all experts for each; a layout, streaming, storage forms and
    parts beside have ways of their own.
    """
    plain = type(experts) is kind and not wrappers_of(experts)
    plain = plain and not any(True for _ in beside_parts(experts))
    return plain and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def run_chosen(experts: Any, x: Tensor, chosen: Tensor) -> Tensor:
    """Return the sum of what some experts make of all tokens.

    Args:
        experts: plain ones.
        x: the tokens.
        chosen: numbers of the experts.

    Shape:
        x: (M, D); chosen: (k,); returns (M, D)
    """
    out = x.new_zeros(x.shape[0], experts.down_proj.shape[1])
    for number in chosen.tolist():
        inner = _project(experts, "up", x, number)
        if experts.gate_proj is not None:
            inner = experts.activation(_project(experts, "gate", x, number)) * inner
        else:
            inner = experts.activation(inner)
        out.addmm_(inner, experts.down_proj[number].t())
    return out


def _project(experts: Any, name: str, x: Tensor, number: int) -> Tensor:
    bias = getattr(experts, f"{name}_bias")
    weight = getattr(experts, f"{name}_proj")[number]
    return F.linear(x, weight, None if bias is None else bias[number])
