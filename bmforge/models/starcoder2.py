"""StarCoder2 (Lozhkov et al., "StarCoder 2 and The Stack v2", arXiv 2402.19173)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from bmforge.models.causal_lm import DecoderSpec
from bmforge.models.heads import Head
from bmforge.models.llama_like import (
    LlamaLike,
    LlamaLikeConfig,
    llama_heads,
    llama_names_with,
    llama_rules,
    preset_size,
)
from bmforge.models.weights import WeightRule, linear_rules
from bmforge.nn import BlockSpec, NormSpec

__all__ = ["Starcoder2", "Starcoder2Config"]


@dataclass(kw_only=True)
class Starcoder2Config(LlamaLikeConfig):
    """Config of StarCoder2; other fields are those of `LlamaLikeConfig`.

    Args:
        bias: use biases in all linear layers of the blocks.
        embed_dropout: dropout probability of the embedding.
        dropout: dropout probability of the outputs of attention and MLP.
        window: size of the sliding window in tokens; 0 for no window.
    """

    family: ClassVar[str] = "starcoder2"
    has_gate: ClassVar[bool] = False
    heads: ClassVar[dict[str, Head]] = llama_heads("Starcoder2", classifiers=("sequence", "token"))
    hf_names: ClassVar[dict[str, str]] = llama_names_with(
        norm_eps="norm_epsilon",
        bias="use_bias",
        embed_dropout="embedding_dropout",
        dropout="residual_dropout",
    )
    # Fields of the published configs that no code reads.
    hf_ignored: ClassVar[frozenset[str]] = frozenset({"mlp_type", "norm_type"})
    hf_defaults: ClassVar[dict[str, Any]] = {"init_std": 0.018042}
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "starcoder2-3b": {"rope_theta": 999999.4420358813},
        "starcoder2-7b": {**preset_size(4608, 18432, 32, 36, 4), "rope_theta": 1e6},
        "starcoder2-15b": {
            **preset_size(6144, 24576, 40, 48, 4),
            "rope_theta": 1e5,
            "tie_word_embeddings": False,
        },
    }
    hub_ids: ClassVar[dict[str, str]] = {name: f"bigcode/{name}" for name in presets}

    vocab_size: int = 49152
    hidden_size: int = 3072
    intermediate_size: int = 12288
    num_layers: int = 30
    num_heads: int = 24
    num_kv_heads: int = 2
    max_seq_len: int = 16384
    norm_eps: float = 1e-5
    init_std: float = 0.018042
    tie_word_embeddings: bool = True
    activation: str = "gelu_pytorch_tanh"
    bias: bool = True
    embed_dropout: float = 0.0
    dropout: float = 0.0
    window: int = 4096

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        values, raw = super()._read_special(raw)
        return {**values, "window": raw.pop("sliding_window", None) or 0}, raw

    def _write_special(self) -> dict[str, Any]:
        return {**super()._write_special(), "sliding_window": self.window or None}


class Starcoder2(LlamaLike):
    """StarCoder2 with a language-model head."""

    config_class = Starcoder2Config

    @classmethod
    def make_block(cls, config: Starcoder2Config) -> BlockSpec:
        """Return the spec of a block with layer norms, biases and an MLP without a gate."""
        block, bias = super().make_block(config), config.bias
        assert block.attn is not None
        assert block.mlp is not None
        window = config.window or None
        return replace(
            block,
            attn=replace(block.attn, qkv_bias=bias, out_bias=bias, window=window),
            mlp=replace(block.mlp, bias=bias),
            norm=NormSpec("layer", config.norm_eps),
            residual_dropout=config.dropout,
        )

    @classmethod
    def make_spec(cls, config: Starcoder2Config) -> DecoderSpec:
        """Return the `DecoderSpec` of the model."""
        return replace(super().make_spec(config), embed_dropout=config.embed_dropout)

    def weight_rules(self) -> list[WeightRule]:
        """Map parameter names to transformers' names."""
        block, published = "layers.{i}.", "model.layers.{i}."
        parts = {
            "norm": "model.norm",
            f"{block}attn_norm": f"{published}input_layernorm",
            f"{block}mlp_norm": f"{published}post_attention_layernorm",
            f"{block}mlp.up_proj": f"{published}mlp.c_fc",
            f"{block}mlp.down_proj": f"{published}mlp.c_proj",
        }
        attention = [rule for rule in llama_rules() if ".attn." in rule.parameter]
        embed = WeightRule("embed.weight", "model.embed_tokens.weight")
        return [embed, *attention, *linear_rules(parts)]
