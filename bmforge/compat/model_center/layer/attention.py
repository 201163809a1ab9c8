"""Attention and feed-forward layers with ModelCenter's arguments, using bmforge's attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bmforge.compat.bmtrain.module import DistributedModule
from bmforge.compat.model_center.layer.basic import Linear
from bmforge.errors import ConfigError, suggest
from bmforge.nn import AttentionSpec
from bmforge.nn.attention import compute_attention
from bmforge.nn.mlp import get_activation
from bmforge.nn.window import WindowAttention
from bmforge.nn.window_mask import build_window_mask

__all__ = ["Attention", "DenseACT", "DenseGatedACT", "FeedForward", "SparseSelfAttention"]

_OURS = {"project_q": "q_proj", "project_k": "k_proj", "project_v": "v_proj"}
_POSITIONS = ("none", "relative", "rotary")
_REST = {"length_scale": False, "attn_scale": False, "dropout_p": 0.0, "num_heads_kv": -1}


class Attention(DistributedModule):
    """Multi-head attention.

    Args:
        dim_in: features of queries and keys.
        dim_head: head size.
        num_heads: number of heads N.
        dim_out: output features (default: dim_in).
        dtype, int8, init_mean, init_std, bias: arguments of `Linear` for every projection.
        others: `mask_value` (ignored: masked weights are 0), `pos_bias_type` ("none", "relative"
            for a bias on the scores, "rotary" for a rotation module), `length_scale` of the
            projections, `attn_scale` (divide scores by sqrt(dim_head); default off), `dropout_p`
            of the attention weights, `num_heads_kv` (-1: num_heads).

    Shape:
        query: (B, T, dim_in); key_value: (B, S, dim_in); attention_mask: (B, T, S), True where a
        query may attend; position_bias: (N, T, S) or (B, N, T, S); returns (B, T, dim_out)
    """

    def __init__(
        self,
        dim_in: int,
        dim_head: int,
        num_heads: int,
        dim_out: int | None = None,
        dtype: torch.dtype | None = None,
        int8: bool = False,
        init_mean: float = 0.0,
        init_std: float = 0.02,
        bias: bool = False,
        **others: Any,
    ) -> None:
        super().__init__()
        more = {**_REST, "mask_value": float("-inf"), "pos_bias_type": "none", **others}
        if more["pos_bias_type"] not in _POSITIONS:
            raise ConfigError(
                f"unknown position bias: pos_bias_type={more['pos_bias_type']!r} (supported: "
                f"{', '.join(_POSITIONS)})."
            )
        self.dim_head, self.num_heads = dim_head, num_heads
        self.num_heads_kv = num_heads if more["num_heads_kv"] == -1 else more["num_heads_kv"]
        self.pos_bias_type, self.dropout_p = more["pos_bias_type"], more["dropout_p"]
        self.scale = None if more["attn_scale"] else 1.0
        settings: dict[str, Any] = {"dtype": dtype, "int8": int8, "init_mean": init_mean}
        settings |= {"init_std": init_std, "bias": bias, "length_scale": more["length_scale"]}
        self.linear_settings = settings
        self.project_q = Linear(dim_in, num_heads * dim_head, **settings)
        self.project_k = Linear(dim_in, self.num_heads_kv * dim_head, **settings)
        self.project_v = Linear(dim_in, self.num_heads_kv * dim_head, **settings)
        self.attention_out = Linear(num_heads * dim_head, dim_out or dim_in, **settings)

    def forward(
        self,
        query: Tensor,
        key_value: Tensor,
        attention_mask: Tensor,
        position_bias: Any = None,
        use_cache: bool = False,
        past_key_value: tuple[Tensor, Tensor] | None = None,
    ) -> Any:
        """Compute attention; with `use_cache`, also return the keys and values.

        Shape:
            keys and values: (B, num_heads_kv, S, dim_head)
        """
        q, k, v = (
            x.unflatten(-1, (-1, self.dim_head)).transpose(1, 2)
            for x in (self.project_q(query), self.project_k(key_value), self.project_v(key_value))
        )
        if past_key_value is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(past_key_value, (k, v), strict=True))
        new_cache = (k, v)
        bias = None
        if self.pos_bias_type == "rotary" and position_bias is not None:
            q, k = position_bias(q, k)
        elif self.pos_bias_type == "relative" and position_bias is not None:
            bias = position_bias if position_bias.dim() == 4 else position_bias[None]
            if k.shape[1] != q.shape[1]:
                k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        mask = attention_mask.bool()[:, None]
        dropout = self.dropout_p if self.training else 0.0
        # A fully masked query would give NaN: let it attend to all keys, and set its output to 0.
        blind = ~mask.any(-1, keepdim=True)
        mixed = compute_attention(q, k, v, mask | blind, bias, False, self.scale, dropout)
        mixed = mixed.masked_fill(blind, 0.0)
        out = self.attention_out(mixed.transpose(1, 2).flatten(2))
        return (out, new_cache) if use_cache else out


class SparseSelfAttention(Attention):
    """Sliding-window self-attention with optional global tokens.

    Args:
        attention_window: window size, both sides together; even.
        options: arguments of `Attention`. Scores are always divided by sqrt(`dim_head`).

    Shape:
        hidden_states: (B, T, dim_in), of any length; attention_mask: (B, T), below 0 for padding,
        0 for local and above 0 for global tokens; returns (B, T, dim_in)
    """

    def __init__(self, attention_window: int = 512, **options: Any) -> None:
        super().__init__(**options)
        if attention_window % 2 or self.pos_bias_type != "none":
            raise ConfigError(
                f"attention_window={attention_window} must be even, and "
                f"pos_bias_type={self.pos_bias_type!r} must be 'none'."
            )
        self.attention_window = attention_window
        sizes = options["dim_in"], self.num_heads * self.dim_head
        for part in "qkv":
            setattr(self, f"project_{part}_global", Linear(*sizes, **self.linear_settings))
        spec = AttentionSpec(self.num_heads, self.num_heads, self.dim_head, causal=False)
        with torch.device("meta"):
            window = WindowAttention(options["dim_in"], spec)
        for old_name, own_name in _OURS.items():
            window._modules[own_name] = getattr(self, old_name)
            window._modules[own_name.replace("_", "_global_", 1)] = getattr(
                self, f"{old_name}_global"
            )
        window._modules["o_proj"] = self.attention_out
        # Not registered as a submodule, since it shares this module's layers.
        self.__dict__["_window"] = window

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Any = None,
        use_cache: bool = False,
        past_key_value: Any = None,
    ) -> Tensor:
        """Compute attention; a position bias and a cache are not supported."""
        if position_bias is not None or use_cache or past_key_value is not None:
            raise ConfigError(
                "position_bias, use_cache and past_key_value are not supported with "
                "attention_window. Leave them out."
            )
        shape = (hidden_states.shape[0], hidden_states.shape[1])
        real = None if attention_mask is None else (attention_mask >= 0).long()
        chosen = None if attention_mask is None else (attention_mask > 0).long()
        mask = build_window_mask(
            shape,
            hidden_states.device,
            self.attention_window,
            attention_mask=real,
            global_mask=chosen if chosen is not None and bool(chosen.any()) else None,
        )
        self._window.dropout = self.dropout_p
        self._window.training = self.training
        out: Tensor = self._window(hidden_states, mask)
        return out


def _activation(name: str) -> Any:
    supported = ("relu", "gelu", "gelu_new", "silu")
    if name not in supported:
        raise ConfigError(
            f"unknown activation: activate_fn={name!r} (supported: {', '.join(supported)}, each "
            f'also with the prefix "gated_").{suggest(name, supported)}'
        )
    return get_activation(name)


class DenseACT(DistributedModule):
    """Linear layer and activation, ``act(W x)``.

    Args:
        dim_in: features of x.
        dim_ff: output features.
        activate_fn: relu, gelu, gelu_new or silu.
        options: options of `Linear`.

    Shape:
        x: (..., dim_in) -> (..., dim_ff)
    """

    def __init__(self, dim_in: int, dim_ff: int, activate_fn: str = "gelu", **options: Any) -> None:
        super().__init__()
        self.w = Linear(dim_in, dim_ff, **{"init_std": 0.02, **options})
        self.act = _activation(activate_fn)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the linear layer, then the activation."""
        out: Tensor = self.act(self.w(x))
        return out


