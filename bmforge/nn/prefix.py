"""Prefix tuning: trained keys and values prepended to those of a layer.

The prefix is the same for all sequences, every query attends to it, and it has no positions: rotary
embeddings and relative position biases apply to the tokens only. The KV cache does not contain the
prefix.

Source: Li and Liang, "Prefix-Tuning: Optimizing Continuous Prompts for Generation" (2021).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.nn.part import TensorNote

__all__ = ["Pair", "KeyValuePrefix", "attend_with_prefix", "prepend_prefix", "is_single_query"]

# Keys and values, (K, P, H) each.
Pair = tuple[Tensor, Tensor]


class KeyValuePrefix(nn.Module):
    """Trained keys and values (P per key-value head); assign the module to `attn.prefix`.

    Args:
        num_kv_heads: number K of key-value heads.
        length: number P of virtual tokens.
        head_dim: width H of a head.
        std: standard deviation of the initialization.
        inner: width M of P trained vectors from which an MLP with tanh computes keys and values,
            which trains more stably; 0 trains keys and values directly.
        shift_positions: start the text's positions at P, as in PEFT, instead of 0.

    Attributes:
        is_delta: True if the prefix was attached to an existing model, whose files do not
            contain it.
        adapter_weight: 1, or 0 to disable the prefix, unless the call selects otherwise.

    Shape:
        returns two tensors (K, P, H)
    """

    is_delta: bool = False
    adapter_weight: float = 1.0

    def __init__(
        self,
        num_kv_heads: int,
        length: int,
        head_dim: int,
        std: float = 0.02,
        inner: int = 0,
        shift_positions: bool = False,
    ) -> None:
        super().__init__()
        self.std, self.inner, self.length = std, inner, length
        self.shift_positions = shift_positions
        if not inner:
            self.key = nn.Parameter(torch.zeros(num_kv_heads, length, head_dim))
            self.value = nn.Parameter(torch.zeros(num_kv_heads, length, head_dim))
            return
        self.rows = nn.Parameter(torch.zeros(length, inner))
        self.mid_weight = nn.Parameter(torch.zeros(inner, inner))
        self.mid_bias = nn.Parameter(torch.zeros(inner))
        for what in ("key", "value"):
            up = nn.Parameter(torch.zeros(num_kv_heads, head_dim, inner))
            self.register_parameter(f"{what}_weight", up)
            bias = nn.Parameter(torch.zeros(num_kv_heads, head_dim))
            self.register_parameter(f"{what}_bias", bias)

    def tensor_notes(self) -> Mapping[str, TensorNote]:
        """Return the tensors' initialization and sharding (along the key-value heads)."""
        shard_dims = {"key_value": 0}
        if not self.inner:
            return dict.fromkeys(("key", "value"), TensorNote(self.std, shard_dims))
        spread = self.inner**-0.5
        notes = {"rows": TensorNote(1.0), "mid_weight": TensorNote(spread)}
        notes["mid_bias"] = TensorNote("zeros")
        for what in ("key", "value"):
            notes[f"{what}_weight"] = TensorNote(self.std * spread, shard_dims)
            notes[f"{what}_bias"] = TensorNote("zeros", shard_dims)
        return notes

    def forward(self) -> Pair:
        """Return the keys and values."""
        if not self.inner:
            return self.key, self.value
        mid = torch.tanh(F.linear(self.rows, self.mid_weight, self.mid_bias))

        def up(weight: Tensor, bias: Tensor) -> Tensor:
            return torch.einsum("pm,khm->kph", mid, weight) + bias[:, None]

        return up(self.key_weight, self.key_bias), up(self.value_weight, self.value_bias)

    def extra_repr(self) -> str:
        """Return the sizes as text."""
        tensor = self.key_weight if self.inner else self.key
        length = self.rows.shape[0] if self.inner else tensor.shape[1]
        return f"{length} keys of {tensor.shape[0]} heads, inner={self.inner}"


def prepend_prefix(
    prefix: Pair,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Prepend a prefix to keys, values, mask and bias; return these four tensors.

    Args:
        prefix: keys and values for all sequences.
        query: queries of the tokens.
        key: keys of the tokens.
        value: values of the tokens.
        mask: True where a query may attend; None for no mask.
        causal: use a causal mask if there is no mask, no bias and more than one query.
        bias: bias of the attention scores; a bias without columns for the prefix gets zeros there.

    Shape:
        prefix: (K, P, H); others as in `attention.compute_attention`, with P + S keys instead of S
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
    if bias is not None and bias.shape[-1] != key.shape[2]:
        bias = F.pad(bias, (length, 0))
    return key, value, mask, bias


def is_single_query(query: Tensor, dropout: float) -> bool:
    """Return True for one query token per sequence without gradients; see `attend_with_prefix`."""
    plain = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return plain and query.shape[2] == 1 and not dropout


def attend_with_prefix(
    prefix: Pair | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention over a shared prefix and each sequence's own keys, without concatenation.

    Args:
        prefix: keys and values for all sequences; None if there is no prefix.
        query: query of one token per sequence.
        key: keys of the tokens of each sequence.
        value: values of the tokens of each sequence.
        mask: True where a query may attend; None for no mask.
        scale: factor on the scores; None means 1/sqrt(H).
        sinks: logit of each query head in the denominator of the softmax; see `nn.sinks`.

    Shape:
        prefix: (K, P, H); query: (B, N, 1, H); key, value: (B, K, S, H); mask: (B or 1, 1, 1, S);
        sinks: (N,); returns (B, N, 1, H)
    """
    rows, heads = query.shape[0], key.shape[1]
    if prefix is None:
        prefix = (key.new_empty(heads, 0, key.shape[-1]),) * 2
    front_key, front_value = (part.to(key.dtype) for part in prefix)
    length = front_key.shape[1]
    grouped_query = query.reshape(
        rows, heads, -1, query.shape[-1]
    )  # N / K queries of each head of keys
    front = _times(grouped_query, front_key.transpose(1, 2))
    own = grouped_query @ key.transpose(2, 3)
    if mask is not None:
        own = own.masked_fill(~mask, float("-inf"))
    scores = torch.cat((front, own), -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if sinks is not None:
        column = sinks.to(scores.dtype).view(heads, -1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1, dtype=_wide(scores.dtype)).to(value.dtype)
    end = length + key.shape[2]
    out = _times(weights[..., :length], front_value) + weights[..., length:end] @ value
    return out.reshape(query.shape)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize >= 4 else torch.float32


def _times(x: Tensor, shared: Tensor) -> Tensor:
    """Multiply (B, K, G, i) by a matrix (K, i, o) shared by all sequences; returns (B, K, G, o)."""
    rows, heads, queries, width = x.shape
    folded = x.transpose(0, 1).reshape(heads, rows * queries, width)
    return torch.bmm(folded, shared).view(heads, rows, queries, -1).transpose(0, 1)
