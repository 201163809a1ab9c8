"""Trained keys and values that stand before a layer's own: what prefix tuning adds.

They are the same for all rows, every query sees them, and they have no position: rotary angles and
biases by distance are for tokens alone. A cache does not hold them.

Source: Li and Liang, "Prefix-Tuning: Optimizing Continuous Prompts for Generation" (2021).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.nn.part import TensorNote

__all__ = ["Pair", "Prefix", "put_before"]

# Keys and values, (K, P, H) each.
Pair = tuple[Tensor, Tensor]


class Prefix(nn.Module):
    """P keys and values for every key-value head; put one at `attn.prefix`.

    Args:
        num_kv_heads: K.
        length: P.
        head_dim: H.
        std: of freshly drawn ones.

    Shape:
        returns two tensors (K, P, H)
    """

    def __init__(self, num_kv_heads: int, length: int, head_dim: int, std: float = 0.02) -> None:
        super().__init__()
        self.std = std
        self.key = nn.Parameter(torch.zeros(num_kv_heads, length, head_dim))
        self.value = nn.Parameter(torch.zeros(num_kv_heads, length, head_dim))

    def tensor_notes(self) -> Mapping[str, TensorNote]:
        """Heads are cut over processes as those of keys and values."""
        return dict.fromkeys(("key", "value"), TensorNote(self.std, {"key_value": 0}))

    def forward(self) -> Pair:
        """Return the keys and values."""
        return self.key, self.value

    def extra_repr(self) -> str:
        """Show the sizes."""
        heads, length, width = self.key.shape
        return f"{length} keys of {heads} heads of {width}"


def put_before(
    prefix: Pair,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return keys, values, mask and bias with a prefix in front.

    Args:
        prefix: keys and values for all rows.
        query: of the tokens that ask.
        key: of the tokens that are asked.
        value: of the same.
        mask: True where a query may look; with neither mask nor bias and
        causal: up to itself, where there are several queries.
        bias: added to the scores; 0 for the prefix.

    Shape:
        prefix: (K, P, H); as `nn.attention.mix_values` otherwise, with P + S in place of S
    """
    rows, length = key.shape[0], prefix[0].shape[1]
    if mask is None and bias is None and causal and query.shape[2] > 1:
        shape = query.shape[2], key.shape[2]
        mask = torch.ones(shape, dtype=torch.bool, device=key.device).tril()[None, None]
    key, value = (
        torch.cat((part.to(own.dtype).expand(rows, -1, -1, -1), own), 2)
        for part, own in zip(prefix, (key, value), strict=True)
    )
    mask = None if mask is None else F.pad(mask, (length, 0), value=True)
    return key, value, mask, None if bias is None else F.pad(bias, (length, 0))
