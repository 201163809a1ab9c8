"""Feed-forward sublayer of a block (MLP), with or without a gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.errors import ConfigError, suggest
from bmforge.nn.device_kernels import can_use_device_kernels
from bmforge.nn.host_rows import can_use_host_gated, can_use_host_gelu, host_gated, host_gelu
from bmforge.nn.in_place import multiply_temporary
from bmforge.nn.linear import Linear
from bmforge.nn.packed_linear import multiply_jointly, quantize_gated
from bmforge.nn.quantized_rows import QuantizedRows
from bmforge.nn.recompute import call_and_drop
from bmforge.nn.shard_hooks import TensorFn, identity

__all__ = [
    "ACTIVATIONS",
    "SWIGLU_ALPHA",
    "MLP",
    "MLPSpec",
    "WideLinear",
    "apply_gate",
    "clamp_swiglu",
    "get_activation",
]


def _gelu_tanh(x: Tensor) -> Tensor:
    return host_gelu(x) if can_use_host_gelu(x) else F.gelu(x, approximate="tanh")


# The aliases are names that published configs use.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_python": F.gelu,  # transformers' name of the same formula, for T5's gate
    "gelu_tanh": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}
# Factor in the sigmoid of gpt-oss's gate, which makes it an approximation of GELU.
SWIGLU_ALPHA = 1.702
# Activations of gates that have a CPU kernel, with their names in `host_rows.GATES`.
_HOST_GATES: dict[Callable[[Tensor], Tensor], str] = {F.silu: "silu", _gelu_tanh: "gelu_tanh"}


@dataclass(frozen=True)
class MLPSpec:
    """Hyperparameters of an MLP.

    Args:
        intermediate_size: width F of the hidden layer.
        activation: a name in `ACTIVATIONS`.
        gated: gated linear unit with a `gate_proj` (SwiGLU and similar; Shazeer 2020).
        bias: biases on all projections.
        dropout: dropout probability after the activation.
        in_scale: factor on the input of the gate and up projections, applied by the block; see
            `AttentionSpec`.
        out_scale: factor on the input of the down projection, applied by the block.
        widens_half: compute the activation and the down projection of fp16 input in fp32, and
            return fp32.
    """

    intermediate_size: int
    activation: str = "gelu"
    gated: bool = False
    bias: bool = True
    dropout: float = 0.0
    in_scale: float = 1.0
    out_scale: float = 1.0
    widens_half: bool = False


def get_activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return an activation function by its name.

    Raises:
        ConfigError: the activation is unknown; the message suggests the nearest name.
    """
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"unknown activation: activation={name!r} (supported: "
            f"{', '.join(sorted(ACTIVATIONS))}).{suggest(name, ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def apply_gate(activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    """Return ``activation(gate) * up``, in one pass if the activation has a kernel."""
    name = _HOST_GATES.get(activation)
    if name is not None and can_use_host_gated(gate, up):
        return host_gated(gate, up, name)
    if name == "silu" and gate.shape == up.shape and can_use_device_kernels(gate, up):
        return torch.ops.bmforge.multiply_by_silu(gate, up)
    return multiply_temporary(activation(gate), up, made_of=gate)


def clamp_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Return ``g * sigmoid(1.702 g) * (u + 1)``; g = min(gate, limit), u = up within +-limit.

    Source: OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card" (arXiv 2508.10925), section 2.
    """
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate * SWIGLU_ALPHA) * (up + 1)


class WideLinear(Linear):
    """Linear layer that casts its weight to the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dtype == x.dtype:
            return super().forward(x)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class MLP(nn.Module):
    """``down(act(up(x)))``, or gated ``down(act(gate(x)) * up(x))``.

    Args:
        hidden_size: width D of the hidden states.
        spec: other hyperparameters of the MLP.

    Attributes:
        input_fn: function applied to `x` first; set by layouts that shard the projections.

    Shape:
        x: (..., D) -> (..., D)
    """

    def __init__(self, hidden_size: int, spec: MLPSpec) -> None:
        super().__init__()
        self.input_fn: TensorFn = identity
        self.activation = get_activation(spec.activation)
        self.dropout, self.widens_half = spec.dropout, spec.widens_half
        sizes = hidden_size, spec.intermediate_size
        self.gate_proj = Linear(*sizes, bias=spec.bias) if spec.gated else None
        self.up_proj = Linear(*sizes, bias=spec.bias)
        last = WideLinear if spec.widens_half else Linear
        self.down_proj = last(*reversed(sizes), bias=spec.bias)

    def forward(self, x: Tensor | QuantizedRows) -> Tensor:
        """Apply the projections and the activation; `x` may be quantized for `projections`."""
        x = x if isinstance(x, QuantizedRows) else self.input_fn(x)
        up, *gates = multiply_jointly(x, self.projections())
        gate = gates[0] if gates else None
        is_plain = not (self.widens_half or self.training)
        if gate is not None and self.activation is F.silu and is_plain:
            quantized = quantize_gated(gate, up, self.down_proj)
            if quantized is not None:
                return multiply_jointly(quantized, (self.down_proj,))[0]
        if self.widens_half and up.dtype == torch.float16:
            up, gate = up.float(), None if gate is None else gate.float()

        def inner() -> Tensor:
            if gate is None:
                return self.activation(up)
            return apply_gate(self.activation, gate, up)

        if self.dropout and self.training:
            return self.down_proj(F.dropout(inner(), self.dropout))
        return call_and_drop(self.down_proj, inner(), inner)

    def projections(self) -> tuple[nn.Module, ...]:
        """Return the linear layers that are applied to `x`; they can share one quantized `x`."""
        return (self.up_proj,) if self.gate_proj is None else (self.up_proj, self.gate_proj)