class DenseGatedACT(DistributedModule):
    """Gated linear layer, ``act(W_0 x) * W_1 x``; arguments as in `DenseACT`."""

    def __init__(self, dim_in: int, dim_ff: int, activate_fn: str = "gelu", **options: Any) -> None:
        super().__init__()
        settings = {"init_std": 0.02, **options}
        self.w_0 = Linear(dim_in, dim_ff, **settings)
        self.w_1 = Linear(dim_in, dim_ff, **settings)
        self.act = _activation(activate_fn)

    def forward(self, x: Tensor) -> Tensor:
        """Apply both linear layers and the activation, and multiply the results."""
        out: Tensor = self.act(self.w_0(x)) * self.w_1(x)
        return out


class FeedForward(DistributedModule):
    """MLP with or without a gate.

    Args:
        dim_in: features of x.
        dim_ff: intermediate size.
        dim_out: output features (default: dim_in).
        dtype, int8, init_mean, init_std, bias: arguments of `Linear` for every layer.
        activate_fn: relu, gelu, gelu_new or silu, with prefix "gated_" for a gated MLP.
        others: `length_scale` and `dropout_p`.

    Shape:
        x: (..., dim_in) -> (..., dim_out)
    """

    def __init__(
        self,
        dim_in: int,
        dim_ff: int,
        dim_out: int | None = None,
        dtype: torch.dtype | None = None,
        int8: bool = False,
        init_mean: float = 0.0,
        init_std: float = 0.02,
        bias: bool = False,
        activate_fn: str = "gated_gelu",
        **others: Any,
    ) -> None:
        super().__init__()
        scale, self.dropout_p = others.pop("length_scale", False), others.pop("dropout_p", 0.0)
        if others:
            raise TypeError(f"FeedForward got an unexpected argument {next(iter(others))!r}.")
        settings: dict[str, Any] = {"dtype": dtype, "int8": int8, "init_mean": init_mean}
        settings |= {"init_std": init_std, "bias": bias, "length_scale": scale}
        kind = DenseGatedACT if activate_fn.startswith("gated_") else DenseACT
        self.w_in = kind(dim_in, dim_ff, activate_fn.removeprefix("gated_"), **settings)
        self.w_out = Linear(dim_ff, dim_out or dim_in, length_scale_before=True, **settings)

    def forward(self, x: Tensor) -> Tensor:
        """Apply both linear layers of the MLP."""
        x = self.w_in(x)
        x = F.dropout(x, self.dropout_p, self.training) if self.dropout_p else x
        out: Tensor = self.w_out(x)
        return out
