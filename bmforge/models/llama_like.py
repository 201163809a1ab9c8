"""Base classes of Llama, and of decoders that differ from it in config fields, names and options.

Such a family overrides `make_block` (its block) and, if needed, `make_spec` (embedding, RoPE and
head) and `weight_rules`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from bmforge.models.causal_lm import CausalLM, DecoderSpec
from bmforge.models.heads import Head, classifier_heads
from bmforge.models.rotary import RotaryConfig
from bmforge.models.weights import WeightRule, linear_rules
from bmforge.nn import AttentionSpec, BlockSpec, MLPSpec, NormSpec

__all__ = [
    "LLAMA_NAMES",
    "LlamaLike",
    "LlamaLikeConfig",
    "PartialRotaryConfig",
    "fused_qkv_rules",
    "gate_up_rules",
    "llama_heads",
    "llama_rules",
    "preset_size",
    "llama_names_with",
    "rules_with_norms",
]

_ATTENTION_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
# Config fields that these families share -> transformers' names.
LLAMA_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "activation": "hidden_act",
    "attn_dropout": "attention_dropout",
    "pad_token_id": "pad_token_id",
    "init_std": "initializer_range",
    "tie_word_embeddings": "tie_word_embeddings",
}


def preset_size(hidden: int, intermediate: int, layers: int, heads: int, kv: int) -> dict[str, Any]:
    """Return the size fields of a preset."""
    names = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
    return dict(zip(names, (hidden, intermediate, layers, heads, kv), strict=True))


def llama_names_with(**names: str) -> dict[str, str]:
    """Return a copy of `LLAMA_NAMES` with some names replaced or added."""
    return {**LLAMA_NAMES, **names}


def llama_heads(
    stem: str,
    question_prefix: str | None = None,
    classifiers: Collection[str] = ("sequence", "token", "question"),
    alias: str = "",
) -> dict[str, Head]:
    """Return a dict from head name to head for Llama and families that are derived from it.

    Args:
        stem: prefix of transformers' class names.
        question_prefix: prefix of the body's parameter names in question answering checkpoints.
        classifiers: classification heads that transformers has for the family: "sequence",
            "token", and "question" for question answering.
        alias: class-name prefix of another architecture whose checkpoints these heads can load.
    """
    heads = classifier_heads(stem, "score", "score", "qa_outputs", sequence_bias=False)
    heads["question_answering"] = replace(heads["question_answering"], prefix=question_prefix)
    heads = {
        "language_model": Head(f"{stem}ForCausalLM", {"lm_head.weight": "lm_head.weight"}),
        **{name: head for name, head in heads.items() if name.split("_")[0] in classifiers},
        "none": Head(f"{stem}Model", prefix=""),
    }
    if not alias:
        return heads
    return {
        name: replace(head, aliases=(head.architecture.replace(stem, alias),))
        for name, head in heads.items()
    }


def llama_rules() -> list[WeightRule]:
    """Map the parameter names of embedding, blocks and norm to transformers' names."""
    block, published = "layers.{i}.", "model.layers.{i}."
    parts = {f"{block}attn.{p}": f"{published}self_attn.{p}" for p in _ATTENTION_PARTS}
    parts |= {
        f"{block}mlp.{p}": f"{published}mlp.{p}" for p in ("gate_proj", "up_proj", "down_proj")
    }
    return [
        WeightRule("embed.weight", "model.embed_tokens.weight"),
        WeightRule("norm.weight", "model.norm.weight"),
        WeightRule(f"{block}attn_norm.weight", f"{published}input_layernorm.weight"),
        WeightRule(f"{block}mlp_norm.weight", f"{published}post_attention_layernorm.weight"),
        *linear_rules(parts),
    ]


def gate_up_rules(width: int) -> list[WeightRule]:
    """Map an MLP's gate and up projections to the rows of one fused checkpoint tensor.

    Args:
        width: hidden width F of the MLP.
    """
    return [
        WeightRule(
            f"layers.{{i}}.mlp.{part}.weight",
            "model.layers.{i}.mlp.gate_up_proj.weight",
            part=(number * width, 2 * width),
        )
        for number, part in enumerate(("gate_proj", "up_proj"))
    ]


def rules_with_norms(names: dict[str, str]) -> list[WeightRule]:
    """Map parameter names to Llama's, except for the norms of a block.

    Args:
        names: mapping from bmforge's name of each norm of a block to transformers' name.
    """
    rules = [r for r in llama_rules() if not re.search(r"\}\.(attn|mlp)_norm\.", r.parameter)]
    norms = {f"layers.{{i}}.{a}": f"model.layers.{{i}}.{b}" for a, b in names.items()}
    return [*rules, *linear_rules(norms, ("weight",))]


