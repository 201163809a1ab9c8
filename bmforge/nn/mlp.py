"""The feed-forward part of a block, plain or gated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.errors import ConfigError, suggest
from bmforge.nn.cuts import Pass, pass_on
from bmforge.nn.remake import call_and_drop

__all__ = ["ACTIVATIONS", "MLP", "MLPSpec", "get_activation"]

_gelu_tanh = partial(F.gelu, approximate="tanh")
# The aliases are names that published configs use.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}


@dataclass(frozen=True)
class MLPSpec:
    """Everything in which MLPs of different families differ.

    Args:
        intermediate_size: F.
        activation: a name in `ACTIVATIONS`.
        gated: add `gate_proj` (SwiGLU and its relatives; Shazeer 2020).
        bias: biases on all projections.
        dropout: after the activation.
        in_scale: factor on what goes into gate and up, and
        out_scale: on what goes into down; as in `AttentionSpec`.
    """

    intermediate_size: int
    activation: str = "gelu"
    gated: bool = False
    bias: bool = True
    dropout: float = 0.0
    in_scale: float = 1.0
    out_scale: float = 1.0


def get_activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return an activation function by its name.

    Raises:
        ConfigError: no such activation; the nearest known name is given.
    """
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"activation={name!r} is unknown.{suggest(name, ACTIVATIONS)} "
            f"Known: {', '.join(sorted(ACTIVATIONS))}."
        )
    return ACTIVATIONS[name]


class MLP(nn.Module):
    """``down(act(up(x)))``, or gated ``down(act(gate(x)) * up(x))``.

    Args:
        hidden_size: D.
        spec: the rest.

    Attributes:
        enter: what `x` goes through first; a layout that cuts the projections puts its own here.

    Shape:
        x: (..., D) -> (..., D)
    """

    def __init__(self, hidden_size: int, spec: MLPSpec) -> None:
        super().__init__()
        self.enter: Pass = pass_on
        self.activation = get_activation(spec.activation)
        self.dropout = spec.dropout
        sizes = hidden_size, spec.intermediate_size
        self.gate_proj = nn.Linear(*sizes, bias=spec.bias) if spec.gated else None
        self.up_proj = nn.Linear(*sizes, bias=spec.bias)
        self.down_proj = nn.Linear(*reversed(sizes), bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the projections and the activation."""
        x = self.enter(x)
        up = self.up_proj(x)
        gate = None if self.gate_proj is None else self.gate_proj(x)

        def inner() -> Tensor:
            return self.activation(up) if gate is None else self.activation(gate) * up

        if self.dropout and self.training:
            return self.down_proj(F.dropout(inner(), self.dropout))
        return call_and_drop(self.down_proj, inner(), inner)
