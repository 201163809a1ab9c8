"""BMInf's int8 linear layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bmforge.nn import quantized
from bmforge.nn.packing import PRESETS, Integers, pack_matrix, unpack_values

__all__ = ["QuantizedLinear"]

_SCHEME = PRESETS["int8-dynamic"]
_LARGEST = 127


class QuantizedLinear(quantized.QuantizedLinear):
    """Linear layer with int8 weights (a scale per row) and int8 activations (a scale per token).

    Weights are packed for the kernels; `weight_quant` and `weight_scale` return them unpacked, as
    in BMInf. Only inputs get a gradient, computed with the dequantized weights.

    Args:
        linear: unquantized layer (its bias is not quantized), or transformers' Conv1D.

    Raises:
        ConfigError: the input width is not divisible by 4, or a weight is not finite.

    Source: BMInf 2.0: a row's scale is its absolute maximum / 127, its integers are rounded to
        nearest.
    """

    def __init__(self, linear: nn.Module) -> None:
        super().__init__(linear, _SCHEME)
        weight: Tensor = linear.weight  # type: ignore[assignment]
        if weight.is_meta:
            return
        rows = (weight.t() if hasattr(linear, "nf") else weight).detach().float()
        scale = rows.abs().amax(1) / _LARGEST
        values = (rows / scale.where(scale > 0, 1.0)[:, None]).round().to(torch.int8)
        if bool(scale.isfinite().all()):
            self.take_packed_(pack_matrix(Integers(values, scale[:, None], None), _SCHEME))
        else:
            self.fill_(rows)  # raises the error with its reason

    @property
    def weight_quant(self) -> Tensor:
        """Int8 weights, shape (out, in)."""
        return unpack_values(self.packed, self.spec)[: self.rows]

    @property
    def weight_scale(self) -> Tensor:
        """Scales of the weight rows: (out,) fp32."""
        return self._tensors()[1].transpose(1, 2).flatten()[: self.rows]
