"""Mixtral, a Llama with a mixture of experts (Jiang et al., "Mixtral of experts", 2024).

The Qwen-MoE families (`qwen_moe.py`) derive from these classes and have more config fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from bmforge.models.causal_lm import CausalLM, DecoderSpec
from bmforge.models.heads import Head
from bmforge.models.llama_like import (
    LlamaLikeConfig,
    llama_heads,
    llama_names_with,
    llama_rules,
    preset_size,
)
from bmforge.models.sizes import LayerSizes, feed_sizes
from bmforge.models.stack import find_differing_layers
from bmforge.models.weights import WeightRule
from bmforge.nn import AttentionSpec, BlockSpec, MLPSpec, MoESpec, NormSpec

__all__ = ["Mixtral", "MixtralConfig", "expert_rules"]


def expert_rules(published: str, names: Mapping[str, str]) -> list[WeightRule]:
    """Map names of router and experts to those of checkpoints with one tensor per expert.

    Args:
        published: name of a layer's module in checkpoints, with `{i}` for the layer index.
        names: mapping from bmforge's name of a projection to its name in checkpoints.
    """
    block = "layers.{i}.mlp."
    experts = [
        WeightRule(f"{block}experts.{own}", f"{published}.experts.{{e}}.{name}.weight")
        for own, name in names.items()
    ]
    return [WeightRule(f"{block}router.weight", f"{published}.gate.weight"), *experts]


@dataclass(kw_only=True)
class MixtralConfig(LlamaLikeConfig):
    """Config of Mixtral; other fields are those of `LlamaLikeConfig`.

    Args:
        num_experts: number E of experts in every layer.
        experts_per_token: number k of experts per token.
        window: size of the sliding window in tokens, including the token itself; 0 for no window.
        output_router_logits: add the load-balancing loss to the loss.
        router_aux_loss_coef: weight of the load-balancing loss.
    """

    family: ClassVar[str] = "mixtral"
    heads: ClassVar[dict[str, Head]] = llama_heads("Mixtral")
    hf_names: ClassVar[dict[str, str]] = llama_names_with(
        head_dim="head_dim",
        num_experts="num_local_experts",
        experts_per_token="num_experts_per_tok",
        output_router_logits="output_router_logits",
        router_aux_loss_coef="router_aux_loss_coef",
    )
    default_theta: ClassVar[float] = 1e6
    hf_required: ClassVar[dict[str, tuple[Any, ...]]] = {"router_jitter_noise": (0, 0.0, None)}
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "mixtral-8x7b": {"max_seq_len": 32768, "router_aux_loss_coef": 0.02},
        "mixtral-8x22b": {**preset_size(6144, 16384, 56, 48, 8), "max_seq_len": 65536},
    }
    hub_ids: ClassVar[dict[str, str]] = {
        "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
        "mixtral-8x22b": "mistralai/Mixtral-8x22B-v0.1",
    }

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 8
    max_seq_len: int = 131072
    norm_eps: float = 1e-5
    rope_theta: float = 1e6
    num_experts: int = 8
    experts_per_token: int = 2
    window: int = 0
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001

    def attn_spec(self) -> AttentionSpec:
        """Return the attention spec that all layers share, without the sliding window."""
        return AttentionSpec(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            qkv_bias=False,
            out_bias=False,
            dropout=self.attn_dropout,
        )

    def layer_windows(self) -> tuple[int | None, ...]:
        """Return the window size of every layer; None for no window."""
        return (self.window or None,) * self.num_layers

    def layer_mlps(self) -> tuple[MLPSpec | MoESpec, ...]:
        """Return the spec of every layer's feed-forward sublayer."""
        spec = MoESpec(
            self.num_experts, self.experts_per_token, self.intermediate_size, self.activation
        )
        return (spec,) * self.num_layers

    def own_sizes(self) -> dict[str, list[LayerSizes]]:
        """Return the layer sizes, including the sizes of each layer's experts or MLP."""
        full_sizes = self.layer_sizes()
        return {"layers": [replace(full_sizes, **feed_sizes(mlp)) for mlp in self.layer_mlps()]}

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        values, raw = super()._read_special(raw)
        return {**values, **cls._read_windows(raw)}, raw

    @classmethod
    def _read_windows(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """Remove the sliding-window fields from `raw`; return them under bmforge's names."""
        return {"window": raw.pop("sliding_window", None) or 0}

    def _write_special(self) -> dict[str, Any]:
        return {**super()._write_special(), "sliding_window": self.window or None}

    def to_hf(self) -> dict[str, Any]:
        """Return the contents of config.json, without head_dim if it is hidden_size / num_heads."""
        return self.omit_head_dim(super().to_hf())


class Mixtral(CausalLM):
    """Mixtral with a language-model head."""

    config_class = MixtralConfig
    hf_prefix = "model."

    def __init__(self, config: MixtralConfig) -> None:
        attn, norm = config.attn_spec(), NormSpec("rms", config.norm_eps)
        blocks = [
            BlockSpec(config.hidden_size, replace(attn, window=window), mlp, norm=norm)
            for window, mlp in zip(config.layer_windows(), config.layer_mlps(), strict=True)
        ]
        spec = DecoderSpec(
            blocks[0],
            find_differing_layers(blocks[0], blocks),
            rope=config.rope_spec(),
            padding_id=config.pad_token_id,
            balance_weight=config.router_aux_loss_coef if config.output_router_logits else None,
        )
        super().__init__(config, spec)

    def weight_rules(self) -> list[WeightRule]:
        """Map parameter names to transformers' names; gate, up and down are w1, w3 and w2."""
        names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
        return llama_rules() + expert_rules("model.layers.{i}.block_sparse_moe", names)
