"""ModernBERT (Warner et al., "Smarter, Better, Faster, Longer", arXiv 2412.13663)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from bmforge.models.encoder import EncoderModel, EncoderSpec
from bmforge.models.encoder_config import EncoderConfig
from bmforge.models.heads import Head
from bmforge.models.stack import find_differing_layers
from bmforge.models.traits import Traits
from bmforge.models.weights import WeightRule, linear_rules
from bmforge.nn import AttentionSpec, BlockSpec, MLPSpec, NormSpec, RopeSpec

__all__ = ["ModernBert", "ModernBertConfig"]

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_KINDS = ("weight", "bias")


def _modernbert_heads() -> dict[str, Head]:
    """Return a dict from head name to head; heads start with a linear layer and a norm."""
    masked = {"mlm_head.dense": "head.dense", "mlm_head.norm": "head.norm"}
    classes = {"classifier.dense": "head.dense", "classifier.norm": "head.norm"}

    def spread(names: dict[str, str]) -> dict[str, str]:
        return {f"{a}.{kind}": f"{b}.{kind}" for a, b in names.items() for kind in _KINDS}

    heads = {
        "masked_lm": Head(
            "ModernBertForMaskedLM", spread({**masked, "mlm_head.decoder": "decoder"})
        )
    }
    for name, part in (
        ("sequence_classification", "SequenceClassification"),
        ("token_classification", "TokenClassification"),
        ("question_answering", "QuestionAnswering"),
    ):
        names = spread({**classes, "classifier.out": "classifier"})
        heads[name] = Head(f"ModernBertFor{part}", names)
    return {**heads, "none": Head("ModernBertModel", prefix="")}


@dataclass(kw_only=True)
class ModernBertConfig(EncoderConfig):
    """Config of ModernBERT; other fields are those of `EncoderConfig`.

    Args:
        local_attention: window size of local layers in tokens, half on each side.
        layer_types: "sliding_attention" (local) or "full_attention" for every layer; empty if
            layers 0, 3, 6, ... attend to all tokens and the others are local.
        rope_theta: base of the rotary frequencies of the layers that attend to all tokens.
        local_rope_theta: base of the rotary frequencies of the local layers.
        attn_bias: use biases on q, k, v and o.
        mlp_bias: use biases in the MLP.
        norm_bias: use biases in the norms.
        head_bias: use a bias in the first layer of the heads.
        head_activation: activation function of the prediction heads.
        classifier_pooling: "cls" to classify a sequence by its first token, or "mean".
    """

    family: ClassVar[str] = "modernbert"
    heads: ClassVar[dict[str, Head]] = _modernbert_heads()
    hf_names: ClassVar[dict[str, str]] = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "max_seq_len": "max_position_embeddings",
        "norm_eps": "norm_eps",
        "pad_token_id": "pad_token_id",
        "activation": "hidden_activation",
        "local_attention": "local_attention",
        "attn_bias": "attention_bias",
        "mlp_bias": "mlp_bias",
        "norm_bias": "norm_bias",
        "head_bias": "classifier_bias",
        "head_activation": "classifier_activation",
        "classifier_pooling": "classifier_pooling",
        "dropout": "embedding_dropout",
        "classifier_dropout": "classifier_dropout",
        "init_std": "initializer_range",
        "tie_word_embeddings": "tie_word_embeddings",
    }
    # Fields of the tokenizer, initialization and kernels, and a copy of norm_eps.
    hf_ignored: ClassVar[frozenset[str]] = frozenset(
        {
            *("cls_token_id", "sep_token_id", "initializer_cutoff_factor", "layer_norm_eps"),
            *("deterministic_flash_attn", "reference_compile", "repad_logits_with_grad"),
            *("sparse_prediction", "sparse_pred_ignore_index", "position_embedding_type"),
        }
    )
    hf_required: ClassVar[dict[str, tuple[Any, ...]]] = {
        **dict.fromkeys(("attention_dropout", "mlp_dropout"), (0, 0.0)),
        "decoder_bias": (True,),
    }
    hf_defaults: ClassVar[dict[str, Any]] = {"classifier_dropout": 0.0}
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "modernbert-base": {},
        "modernbert-large": {
            "hidden_size": 1024,
            "intermediate_size": 2624,
            "num_layers": 28,
            "num_heads": 16,
        },
    }
    hub_ids: ClassVar[dict[str, str]] = {
        "modernbert-base": "answerdotai/ModernBERT-base",
        "modernbert-large": "answerdotai/ModernBERT-large",
    }

    vocab_size: int = 50368
    hidden_size: int = 768
    intermediate_size: int = 1152
    num_layers: int = 22
    num_heads: int = 12
    max_seq_len: int = 8192
    norm_eps: float = 1e-5
    num_segments: int = 1
    pad_token_id: int | None = 50283
    local_attention: int = 128
    layer_types: list[str] = field(default_factory=list)
    rope_theta: float = 160000.0
    local_rope_theta: float = 10000.0
    attn_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False
    head_bias: bool = False
    head_activation: str = "gelu"
    classifier_pooling: str = "cls"
    classifier_dropout: float | None = 0.0

    @property
    def is_gated(self) -> bool:
        """Always True: the MLP has a gate."""
        return True

    @property
    def kinds(self) -> list[str]:
        """Type of every layer: `layer_types`, or its default if the field is empty."""
        return self.layer_types or _default_kinds(self.num_layers, 3)

    def problems(self) -> Iterator[str]:
        """Yield a message for each inconsistency among the fields."""
        yield from super().problems()
        if len(self.kinds) != self.num_layers or set(self.kinds) - {_LOCAL, _GLOBAL}:
            yield (
                f"layer_types={self.kinds} must have one entry, {_LOCAL!r} or {_GLOBAL!r}, for "
                f"each of num_layers={self.num_layers} layers"
            )
        yield from self.find_unsavable(attn_dropout=0.0, num_segments=1)
        if self.local_attention < 2:
            yield f"local_attention={self.local_attention} must be at least 2"
        if self.classifier_pooling not in ("cls", "mean"):
            yield f"classifier_pooling={self.classifier_pooling!r} must be 'cls' or 'mean'"

    @classmethod
    def opens(cls, raw: dict[str, Any]) -> bool:
        """Return True for a config.json of this family, unless it scales RoPE (unsupported)."""
        if not super().opens(raw) or raw.get("rope_scaling"):
            return False
        tables = (raw.get("rope_parameters") or {}).values()
        return all(table.get("rope_type", "default") == "default" for table in tables if table)

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        tables = raw.pop("rope_parameters", None) or {}
        former = {_GLOBAL: raw.pop("global_rope_theta", None) or cls.rope_theta}
        former[_LOCAL] = raw.pop("local_rope_theta", None) or cls.local_rope_theta
        values: dict[str, Any] = {}
        for name, kind in (("rope_theta", _GLOBAL), ("local_rope_theta", _LOCAL)):
            values[name] = float((tables.get(kind) or {}).get("rope_theta", former[kind]))
        layers = raw.get("num_hidden_layers", cls.num_layers)
        period = raw.pop("global_attn_every_n_layers", None) or 3
        kinds = raw.pop("layer_types", None) or _default_kinds(layers, period)
        values["layer_types"] = [] if kinds == _default_kinds(layers, 3) else kinds
        return values, raw

    def _write_special(self) -> dict[str, Any]:
        thetas = {_GLOBAL: self.rope_theta, _LOCAL: self.local_rope_theta}
        former = {"global_rope_theta": self.rope_theta, "local_rope_theta": self.local_rope_theta}
        return {
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": theta}
                for kind, theta in thetas.items()
            },
            **{name: value for name, value in former.items() if name in self.raw},
            "layer_types": self.kinds,
        }


def _default_kinds(num_layers: int, period: int) -> list[str]:
    return [_LOCAL if layer % period else _GLOBAL for layer in range(num_layers)]


class ModernBert(EncoderModel):
    """ModernBERT with a masked-LM head, by default tied to the embedding."""

    config_class = ModernBertConfig
    family_traits = Traits("bidirectional", "masked tokens", "rotary")
    hf_prefix = "model."

    def __init__(self, config: ModernBertConfig) -> None:
        heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        bias = config.attn_bias
        attn = AttentionSpec(*heads, causal=False, qkv_bias=bias, out_bias=bias)
        near = replace(attn, window=config.local_attention // 2 + 1, rotary="local")
        mlp = MLPSpec(config.intermediate_size, config.activation, gated=True, bias=config.mlp_bias)
        norm = NormSpec("layer", config.norm_eps, bias=config.norm_bias)
        block = BlockSpec(config.hidden_size, attn, mlp, norm=norm)
        specs = [replace(block, attn=near if kind == _LOCAL else attn) for kind in config.kinds]
        specs[0] = replace(specs[0], norms_attn=False)  # the embedding has a norm
        ropes = [
            RopeSpec(config.head_dim, theta, max_seq_len=config.max_seq_len)
            for theta in (config.rope_theta, config.local_rope_theta)
        ]
        spec = EncoderSpec(
            block,
            find_differing_layers(block, specs),
            rope=ropes[0],
            local_rope=ropes[1],
            embed_dropout=config.dropout,
            classifier_dropout=config.classifier_dropout or 0.0,
            head_activation=config.head_activation,
            head_bias=config.head_bias,
            prediction_head=True,
            final_norm=True,
        )
        super().__init__(config, spec)

    def init_std(self, name: str) -> float:
        """Return a parameter's initial std, which is smaller for residual projections and heads."""
        if name.startswith("classifier.out"):
            return float(self.config.hidden_size**-0.5)
        scaled = (
            "o_proj.weight",
            "down_proj.weight",
            "head.dense.weight",
            "classifier.dense.weight",
        )
        is_scaled = name.endswith(scaled) or name == "mlm_head.decoder.weight"
        return self.config.init_std / (math.sqrt(2 * self.config.num_layers) if is_scaled else 1.0)

    def weight_rules(self) -> list[WeightRule]:
        """Map parameter names to transformers' names; q, k, v and gate, up are fused."""
        config, block, published = self.config, "layers.{i}.", "model.layers.{i}."
        width, inner = config.num_heads * config.head_dim, config.intermediate_size
        modules = {
            "embed_norm": "model.embeddings.norm",
            "norm": "model.final_norm",
            f"{block}attn_norm": f"{published}attn_norm",
            f"{block}mlp_norm": f"{published}mlp_norm",
            f"{block}attn.o_proj": f"{published}attn.Wo",
            f"{block}mlp.down_proj": f"{published}mlp.Wo",
        }
        fused = [
            (f"attn.{part}_proj", "attn.Wqkv", width * n, 3 * width) for n, part in enumerate("qkv")
        ]
        fused += [
            (f"mlp.{part}_proj", "mlp.Wi", inner * n, 2 * inner)
            for n, part in enumerate(("gate", "up"))
        ]
        return [
            WeightRule("embed.weight", "model.embeddings.tok_embeddings.weight"),
            *linear_rules(modules),
            *(
                WeightRule(f"{block}{own}.{kind}", f"{published}{name}.{kind}", part=(first, total))
                for own, name, first, total in fused
                for kind in _KINDS
            ),
        ]
