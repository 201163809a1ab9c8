"""Llama 1, 2 and 3 (Touvron et al. 2023; "The Llama 3 Herd of Models", Meta 2024)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from bmforge.errors import ConfigError
from bmforge.models.causal_lm import CausalLM
from bmforge.models.config import ModelConfig
from bmforge.models.weights import WeightRule
from bmforge.nn import BlockSpec, RopeSpec

__all__ = ["Llama", "LlamaConfig", "rope_from_hf", "rope_to_hf"]

# transformers' name of a rotary scaling number -> RopeSpec's.
_ROPE_NAMES = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_seq_len",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
    "short_factor": "short_factor",
    "long_factor": "long_factor",
}


def rope_from_hf(raw: dict[str, Any]) -> dict[str, Any]:
    """Take the rotary fields out of a transformers config, old form or new.

    Args:
        raw: config.json's contents; the rotary fields are removed from it.

    Returns:
        `rope_theta` and `rope_scaling` (a dict with `kind` and RopeSpec's names, or empty).

    Raises:
        ConfigError: a scaling kind or number that is not understood.
    """
    parameters = dict(raw.pop("rope_parameters", None) or raw.pop("rope_scaling", None) or {})
    raw.pop("rope_scaling", None)
    theta = parameters.pop("rope_theta", None) or raw.pop("rope_theta", None) or 10000.0
    raw.pop("rope_theta", None)
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    unknown = [name for name in parameters if name not in _ROPE_NAMES]
    if unknown:
        raise ConfigError(f"rotary scaling {kind!r} has fields that are not understood: {unknown}.")
    scaling = {_ROPE_NAMES[n]: v for n, v in parameters.items() if v is not None}
    return {
        "rope_theta": float(theta),
        "rope_scaling": {} if kind == "default" else {"kind": kind, **scaling},
    }


def rope_to_hf(theta: float, scaling: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary fields in the form that transformers 4 and 5 both read."""
    ours = {our: their for their, our in _ROPE_NAMES.items()}
    numbers = {ours[n]: v for n, v in scaling.items() if n != "kind"}
    return {
        "rope_theta": theta,
        "rope_scaling": {"rope_type": scaling["kind"], **numbers} if scaling else None,
    }


def _size(hidden: int, intermediate: int, layers: int, heads: int, kv: int) -> dict[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
    return dict(zip(names, (hidden, intermediate, layers, heads, kv), strict=True))


_LLAMA2 = {"max_seq_len": 4096, "norm_eps": 1e-5}
_LLAMA3 = {"vocab_size": 128256, "max_seq_len": 8192, "norm_eps": 1e-5, "rope_theta": 5e5}
_LLAMA31 = {
    **_LLAMA3,
    "max_seq_len": 131072,
    "rope_scaling": {
        "kind": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_seq_len": 8192,
    },
}
_LLAMA32 = {
    **_LLAMA31,
    "tie_word_embeddings": True,
    "rope_scaling": {**_LLAMA31["rope_scaling"], "factor": 32.0},  # type: ignore[dict-item]
}


@dataclass(kw_only=True)
class LlamaConfig(ModelConfig):
    """Sizes of a Llama; the fields not named here are `ModelConfig`'s.

    Args:
        activation: of the gated MLP.
        attn_bias: biases on q, k, v and o.
        mlp_bias: biases in the MLP.
        attn_dropout: on attention weights.
        rope_theta: base of the rotary frequencies.
        rope_scaling: `kind` and the numbers of `nn.RopeSpec`; empty for none.
    """

    family: ClassVar[str] = "llama"
    hf_architecture: ClassVar[str] = "LlamaForCausalLM"
    hf_names: ClassVar[dict[str, str]] = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "max_seq_len": "max_position_embeddings",
        "norm_eps": "rms_norm_eps",
        "activation": "hidden_act",
        "attn_bias": "attention_bias",
        "mlp_bias": "mlp_bias",
        "attn_dropout": "attention_dropout",
        "init_std": "initializer_range",
        "tie_word_embeddings": "tie_word_embeddings",
    }
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "llama-7b": _size(4096, 11008, 32, 32, 32),
        "llama-13b": _size(5120, 13824, 40, 40, 40),
        "llama-30b": _size(6656, 17920, 60, 52, 52),
        "llama-65b": _size(8192, 22016, 80, 64, 64),
        "llama-2-7b": {**_size(4096, 11008, 32, 32, 32), **_LLAMA2},
        "llama-2-13b": {**_size(5120, 13824, 40, 40, 40), **_LLAMA2},
        "llama-2-70b": {**_size(8192, 28672, 80, 64, 8), **_LLAMA2},
        "llama-3-8b": {**_size(4096, 14336, 32, 32, 8), **_LLAMA3},
        "llama-3-70b": {**_size(8192, 28672, 80, 64, 8), **_LLAMA3},
        "llama-3.1-8b": {**_size(4096, 14336, 32, 32, 8), **_LLAMA31},
        "llama-3.1-70b": {**_size(8192, 28672, 80, 64, 8), **_LLAMA31},
        "llama-3.1-405b": {**_size(16384, 53248, 126, 128, 8), **_LLAMA31},
        "llama-3.2-1b": {**_size(2048, 8192, 16, 32, 8), **_LLAMA32},
        "llama-3.2-3b": {**_size(3072, 8192, 28, 24, 8), **_LLAMA32},
    }

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 0
    head_dim: int = 0
    max_seq_len: int = 2048
    norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    activation: str = "silu"
    attn_bias: bool = False
    mlp_bias: bool = False
    attn_dropout: float = 0.0
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Fill in what follows from the rest: K = N, H = D / N."""
        self.num_kv_heads = self.num_kv_heads or self.num_heads
        self.head_dim = self.head_dim or self.hidden_size // self.num_heads
        self.check()
        self.rope_spec()

    @property
    def is_gated(self) -> bool:
        """Llama's MLP has a gate."""
        return True

    def rope_spec(self) -> RopeSpec:
        """Return the rotary embedding these fields describe."""
        numbers: dict[str, Any] = {
            n: tuple(v) if isinstance(v, list) else v for n, v in self.rope_scaling.items()
        }
        kind = numbers.get("kind")
        if kind in ("yarn", "llama3", "longrope"):
            numbers.setdefault("original_seq_len", self.max_seq_len)
        if kind in ("yarn", "longrope"):
            numbers.setdefault("factor", self.max_seq_len / numbers["original_seq_len"])
        elif kind and "factor" not in numbers:
            raise ConfigError(f"rotary scaling {kind!r} needs a factor (was given {numbers}).")
        return RopeSpec(self.head_dim, self.rope_theta, max_seq_len=self.max_seq_len, **numbers)

    @classmethod
    def _take_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return rope_from_hf(raw), raw

    def _give_special(self) -> dict[str, Any]:
        return {**rope_to_hf(self.rope_theta, self.rope_scaling), "rope_parameters": None}

    def to_hf(self) -> dict[str, Any]:
        """Return the config under transformers' names, the rotary fields in one form only."""
        out = super().to_hf()
        return {name: value for name, value in out.items() if name != "rope_parameters"}


