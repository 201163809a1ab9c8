"""The linear layer that blocks are made of."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.nn.products import multiply_dense

__all__ = ["Linear"]


class Linear(nn.Linear):
    """``x @ weight.T + bias``: on a CPU without gradients the fastest way, elsewhere torch's.

    Shape:
        x: (..., columns) -> (..., rows)
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the product."""
        found = multiply_dense(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias) if found is None else found
