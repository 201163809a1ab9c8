"""GPT-NeoX and Pythia (Black et al., "GPT-NeoX-20B", arXiv 2204.06745; Biderman et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from bmforge.models.causal_lm import DecoderSpec
from bmforge.models.heads import Head, classifier_heads
from bmforge.models.llama_like import (
    LlamaLike,
    PartialRotaryConfig,
    fused_qkv_rules,
    llama_names_with,
)
from bmforge.models.weights import WeightRule, linear_rules
from bmforge.nn import BlockSpec, NormSpec

__all__ = ["GPTNeoX", "GPTNeoXConfig"]


def _size(
    hidden_size: int, num_layers: int, num_heads: int, vocab_size: int = 50304
) -> dict[str, int]:
    """Return the size fields of a Pythia preset, with an MLP four times as wide as hidden_size."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
    }


@dataclass(kw_only=True)
class GPTNeoXConfig(PartialRotaryConfig):
    """Config of GPT-NeoX; other fields are those of `PartialRotaryConfig`.

    Args:
        parallel_residual: compute attention and MLP in parallel, both from the block's input; if
            False, the MLP runs after attention.
        attn_bias: use biases on q, k, v and o.
        dropout: dropout probability of the embedding and of the outputs of attention and MLP.
    """

    family: ClassVar[str] = "gpt_neox"
    default_part: ClassVar[float] = 0.25
    has_gate: ClassVar[bool] = False
    heads: ClassVar[dict[str, Head]] = {
        "language_model": Head("GPTNeoXForCausalLM", {"lm_head.weight": "embed_out.weight"}),
        **classifier_heads("GPTNeoX", "score", "classifier", "qa_outputs", sequence_bias=False),
        "none": Head("GPTNeoXModel", prefix=""),
    }
    hf_names: ClassVar[dict[str, str]] = {
        name: published
        for name, published in llama_names_with(
            norm_eps="layer_norm_eps",
            parallel_residual="use_parallel_residual",
            attn_bias="attention_bias",
            dropout="hidden_dropout",
        ).items()
        if name != "num_kv_heads"
    }
    # Dropout before the token classifier.
    hf_ignored: ClassVar[frozenset[str]] = frozenset({"classifier_dropout"})
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "pythia-70m": _size(512, 6, 8),
        "pythia-160m": _size(768, 12, 12),
        "pythia-410m": _size(1024, 24, 16),
        "pythia-1b": _size(2048, 16, 8),
        "pythia-1.4b": _size(2048, 24, 16),
        "pythia-2.8b": _size(2560, 32, 32),
        "pythia-6.9b": _size(4096, 32, 32, 50432),
        "pythia-12b": _size(5120, 36, 40, 50688),
        "gpt-neox-20b": _size(6144, 44, 64, 50432),
    }
    hub_ids: ClassVar[dict[str, str]] = {name: f"EleutherAI/{name}" for name in presets}

    vocab_size: int = 50432
    hidden_size: int = 6144
    intermediate_size: int = 24576
    num_layers: int = 44
    num_heads: int = 64
    max_seq_len: int = 2048
    norm_eps: float = 1e-5
    rotary_part: float = 0.25
    activation: str = "gelu"
    parallel_residual: bool = True
    attn_bias: bool = True
    dropout: float = 0.0

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        part, theta = raw.pop("rotary_pct", None), raw.pop("rotary_emb_base", None)
        stated = raw.get("rope_parameters") or {}
        if part is not None and "partial_rotary_factor" not in stated:
            raw["partial_rotary_factor"] = part
        if theta is not None and "rope_theta" not in stated:
            raw["rope_theta"] = theta
        return super()._read_special(raw)

    def _write_special(self) -> dict[str, Any]:
        out = super()._write_special()
        scaling = {**(out["rope_scaling"] or {})}
        scaling.pop("partial_rotary_factor", None)
        names = {"rotary_pct": self.rotary_part, "rotary_emb_base": self.rope_theta}
        return {"rope_scaling": scaling if self.rope_scaling else None, **names}


class GPTNeoX(LlamaLike):
    """GPT-NeoX with a language-model head."""

    config_class = GPTNeoXConfig
    hf_prefix = "gpt_neox."

    @classmethod
    def make_block(cls, config: GPTNeoXConfig) -> BlockSpec:
        """Return the spec of a block with two layer norms and parallel or sequential sublayers."""
        block = super().make_block(config)
        assert block.mlp is not None
        return replace(
            block,
            mlp=replace(block.mlp, bias=True),
            norm=NormSpec("layer", config.norm_eps),
            norm_place="parallel_norms" if config.parallel_residual else "pre",
            residual_dropout=config.dropout,
        )

    @classmethod
    def make_spec(cls, config: GPTNeoXConfig) -> DecoderSpec:
        """Return the `DecoderSpec` of the model."""
        return replace(super().make_spec(config), embed_dropout=config.dropout, padding_id=None)

    def weight_rules(self) -> list[WeightRule]:
        """Map parameter names to transformers' names; the fused qkv rows are grouped by head."""
        config, block, published = self.config, "layers.{i}.", "gpt_neox.layers.{i}."
        modules = {
            "norm": "gpt_neox.final_layer_norm",
            f"{block}attn_norm": f"{published}input_layernorm",
            f"{block}mlp_norm": f"{published}post_attention_layernorm",
            f"{block}attn.o_proj": f"{published}attention.dense",
            f"{block}mlp.up_proj": f"{published}mlp.dense_h_to_4h",
            f"{block}mlp.down_proj": f"{published}mlp.dense_4h_to_h",
        }
        return [
            WeightRule("embed.weight", "gpt_neox.embed_in.weight"),
            *linear_rules(modules),
            *fused_qkv_rules(
                f"{published}attention.query_key_value", config, groups=config.num_heads
            ),
        ]
