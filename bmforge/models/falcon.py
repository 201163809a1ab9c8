"""Falcon (Almazrouei et al., "The Falcon Series of Open Language Models", arXiv 2311.16867).

Falcon-RW adds a bias to the scores (ALiBi) instead of rotating q and k; it runs with transformers'
implementation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from bmforge.models.causal_lm import DecoderSpec
from bmforge.models.heads import Head, classifier_heads
from bmforge.models.llama_like import (
    LlamaLike,
    LlamaLikeConfig,
    fused_qkv_rules,
    llama_names_with,
)
from bmforge.models.weights import WeightRule, linear_rules
from bmforge.nn import BlockSpec, NormSpec
from bmforge.nn.block import NormPlace

__all__ = ["Falcon", "FalconConfig"]


@dataclass(kw_only=True)
class FalconConfig(LlamaLikeConfig):
    """Config of Falcon; other fields are those of `LlamaLikeConfig`.

    Args:
        new_decoder_architecture: in the fused projection, the rows of each key-value head follow
            those of its query heads (Falcon-40B, 180B and 11B); False for Falcon-7B, which has one
            key-value head, and for models with as many key-value heads as query heads.
        parallel_norms: use separate norms for attention and MLP (Falcon-40B, 180B).
        parallel_attn: compute attention and MLP in parallel, both from the block's input.
        bias: use biases in all projections.
        dropout: dropout probability of the outputs of attention and MLP.
    """

    family: ClassVar[str] = "falcon"
    has_gate: ClassVar[bool] = False
    heads: ClassVar[dict[str, Head]] = {
        "language_model": Head("FalconForCausalLM", {"lm_head.weight": "lm_head.weight"}),
        **classifier_heads("Falcon", "score", "classifier", "qa_outputs", sequence_bias=False),
        "none": Head("FalconModel", prefix=""),
    }
    hf_names: ClassVar[dict[str, str]] = llama_names_with(
        num_kv_heads="num_kv_heads",
        intermediate_size="ffn_hidden_size",
        norm_eps="layer_norm_epsilon",
        activation="activation",
        new_decoder_architecture="new_decoder_architecture",
        parallel_attn="parallel_attn",
        bias="bias",
        dropout="hidden_dropout",
    )
    hf_required: ClassVar[dict[str, tuple[Any, ...]]] = {
        **dict.fromkeys(("alibi", "apply_residual_connection_post_layernorm"), (False, None)),
    }
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "falcon-7b": {},
        "falcon-40b": {
            "hidden_size": 8192,
            "num_layers": 60,
            "num_heads": 128,
            "num_kv_heads": 8,
            "new_decoder_architecture": True,
            "parallel_norms": True,
        },
        "falcon-11b": {
            "hidden_size": 4096,
            "num_layers": 60,
            "num_heads": 32,
            "num_kv_heads": 8,
            "max_seq_len": 8192,
            "rope_theta": 500042.0,
            "new_decoder_architecture": True,
            "tie_word_embeddings": False,
        },
    }
    hub_ids: ClassVar[dict[str, str]] = {
        "falcon-7b": "tiiuae/falcon-7b",
        "falcon-40b": "tiiuae/falcon-40b",
        "falcon-11b": "tiiuae/falcon-11B",
    }

    vocab_size: int = 65024
    hidden_size: int = 4544
    intermediate_size: int = 0
    num_layers: int = 32
    num_heads: int = 71
    num_kv_heads: int = 1
    max_seq_len: int = 2048
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    activation: str = "gelu"
    new_decoder_architecture: bool = False
    parallel_norms: bool = False
    parallel_attn: bool = True
    bias: bool = False
    dropout: float = 0.0

    def problems(self) -> Iterator[str]:
        """Yield a message for each inconsistency among the fields."""
        yield from super().problems()
        if not self.new_decoder_architecture and self.num_kv_heads not in (1, self.num_heads):
            yield (
                f"num_kv_heads={self.num_kv_heads} needs new_decoder_architecture=True (without "
                f"it: 1 or num_heads={self.num_heads})"
            )
        if self.parallel_norms and not self.new_decoder_architecture:
            yield "parallel_norms=True needs new_decoder_architecture=True"
        if self.new_decoder_architecture and not self.parallel_attn:
            yield "new_decoder_architecture=True needs parallel_attn=True"

    @classmethod
    def opens(cls, raw: dict[str, Any]) -> bool:
        """Return True for a config.json of this family, unless it has ALiBi (unsupported)."""
        return super().opens(raw) and not raw.get("alibi")

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        kv_heads, is_multi_query = raw.pop("num_kv_heads", None), raw.pop("multi_query", True)
        norms, is_new = (
            raw.pop("num_ln_in_parallel_attn", None),
            raw.get("new_decoder_architecture"),
        )
        heads = raw.get("num_attention_heads", cls.num_heads)
        values, raw = super()._read_special(raw)
        if is_new:
            values["num_kv_heads"] = heads if kv_heads is None else kv_heads
        else:
            values["num_kv_heads"] = 1 if is_multi_query else heads
        values["parallel_norms"] = bool(is_new) and norms in (None, 2)
        return values, raw

    def _write_special(self) -> dict[str, Any]:
        is_multi_query = self.num_kv_heads == 1
        if self.new_decoder_architecture:  # transformers does not read the field
            is_multi_query = self.raw.get("multi_query", True)
        norms = (2 if self.parallel_norms else 1) if self.new_decoder_architecture else None
        kv_heads = self.num_kv_heads if self.new_decoder_architecture else self.num_heads
        own = {"multi_query": is_multi_query, "num_ln_in_parallel_attn": norms}
        return {**super()._write_special(), **own, "num_kv_heads": kv_heads, "alibi": False}


class Falcon(LlamaLike):
    """Falcon with a language-model head."""

    config_class = FalconConfig
    hf_prefix = "transformer."

    @classmethod
    def make_block(cls, config: FalconConfig) -> BlockSpec:
        """Return the spec of a block with layer norms and parallel or sequential sublayers."""
        block = super().make_block(config)
        assert block.attn is not None
        assert block.mlp is not None
        norm_place: NormPlace = "pre"
        if config.parallel_attn:
            norm_place = "parallel_norms" if config.parallel_norms else "parallel"
        return replace(
            block,
            attn=replace(block.attn, qkv_bias=config.bias, out_bias=config.bias),
            mlp=replace(block.mlp, bias=config.bias),
            norm=NormSpec("layer", config.norm_eps),
            norm_place=norm_place,
            residual_dropout=config.dropout,
        )

    @classmethod
    def make_spec(cls, config: FalconConfig) -> DecoderSpec:
        """Return the `DecoderSpec` of the model."""
        return replace(super().make_spec(config), padding_id=None)

    def weight_rules(self) -> list[WeightRule]:
        """Map parameter names to transformers' names."""
        config, block, published = self.config, "layers.{i}.", "transformer.h.{i}."
        norms = {f"{block}attn_norm": f"{published}input_layernorm"}
        if config.parallel_norms:
            norms = {f"{block}{a}_norm": f"{published}ln_{a}" for a in ("attn", "mlp")}
        elif not config.parallel_attn:
            norms[f"{block}mlp_norm"] = f"{published}post_attention_layernorm"
        modules = {
            "norm": "transformer.ln_f",
            **norms,
            f"{block}attn.o_proj": f"{published}self_attention.dense",
            f"{block}mlp.up_proj": f"{published}mlp.dense_h_to_4h",
            f"{block}mlp.down_proj": f"{published}mlp.dense_4h_to_h",
        }
        is_split = config.num_kv_heads == 1 and not config.new_decoder_architecture
        return [
            WeightRule("embed.weight", "transformer.word_embeddings.weight"),
            *linear_rules(modules),
            *fused_qkv_rules(
                f"{published}self_attention.query_key_value",
                config,
                groups=1 if is_split else config.num_kv_heads,
            ),
        ]