class Llama(CausalLM):
    """Llama with a language-model head."""

    config_class = LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        spec = BlockSpec(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            norm="rms",
            norm_eps=config.norm_eps,
            activation=config.activation,
            gated=True,
            qkv_bias=config.attn_bias,
            out_bias=config.attn_bias,
            mlp_bias=config.mlp_bias,
            attn_dropout=config.attn_dropout,
        )
        super().__init__(config, spec, rope=config.rope_spec())

    def weight_rules(self) -> list[WeightRule]:
        """Map to transformers' names; only the names differ."""
        block, theirs = "layers.{i}.", "model.layers.{i}."
        rules = [
            WeightRule("embed.weight", "model.embed_tokens.weight"),
            WeightRule("norm.weight", "model.norm.weight"),
            WeightRule("lm_head.weight", "lm_head.weight"),
            WeightRule(f"{block}attn_norm.weight", f"{theirs}input_layernorm.weight"),
            WeightRule(f"{block}mlp_norm.weight", f"{theirs}post_attention_layernorm.weight"),
        ]
        for kind in ("weight", "bias"):
            for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
                rules.append(
                    WeightRule(f"{block}attn.{part}.{kind}", f"{theirs}self_attn.{part}.{kind}")
                )
            for part in ("gate_proj", "up_proj", "down_proj"):
                rules.append(WeightRule(f"{block}mlp.{part}.{kind}", f"{theirs}mlp.{part}.{kind}"))
        return rules
