"""BLOOM and BLOOMZ (Le Scao et al., "BLOOM: A 176B-Parameter Open-Access Multilingual Language
Model", arXiv 2211.05100).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from bmforge.models.causal_lm import CausalLM, DecoderSpec
from bmforge.models.config import ModelConfig
from bmforge.models.heads import Head, classifier_heads
from bmforge.models.llama_like import fused_qkv_rules
from bmforge.models.traits import Traits
from bmforge.models.weights import WeightRule, linear_rules
from bmforge.nn import AttentionSpec, BlockSpec, MLPSpec, NormSpec

__all__ = ["Bloom", "BloomConfig"]

# Former names of fields in published config.json files.
_FORMER = {
    "n_embed": "hidden_size",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
_DEFAULT_LENGTH = 2048


def _size(hidden_size: int, num_layers: int, num_heads: int) -> dict[str, int]:
    return {"hidden_size": hidden_size, "num_layers": num_layers, "num_heads": num_heads}


@dataclass(kw_only=True)
class BloomConfig(ModelConfig):
    """Config of BLOOM; other fields are those of `ModelConfig`.

    Args:
        dropout: dropout probability of the outputs of attention and MLP.
        attn_dropout: dropout probability of attention weights.
    """

    family: ClassVar[str] = "bloom"
    heads: ClassVar[dict[str, Head]] = {
        "language_model": Head("BloomForCausalLM", {"lm_head.weight": "lm_head.weight"}),
        **classifier_heads("Bloom", "score", "classifier", "qa_outputs", sequence_bias=False),
        "none": Head("BloomModel", prefix=""),
    }
    hf_names: ClassVar[dict[str, str]] = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "norm_eps": "layer_norm_epsilon",
        "dropout": "hidden_dropout",
        "attn_dropout": "attention_dropout",
        "init_std": "initializer_range",
        "tie_word_embeddings": "tie_word_embeddings",
    }
    # Options of Megatron's kernels, and fields that transformers does not read for BLOOM.
    hf_ignored: ClassVar[frozenset[str]] = frozenset(
        {
            *("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion"),
            *("offset_alibi", "skip_bias_add", "skip_bias_add_qkv", "slow_but_exact", "n_inner"),
            *("unk_token_id", "classifier_dropout"),
        }
    )
    hf_required: ClassVar[dict[str, tuple[Any, ...]]] = {
        "apply_residual_connection_post_layernorm": (False, None)
    }
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "bloom-560m": _size(1024, 24, 16),
        "bloom-1b1": _size(1536, 24, 16),
        "bloom-1b7": _size(2048, 24, 16),
        "bloom-3b": _size(2560, 30, 32),
        "bloom-7b1": _size(4096, 30, 32),
        "bloom": _size(14336, 70, 112),
    }
    hub_ids: ClassVar[dict[str, str]] = {name: f"bigscience/{name}" for name in presets}

    vocab_size: int = 250880
    hidden_size: int = 14336
    intermediate_size: int = 0
    num_layers: int = 70
    num_heads: int = 112
    num_kv_heads: int = 0
    head_dim: int = 0
    max_seq_len: int = _DEFAULT_LENGTH
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    dropout: float = 0.0
    attn_dropout: float = 0.0

    def problems(self) -> Iterator[str]:
        """Yield a message for each inconsistency among the fields."""
        yield from super().problems()
        yield from self.find_unsavable(intermediate_size=4 * self.hidden_size)

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        for former, name in _FORMER.items():
            value = raw.pop(former, None)
            if value is not None:
                raw.setdefault(name, value)
        return {"max_seq_len": raw.pop("seq_length", None) or _DEFAULT_LENGTH}, raw

    def _write_special(self) -> dict[str, Any]:
        is_stated = "seq_length" in self.raw or self.max_seq_len != _DEFAULT_LENGTH
        return {"seq_length": self.max_seq_len} if is_stated else {}

    def to_hf(self) -> dict[str, Any]:
        """Return the contents of config.json, without field names of old transformers versions."""
        return {name: value for name, value in super().to_hf().items() if name not in _FORMER}


class Bloom(CausalLM):
    """BLOOM: ALiBi instead of position embeddings, and a norm after the token embedding."""

    config_class = BloomConfig
    family_traits = Traits("causal", "next token", "alibi")
    hf_prefix = "transformer."

    def __init__(self, config: BloomConfig) -> None:
        attn = AttentionSpec(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            dropout=config.attn_dropout,
            alibi=True,
        )
        block = BlockSpec(
            config.hidden_size,
            attn,
            MLPSpec(config.intermediate_size, "gelu_tanh"),
            norm=NormSpec("layer", config.norm_eps),
            residual_dropout=config.dropout,
        )
        super().__init__(config, DecoderSpec(block, learned_positions=False, embed_norm=True))

    def weight_rules(self) -> list[WeightRule]:
        """Map parameter names to transformers' names; the fused qkv rows are grouped by head."""
        config, block, published = self.config, "layers.{i}.", "transformer.h.{i}."
        modules = {
            "embed_norm": "transformer.word_embeddings_layernorm",
            "norm": "transformer.ln_f",
            f"{block}attn_norm": f"{published}input_layernorm",
            f"{block}mlp_norm": f"{published}post_attention_layernorm",
            f"{block}attn.o_proj": f"{published}self_attention.dense",
            f"{block}mlp.up_proj": f"{published}mlp.dense_h_to_4h",
            f"{block}mlp.down_proj": f"{published}mlp.dense_4h_to_h",
        }
        return [
            WeightRule("embed.weight", "transformer.word_embeddings.weight"),
            *linear_rules(modules),
            *fused_qkv_rules(
                f"{published}self_attention.query_key_value", config, groups=config.num_heads
            ),
        ]