def fused_qkv_rules(published: str, config: Any, groups: int = 1) -> list[WeightRule]:
    """Map the parameters of q, k and v to the rows of one fused checkpoint tensor.

    Args:
        published: transformers' name of the layer.
        config: config with `num_heads`, `num_kv_heads` and `head_dim`.
        groups: number of groups of heads. The rows are ordered by group, and within a group by
            q, k and v; 1 means all of q, then all of k, then all of v.
    """
    heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    rows = {part: count * config.head_dim for part, count in heads.items()}
    rules, first, total = [], 0, sum(rows.values())
    for part, count in rows.items():
        rules += [
            WeightRule(
                f"layers.{{i}}.attn.{part}_proj.{kind}",
                f"{published}.{kind}",
                part=(first, total),
                groups=groups,
            )
            for kind in ("weight", "bias")
        ]
        first += count
    return rules


@dataclass(kw_only=True)
class LlamaLikeConfig(RotaryConfig):
    """Config fields of Llama-like decoders; other fields are those of `RotaryConfig`.

    Args:
        activation: activation of the MLP.
        attn_dropout: dropout probability of attention weights.
        pad_token_id: id of padding tokens, whose embedding gets no gradient; None for no padding.
    """

    hf_names: ClassVar[dict[str, str]] = LLAMA_NAMES
    # Base of the rotary frequencies if config.json contains none.
    default_theta: ClassVar[float] = 10000.0
    has_gate: ClassVar[bool] = True

    num_kv_heads: int = 0
    head_dim: int = 0
    norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    activation: str = "silu"
    attn_dropout: float = 0.0
    pad_token_id: int | None = None

    @property
    def is_gated(self) -> bool:
        """True if the family's MLP has a gate."""
        return self.has_gate

    def omit_head_dim(self, out: dict[str, Any]) -> dict[str, Any]:
        """Remove head_dim from a config.json if it is hidden_size / num_heads and not in `raw`."""
        if self.head_dim == self.hidden_size // self.num_heads and self.raw.get("head_dim") is None:
            del out["head_dim"]
        return out

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        stated = {**raw, **(raw.get("rope_parameters") or raw.get("rope_scaling") or {})}
        if stated.get("rope_theta") is None:
            raw["rope_theta"] = cls.default_theta
        return super()._read_special(raw)


@dataclass(kw_only=True)
class PartialRotaryConfig(LlamaLikeConfig):
    """Config of a family that rotates only the first dims of each head.

    Args:
        rotary_part: fraction of a head's dims that are rotated, from 0 to 1.
    """

    # Fraction if config.json contains none.
    default_part: ClassVar[float] = 1.0

    rotary_part: float = 1.0

    def rope_spec(self, rotary_dim: int = 0, interleaved: bool = False) -> Any:
        """Return the `RopeSpec`; `rotary_dim` defaults to `rotary_part` of head_dim."""
        rotary_dim = rotary_dim or int(self.head_dim * self.rotary_part)
        return super().rope_spec(rotary_dim, interleaved)

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        part = raw.pop("partial_rotary_factor", None)
        for name in ("rope_parameters", "rope_scaling"):
            fields = dict(raw.get(name) or {})
            inner = fields.pop("partial_rotary_factor", None)
            part = part if inner is None else inner
            if name in raw:
                raw[name] = fields or None
        values, raw = super()._read_special(raw)
        return {**values, "rotary_part": cls.default_part if part is None else part}, raw

    def _write_special(self) -> dict[str, Any]:
        out, part = super()._write_special(), {"partial_rotary_factor": self.rotary_part}
        if not self.raw.get("rope_parameters"):
            return {**out, **part}
        # transformers 5 stores it with the other rotary parameters.
        scaling = out["rope_scaling"] or {"rope_type": "default"}
        return {**out, "rope_scaling": {**scaling, **part}}


class LlamaLike(CausalLM):
    """Decoder with Llama's block, as modified by a family."""

    hf_prefix = "model."

    def __init__(self, config: Any) -> None:
        super().__init__(config, self.make_spec(config))

    @classmethod
    def make_block(cls, config: Any) -> BlockSpec:
        """Return the spec of the family's block; the default is Llama's.

        The config's fields `attn_bias` and `mlp_bias`, if it has them, enable biases.
        """
        attn_bias = getattr(config, "attn_bias", False)
        attn = AttentionSpec(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            qkv_bias=attn_bias,
            out_bias=attn_bias,
            dropout=config.attn_dropout,
        )
        mlp = MLPSpec(
            config.intermediate_size,
            config.activation,
            gated=config.has_gate,
            bias=getattr(config, "mlp_bias", False),
        )
        return BlockSpec(config.hidden_size, attn, mlp, norm=NormSpec("rms", config.norm_eps))

    @classmethod
    def make_spec(cls, config: Any) -> DecoderSpec:
        """Return the `DecoderSpec` of the model."""
        return DecoderSpec(
            cls.make_block(config), rope=config.rope_spec(), padding_id=config.pad_token_id
        )

    def weight_rules(self) -> list[WeightRule]:
        """Map parameter names to transformers' names, which equal Llama's."""
        return llama_rules()
