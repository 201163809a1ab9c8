"""The feed-forward part of a block, plain or gated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.errors import ConfigError, suggest
from bmforge.nn.remake import call_and_drop

__all__ = ["ACTIVATIONS", "MLP", "get_activation"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


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
        intermediate_size: F.
        activation: a name in `ACTIVATIONS`.
        gated: add `gate_proj` (SwiGLU and its relatives; Shazeer 2020).
        bias: biases on all projections.

    Shape:
        x: (..., D) -> (..., D)
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str, gated: bool, bias: bool
    ) -> None:
        super().__init__()
        self.activation = get_activation(activation)
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias) if gated else None
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the projections and the activation."""
        up = self.up_proj(x)
        gate = None if self.gate_proj is None else self.gate_proj(x)

        def inner() -> Tensor:
            return self.activation(up) if gate is None else self.activation(gate) * up

        return call_and_drop(self.down_proj, inner(), inner)
