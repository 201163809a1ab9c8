"""Qwen1.5-MoE, Qwen2-MoE and Qwen3-MoE: layers with experts, and optionally dense layers.

Source: Qwen team, "Qwen1.5-MoE" (2024), "Qwen2 Technical Report" (arXiv 2407.10671), "Qwen3
Technical Report" (arXiv 2505.09388).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from bmforge.models.heads import Head
from bmforge.models.llama_like import llama_heads, llama_rules, preset_size
from bmforge.models.mixtral import Mixtral, MixtralConfig, expert_rules
from bmforge.models.weights import WeightRule, linear_rules
from bmforge.nn import AttentionSpec, MLPSpec, MoESpec, NormSpec

__all__ = ["Qwen2Moe", "Qwen2MoeConfig", "Qwen3Moe", "Qwen3MoeConfig"]

_SLIDING, _FULL = "sliding_attention", "full_attention"
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_QWEN3 = {"head_dim": 128, "max_seq_len": 40960, "rope_theta": 1e6, "normalize_weights": True}


@dataclass(kw_only=True)
class Qwen3MoeConfig(MixtralConfig):
    """Config of Qwen3-MoE; other fields are those of Mixtral.

    Args:
        intermediate_size: hidden width F of layers without experts.
        expert_size: hidden width F of one expert.
        normalize_weights: normalize the weights of a token's experts to sum to 1.
        sparse_step: every `sparse_step`-th layer has experts.
        dense_layers: indices of additional layers without experts.
        attn_bias: use biases on q, k, v and o.
    """

    family: ClassVar[str] = "qwen3_moe"
    heads: ClassVar[dict[str, Head]] = llama_heads("Qwen3Moe", question_prefix="transformer.")
    hf_names: ClassVar[dict[str, str]] = {
        **MixtralConfig.hf_names,
        "num_experts": "num_experts",
        "expert_size": "moe_intermediate_size",
        "normalize_weights": "norm_topk_prob",
        "sparse_step": "decoder_sparse_step",
        "dense_layers": "mlp_only_layers",
        "attn_bias": "attention_bias",
    }
    hf_required: ClassVar[dict[str, tuple[Any, ...]]] = {}
    default_theta: ClassVar[float] = 10000.0
    # transformers' Qwen3-MoE does not use this field.
    hf_ignored: ClassVar[frozenset[str]] = frozenset({"max_window_layers"})
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "qwen3-30b-a3b": {**_QWEN3, "num_layers": 48},
        "qwen3-235b-a22b": {**_QWEN3, **preset_size(4096, 12288, 94, 64, 4), "expert_size": 1536},
    }
    hub_ids: ClassVar[dict[str, str]] = {
        "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
        "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    }

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_layers: int = 24
    num_heads: int = 32
    num_kv_heads: int = 4
    max_seq_len: int = 32768
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    num_experts: int = 128
    experts_per_token: int = 8
    expert_size: int = 768
    normalize_weights: bool = False
    sparse_step: int = 1
    dense_layers: list[int] = field(default_factory=list)
    attn_bias: bool = False

    def attn_spec(self) -> AttentionSpec:
        """Return the attention spec, with per-head norms of q and k."""
        bias = self.attn_bias
        return replace(
            super().attn_spec(),
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=NormSpec("rms", self.norm_eps),
        )

    def expert_spec(self) -> MoESpec:
        """Return the spec of the experts in a layer."""
        return MoESpec(
            self.num_experts,
            self.experts_per_token,
            self.expert_size,
            self.activation,
            normalize_weights=self.normalize_weights,
        )

    def layer_mlps(self) -> tuple[MLPSpec | MoESpec, ...]:
        """Return the spec of every layer's experts or MLP."""
        dense = MLPSpec(self.intermediate_size, self.activation, gated=True, bias=False)
        return tuple(
            dense if i in self.dense_layers or (i + 1) % self.sparse_step else self.expert_spec()
            for i in range(self.num_layers)
        )

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        # transformers 5 writes Mixtral's field name; published configs have num_experts.
        if "num_local_experts" in raw:
            raw.setdefault("num_experts", raw.pop("num_local_experts"))
        return super()._read_special(raw)

    @classmethod
    def _read_windows(cls, raw: dict[str, Any]) -> dict[str, Any]:
        use, window = raw.pop("use_sliding_window", False), raw.pop("sliding_window", 4096)
        return {"window": (window or 0) if use else 0}

    def _write_special(self) -> dict[str, Any]:
        fields = {**super()._write_special(), "use_sliding_window": self.window > 0}
        if not self.window:
            fields["sliding_window"] = self.raw.get("sliding_window")
        return fields

    def to_hf(self) -> dict[str, Any]:
        """Return the contents of config.json, without Mixtral's `num_local_experts`."""
        out = super().to_hf()
        out.pop("num_local_experts", None)
        return out


