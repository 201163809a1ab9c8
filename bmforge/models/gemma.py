"""Gemma 1, 2 and 3, text (Gemma Team, arXiv 2403.08295, 2408.00118 and 2503.19786).

Differences from Llama: the embedding is multiplied by sqrt(D), norms multiply by 1 + weight, and
heads are wider than D / N. Gemma 2 and 3 have a second norm after each sublayer and sliding windows
in most layers. Gemma 2 caps scores and logits; Gemma 3 normalizes q and k and has two rotary
tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from bmforge.models.causal_lm import DecoderSpec
from bmforge.models.heads import Head
from bmforge.models.layer_types import LayerTypes, LayerTypesConfig, LocalRotaryConfig
from bmforge.models.llama_like import (
    LlamaLike,
    LlamaLikeConfig,
    llama_heads,
    llama_names_with,
    preset_size,
    rules_with_norms,
)
from bmforge.models.weights import WeightRule
from bmforge.nn import BlockSpec, NormSpec

__all__ = [
    "Gemma",
    "Gemma2",
    "Gemma2Config",
    "Gemma3",
    "Gemma3Config",
    "GemmaConfig",
]

_REQUIRED: dict[str, tuple[Any, ...]] = {"use_bidirectional_attention": (False, None)}
_NAMES = {"head_dim": "head_dim", "attn_bias": "attention_bias"}
_NAMES2 = {**_NAMES, "activation": "hidden_activation", "query_size": "query_pre_attn_scalar"}
# Old configs contain the activation twice; transformers reads hidden_activation.
_IGNORED2 = frozenset({"hidden_act", "cache_implementation"})


def _heads(stem: str, classifier: str = "", body: str = "") -> dict[str, Head]:
    heads = llama_heads(stem)
    del heads["question_answering"]
    if classifier:
        del heads["token_classification"]
        sequence = heads["sequence_classification"]
        heads["sequence_classification"] = replace(sequence, architecture=classifier)
    heads["none"] = replace(heads["none"], architecture=body or f"{stem}Model")
    return heads


@dataclass(kw_only=True)
class GemmaConfig(LlamaLikeConfig):
    """Config of Gemma 1; other fields are those of `LlamaLikeConfig`.

    Args:
        attn_bias: use biases on q, k, v and o.
    """

    family: ClassVar[str] = "gemma"
    heads: ClassVar[dict[str, Head]] = _heads("Gemma")
    hf_names: ClassVar[dict[str, str]] = llama_names_with(**_NAMES)
    hf_required: ClassVar[dict[str, tuple[Any, ...]]] = _REQUIRED
    hf_ignored: ClassVar[frozenset[str]] = frozenset({"hidden_activation"})
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "gemma-2b": preset_size(2048, 16384, 18, 8, 1),
        "gemma-7b": {},
    }
    hub_ids: ClassVar[dict[str, str]] = {name: f"google/{name}" for name in presets}

    vocab_size: int = 256000
    hidden_size: int = 3072
    intermediate_size: int = 24576
    num_layers: int = 28
    num_heads: int = 16
    num_kv_heads: int = 16
    head_dim: int = 256
    max_seq_len: int = 8192
    tie_word_embeddings: bool = True
    activation: str = "gelu_pytorch_tanh"
    attn_bias: bool = False

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        # The first configs name the exact GELU, but the model was trained with the tanh form.
        if raw.get("hidden_act") == "gelu":
            raw["hidden_act"] = "gelu_pytorch_tanh"
        return super()._read_special(raw)

    def problems(self) -> Iterator[str]:
        """Yield a message for each inconsistency among the fields."""
        yield from super().problems()
        if self.activation == "gelu":  # config.json cannot state it; see `_read_special`
            yield (
                "activation='gelu' is not supported (use 'gelu_pytorch_tanh', which Gemma was "
                "trained with)"
            )


@dataclass(kw_only=True)
class Gemma2Config(LayerTypesConfig):
    """Config of Gemma 2; other fields are those of `LayerTypesConfig`.

    Args:
        attn_bias: use biases on q, k, v and o.
        query_size: width whose inverse square root is the factor on the attention scores.
        attn_softcap: cap of the attention scores; None for no cap.
        logit_softcap: cap of the logits; None for no cap.
    """

    family: ClassVar[str] = "gemma2"
    heads: ClassVar[dict[str, Head]] = _heads("Gemma2")
    hf_names: ClassVar[dict[str, str]] = llama_names_with(**_NAMES2)
    hf_required: ClassVar[dict[str, tuple[Any, ...]]] = _REQUIRED
    hf_ignored: ClassVar[frozenset[str]] = _IGNORED2
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "gemma-2-2b": {},
        "gemma-2-9b": preset_size(3584, 14336, 42, 16, 8),
        "gemma-2-27b": {**preset_size(4608, 36864, 46, 32, 16), "head_dim": 128, "query_size": 144},
    }
    hub_ids: ClassVar[dict[str, str]] = {name: f"google/{name}" for name in presets}

    vocab_size: int = 256000
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_layers: int = 26
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 256
    max_seq_len: int = 8192
    tie_word_embeddings: bool = True
    activation: str = "gelu_pytorch_tanh"
    attn_bias: bool = False
    query_size: float = 256
    attn_softcap: float | None = 50.0
    logit_softcap: float | None = 30.0

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        caps = {own: raw.pop(name, getattr(cls, own)) for own, name in _CAPS.items()}
        values, raw = super()._read_special(raw)
        return {**values, **caps}, raw

    def _write_special(self) -> dict[str, Any]:
        caps = {name: getattr(self, own) for own, name in _CAPS.items()}
        return {**super()._write_special(), **caps}


# In these fields null is a valid value, which means no cap.
_CAPS = {"attn_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}


@dataclass(kw_only=True)
class Gemma3Config(LocalRotaryConfig):
    """Config of Gemma 3's text model; other fields are those of `LocalRotaryConfig`.

    Args:
        attn_bias: use biases on q, k, v and o.
        query_size: width whose inverse square root is the factor on the attention scores.
    """

    family: ClassVar[str] = "gemma3_text"
    full_every: ClassVar[int] = 6
    default_theta: ClassVar[float] = 1e6
    heads: ClassVar[dict[str, Head]] = _heads(
        "Gemma3", "Gemma3TextForSequenceClassification", "Gemma3TextModel"
    )
    hf_names: ClassVar[dict[str, str]] = llama_names_with(**_NAMES2)
    hf_required: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_REQUIRED,
        **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (None,)),
    }
    hf_ignored: ClassVar[frozenset[str]] = _IGNORED2
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "gemma-3-270m": {**preset_size(640, 2048, 18, 4, 1), "window": 512, "max_seq_len": 32768},
        "gemma-3-1b": {**preset_size(1152, 6912, 26, 4, 1), "window": 512, "max_seq_len": 32768},
    }
    hub_ids: ClassVar[dict[str, str]] = {name: f"google/{name}-pt" for name in presets}

    vocab_size: int = 262144
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_layers: int = 26
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 256
    max_seq_len: int = 131072
    rope_theta: float = 1e6
    tie_word_embeddings: bool = True
    activation: str = "gelu_pytorch_tanh"
    attn_bias: bool = False
    query_size: float = 256


class Gemma(LlamaLike):
    """Gemma 1 with a language-model head."""

    config_class: ClassVar[type[LlamaLikeConfig]] = GemmaConfig

    @classmethod
    def make_block(cls, config: Any) -> BlockSpec:
        """Return Llama's block with Gemma's norms (offset 1)."""
        norm = NormSpec("rms", config.norm_eps, offset=1.0)
        return replace(super().make_block(config), norm=norm)

    @classmethod
    def make_spec(cls, config: Any) -> DecoderSpec:
        """Return the `DecoderSpec` of the model, with Gemma's factor on the embedding."""
        scale = math.sqrt(config.hidden_size)
        return replace(super().make_spec(config), embed_scale=scale, rounds_embed_scale=True)


