"""gpt-oss (OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", arXiv 2508.10925).

The block is Llama's with biases, a sliding window and attention sinks. Every layer has experts;
their router and projections have biases, and their gate is clamped. MXFP4 experts are read as
floats.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from bmforge.models.heads import Head
from bmforge.models.layer_types import LayerTypesConfig
from bmforge.models.llama_like import llama_heads, llama_rules
from bmforge.models.mixtral import Mixtral, MixtralConfig
from bmforge.models.weights import WeightRule, linear_rules
from bmforge.nn import AttentionSpec, MLPSpec, MoESpec
from bmforge.nn.mlp import SWIGLU_ALPHA

__all__ = ["GptOss", "GptOssConfig"]


def _yarn() -> dict[str, Any]:
    numbers = {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
    return {"kind": "yarn", **numbers, "original_seq_len": 4096, "truncate": False}


@dataclass(kw_only=True)
class GptOssConfig(LayerTypesConfig, MixtralConfig):
    """Config of gpt-oss; other fields are those of `LayerTypesConfig` and `MixtralConfig`.

    Args:
        attn_bias: use biases on q, k, v and o.
        swiglu_limit: limit on the inputs of the experts' gate.
    """

    family: ClassVar[str] = "gpt_oss"
    default_window: ClassVar[int] = 128
    default_theta: ClassVar[float] = 150000.0
    heads: ClassVar[dict[str, Head]] = llama_heads("GptOss", classifiers=("sequence", "token"))
    hf_names: ClassVar[dict[str, str]] = {
        **MixtralConfig.hf_names,
        "attn_bias": "attention_bias",
        "swiglu_limit": "swiglu_limit",
    }
    hf_required: ClassVar[dict[str, tuple[Any, ...]]] = {"swiglu_alpha": (SWIGLU_ALPHA, None)}
    hf_ignored: ClassVar[frozenset[str]] = frozenset({"initial_context_length"})
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "gpt-oss-20b": {"num_layers": 24, "num_experts": 32},
        "gpt-oss-120b": {},
    }
    hub_ids: ClassVar[dict[str, str]] = {
        "gpt-oss-20b": "openai/gpt-oss-20b",
        "gpt-oss-120b": "openai/gpt-oss-120b",
    }

    vocab_size: int = 201088
    hidden_size: int = 2880
    intermediate_size: int = 2880
    num_layers: int = 36
    num_heads: int = 64
    num_kv_heads: int = 8
    head_dim: int = 64
    max_seq_len: int = 131072
    norm_eps: float = 1e-5
    rope_theta: float = 150000.0
    rope_scaling: dict[str, Any] = field(default_factory=_yarn)
    num_experts: int = 128
    experts_per_token: int = 4
    window: int = 128
    attn_bias: bool = True
    swiglu_limit: float = 7.0

    def attn_spec(self) -> AttentionSpec:
        """Return the attention spec that all layers share, without the sliding window."""
        bias = self.attn_bias
        return replace(super().attn_spec(), qkv_bias=bias, out_bias=bias, sinks=True)

    def layer_windows(self) -> tuple[int | None, ...]:
        """Return the window size of every layer; None for no window."""
        slides = set(self.sliding_layers)
        return tuple(self.window if i in slides else None for i in range(self.num_layers))

    def layer_mlps(self) -> tuple[MLPSpec | MoESpec, ...]:
        """Return the spec of the experts for each layer."""
        spec = MoESpec(
            self.num_experts,
            self.experts_per_token,
            self.intermediate_size,
            bias=True,
            router_bias=True,
            swiglu_limit=self.swiglu_limit,
        )
        return (spec,) * self.num_layers

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        if "experts_per_token" in raw:  # another name of num_experts_per_tok
            raw.setdefault("num_experts_per_tok", raw["experts_per_token"])
            del raw["experts_per_token"]
        is_scaled = raw.get("rope_parameters") or raw.get("rope_scaling")
        values, raw = super()._read_special(raw)
        return values if is_scaled else {**values, "rope_scaling": _yarn()}, raw

    @classmethod
    def _read_windows(cls, raw: dict[str, Any]) -> dict[str, Any]:
        return {}  # `LayerTypesConfig` reads the window fields

    def _write_special(self) -> dict[str, Any]:
        out = super()._write_special()
        # If the field is absent, transformers uses the YaRN scaling of the published checkpoints.
        return out if self.rope_scaling else {**out, "rope_scaling": {"rope_type": "default"}}

    def to_hf(self) -> dict[str, Any]:
        """Return the contents of config.json with head_dim, which transformers does not derive."""
        return {**super().to_hf(), "head_dim": self.head_dim}


class GptOss(Mixtral):
    """gpt-oss with a language-model head."""

    config_class = GptOssConfig

    def weight_rules(self) -> list[WeightRule]:
        """Map parameter names to transformers' names.

        transformers stores the gate and up projections as alternating rows of one tensor.
        """
        own, published = "layers.{i}.", "model.layers.{i}."
        size, experts = self.config.intermediate_size, f"{published}mlp.experts."
        rules = [
            WeightRule(f"{own}attn.sinks.bias", f"{published}self_attn.sinks"),
            WeightRule(f"{own}mlp.experts.down_proj", f"{experts}down_proj", transpose=True),
            WeightRule(f"{own}mlp.down_bias", f"{experts}down_proj_bias"),
        ]
        for number, part in enumerate(("gate", "up")):
            fused: dict[str, Any] = {"part": (number, 2 * size), "part_dim": 1, "step": 2}
            weight = f"{own}mlp.experts.{part}_proj", f"{experts}gate_up_proj"
            bias = f"{own}mlp.experts.{part}_bias", f"{experts}gate_up_proj_bias"
            rules += [WeightRule(*weight, transpose=True, **fused), WeightRule(*bias, **fused)]
        router = linear_rules({f"{own}mlp.router": f"{published}mlp.router"})
        return [*llama_rules(), *router, *rules]