@dataclass(kw_only=True)
class Qwen2MoeConfig(Qwen3MoeConfig):
    """Config of Qwen1.5-MoE or Qwen2-MoE; other fields are those of Qwen3-MoE.

    Args:
        shared_size: hidden width F of the shared expert, which has its own gate.
        attn_bias: use biases on q, k and v.
        window_layers: indices of the layers with a window.
    """

    family: ClassVar[str] = "qwen2_moe"
    heads: ClassVar[dict[str, Head]] = llama_heads("Qwen2Moe")
    hf_names: ClassVar[dict[str, str]] = {
        **Qwen3MoeConfig.hf_names,
        "shared_size": "shared_expert_intermediate_size",
        "attn_bias": "qkv_bias",
    }
    hf_ignored: ClassVar[frozenset[str]] = frozenset()
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "qwen1.5-moe-a2.7b": {"max_seq_len": 8192, "rope_theta": 1e6},
    }
    hub_ids: ClassVar[dict[str, str]] = {"qwen1.5-moe-a2.7b": "Qwen/Qwen1.5-MoE-A2.7B"}

    intermediate_size: int = 5632
    num_heads: int = 16
    num_kv_heads: int = 16
    num_experts: int = 60
    experts_per_token: int = 4
    expert_size: int = 1408
    shared_size: int = 5632
    attn_bias: bool = True
    window_layers: list[int] = field(default_factory=list)

    def problems(self) -> Iterator[str]:
        """Yield a message for each inconsistency among the fields."""
        yield from super().problems()
        outside = [i for i in self.window_layers if not 0 <= i < self.num_layers]
        if outside or bool(self.window) != bool(self.window_layers):
            yield (
                f"window={self.window} and window_layers={self.window_layers} must be set "
                f"together, with window_layers below num_layers={self.num_layers}"
            )

    def attn_spec(self) -> AttentionSpec:
        """Return the attention spec, without norms of q and k."""
        return replace(super().attn_spec(), out_bias=False, qk_norm=None)

    def expert_spec(self) -> MoESpec:
        """Return the spec of the experts in a layer, including the shared expert."""
        return replace(super().expert_spec(), shared_size=self.shared_size)

    def layer_windows(self) -> tuple[int | None, ...]:
        """Return the window size of every layer; None for no window."""
        slides = set(self.window_layers)
        return tuple(self.window if i in slides else None for i in range(self.num_layers))

    @classmethod
    def _read_windows(cls, raw: dict[str, Any]) -> dict[str, Any]:
        window = super()._read_windows(raw)["window"]
        last, kinds = raw.pop("max_window_layers", 28), raw.pop("layer_types", None)
        count = raw.get("num_hidden_layers", cls.num_layers)
        kinds = kinds or [_FULL if i % 2 or i >= last else _SLIDING for i in range(count)]
        slides = [i for i, kind in enumerate(kinds) if kind == _SLIDING]
        return {"window": window, "window_layers": slides} if window and slides else {}

    def _write_special(self) -> dict[str, Any]:
        slides = set(self.window_layers)
        kinds = [_SLIDING if i in slides else _FULL for i in range(self.num_layers)]
        return {**super()._write_special(), "layer_types": kinds}


class Qwen3Moe(Mixtral):
    """Qwen3-MoE with a language-model head."""

    config_class = Qwen3MoeConfig

    def weight_rules(self) -> list[WeightRule]:
        """Map parameter names to transformers' names."""
        own, published = "layers.{i}.mlp.", "model.layers.{i}.mlp"
        shared = {f"{own}shared_expert.{n}": f"{published}.shared_expert.{n}" for n in _PROJECTIONS}
        shared[f"{own}shared_gate"] = f"{published}.shared_expert_gate"
        experts = expert_rules(published, dict(zip(_PROJECTIONS, _PROJECTIONS, strict=True)))
        return llama_rules() + experts + linear_rules(shared, ("weight",))


class Qwen2Moe(Qwen3Moe):
    """Qwen1.5-MoE or Qwen2-MoE with a language-model head."""

    config_class = Qwen2MoeConfig
