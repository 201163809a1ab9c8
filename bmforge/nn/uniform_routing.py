"""MoE layers for calls in which all tokens use the same experts, without sorting tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bmforge.nn.part import adapters_of
from bmforge.surgery import wrappers_of

__all__ = ["run_uniform", "can_run_uniform"]


def can_run_uniform(experts: Any, kind: type) -> bool:
    """Return True if `run_uniform` supports these experts in this call.

    `run_uniform` is for inference only: backward would allocate a full-size gradient for every
    expert. Sharded, streamed, quantized and adapted experts use other code paths.
    """
    plain = type(experts) is kind and not wrappers_of(experts)
    plain = plain and not any(True for _ in adapters_of(experts))
    return plain and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def run_uniform(experts: Any, x: Tensor, chosen: Tensor) -> Tensor:
    """Run the same experts on all tokens and sum their outputs.

    Args:
        experts: unwrapped `Experts`.
        x: hidden states of the tokens.
        chosen: indices of the experts.

    Shape:
        x: (M, D); chosen: (k,); returns (M, D)
    """
    out = x.new_zeros(x.shape[0], experts.down_proj.shape[1])
    for expert in chosen.tolist():
        has_gate = experts.gate_proj is not None
        gate = _project(experts, "gate", x, expert) if has_gate else None
        inner = experts.activate(gate, _project(experts, "up", x, expert))
        out.addmm_(inner, experts.down_proj[expert].t())
    return out


def _project(experts: Any, name: str, x: Tensor, number: int) -> Tensor:
    bias = getattr(experts, f"{name}_bias")
    weight = getattr(experts, f"{name}_proj")[number]
    return F.linear(x, weight, None if bias is None else bias[number])
