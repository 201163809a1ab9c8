"""BMInf's linear layer of int8 rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bmforge.nn import quantized
from bmforge.nn.packing import PRESETS, Integers, pack_matrix, unpack_values

__all__ = ["QuantizedLinear"]

_SCHEME = PRESETS["int8-dynamic"]
_LARGEST = 127


class QuantizedLinear(quantized.QuantizedLinear):
    """A linear layer of int8 rows, each with a scale; what goes in becomes int8 by token.

    Its parameters are packed for the kernels; `weight_quant` and `weight_scale` show them as
    BMInf had them. The weights take no gradient, what goes in gets that of the dequantised ones.

    Args:
        linear: the plain layer, whose bias is kept; or transformers' Conv1D.

    Raises:
        ConfigError: the layer's input width is no multiple of 4, or a weight is not finite.

    Source: BMInf 2.0's quantisation: a row's scale is its largest size / 127, its integers are the
        nearest to values / scale.
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
            self.fill_(rows)  # says what is wrong

    @property
    def weight_quant(self) -> Tensor:
        """The integers: (out, in) int8."""
        return unpack_values(self.packed, self.spec)[: self.rows]

    @property
    def weight_scale(self) -> Tensor:
        """The rows' scales: (out,) fp32."""
        return self._tensors()[1].transpose(1, 2).flatten()[: self.rows]