class Gemma2(Gemma, LayerTypes):
    """Gemma 2 with a language-model head."""

    config_class = Gemma2Config

    @classmethod
    def make_block(cls, config: Gemma2Config) -> BlockSpec:
        """Return Gemma's block with two norms per sublayer and capped scores."""
        block = super().make_block(config)
        assert block.attn is not None
        attn = replace(block.attn, scale=config.query_size**-0.5, softcap=config.attn_softcap)
        return replace(block, attn=attn, norm_place="sandwich")

    @classmethod
    def make_spec(cls, config: Gemma2Config) -> DecoderSpec:
        """Return the `DecoderSpec` of the model."""
        return replace(super().make_spec(config), head_softcap=config.logit_softcap)

    def weight_rules(self) -> list[WeightRule]:
        """Map parameter names to transformers' names; a layer has four norms."""
        return rules_with_norms(_NORMS)


_NORMS = {
    "attn_norm": "input_layernorm",
    "attn_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}


class Gemma3(Gemma, LayerTypes):
    """Gemma 3's text model with a language-model head."""

    config_class = Gemma3Config

    @classmethod
    def make_block(cls, config: Gemma3Config) -> BlockSpec:
        """Return Gemma's block with two norms per sublayer and norms of q and k."""
        block = super().make_block(config)
        assert block.attn is not None
        attn = replace(block.attn, scale=config.query_size**-0.5, qk_norm=block.norm)
        return replace(block, attn=attn, norm_place="sandwich")

    def weight_rules(self) -> list[WeightRule]:
        """Map parameter names to transformers' names; a layer has four norms."""
        return rules_with_norms(_NORMS)
