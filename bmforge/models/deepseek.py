"""DeepSeek-V2, DeepSeek-V3 and R1, Kimi K2 and Moonlight.

They have latent attention, routed experts and shared experts. Source: DeepSeek-AI, "DeepSeek-V2"
(arXiv 2405.04434) and "DeepSeek-V3 Technical Report" (arXiv 2412.19437); Kimi Team, "Kimi K2"
(arXiv 2507.20534).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from bmforge.models.heads import Head
from bmforge.models.latent import LATENT_NAMES, Latent, LatentConfig
from bmforge.models.llama_like import llama_heads
from bmforge.models.shared_experts import SHARED_EXPERT_NAMES, SharedExperts, SharedExpertsConfig
from bmforge.nn.router import Scoring

__all__ = ["DeepSeekV2", "DeepSeekV2Config", "DeepSeekV3", "DeepSeekV3Config"]

_REQUIRED = SharedExpertsConfig.hf_required


def _yarn(factor: float, mscale: float = 1.0, beta_fast: float = 32.0) -> dict[str, Any]:
    """Return YaRN's RoPE scaling of a model with a pretraining context of 4096 tokens."""
    return {
        "kind": "yarn",
        "factor": factor,
        "original_seq_len": 4096,
        "beta_fast": beta_fast,
        "beta_slow": 1.0,
        "mscale": mscale,
        "mscale_all_dim": mscale,
    }


_SMALL: dict[str, Any] = {
    "hidden_size": 2048,
    "num_layers": 27,
    "num_heads": 16,
    "q_rank": 0,
    "expert_size": 1408,
    "num_experts": 64,
    "experts_per_token": 6,
    "num_shared": 2,
    "num_dense": 1,
    "expert_groups": 1,
    "top_groups": 1,
}


@dataclass(kw_only=True)
class DeepSeekV3Config(LatentConfig, SharedExpertsConfig):
    """Config of DeepSeek-V3; other fields are those of `LatentConfig` and `SharedExpertsConfig`.

    Args:
        model_type: "deepseek_v3", or "kimi_k2" for Kimi K2, which has the same architecture.
        rope_interleaved: rotate adjacent dims as pairs.
    """

    family: ClassVar[str] = "deepseek_v3"
    model_types: ClassVar[tuple[str, ...]] = ("deepseek_v3", "kimi_k2")
    heads: ClassVar[dict[str, Head]] = llama_heads("DeepseekV3", classifiers=("sequence", "token"))
    hf_names: ClassVar[dict[str, str]] = {
        **SHARED_EXPERT_NAMES,
        **LATENT_NAMES,
        "model_type": "model_type",
        "rope_interleaved": "rope_interleave",
    }
    hf_required: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_REQUIRED,
        "scoring_func": ("sigmoid", None),
        "topk_method": ("noaux_tc", None),
    }
    # transformers' default, which differs from the published checkpoints.
    hf_defaults: ClassVar[dict[str, Any]] = {"max_seq_len": 4096}
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "deepseek-v3": {"rope_scaling": _yarn(40.0)},
        "kimi-k2": {
            "model_type": "kimi_k2",
            "vocab_size": 163840,
            "num_heads": 64,
            "num_experts": 384,
            "num_dense": 1,
            "expert_groups": 1,
            "top_groups": 1,
            "weight_scale": 2.827,
            "max_seq_len": 131072,
            "rope_theta": 5e4,
            "rope_scaling": _yarn(32.0, beta_fast=1.0),
        },
        "moonlight-16b-a3b": {
            **_SMALL,
            "vocab_size": 163840,
            "intermediate_size": 11264,
            "weight_scale": 2.446,
            "max_seq_len": 8192,
            "norm_eps": 1e-5,
            "rope_theta": 5e4,
        },
    }
    hub_ids: ClassVar[dict[str, str]] = {
        "deepseek-v3": "deepseek-ai/DeepSeek-V3",
        "kimi-k2": "moonshotai/Kimi-K2-Instruct",
        "moonlight-16b-a3b": "moonshotai/Moonlight-16B-A3B",
    }

    model_type: Literal["deepseek_v3", "kimi_k2"] = "deepseek_v3"
    vocab_size: int = 129280
    hidden_size: int = 7168
    intermediate_size: int = 18432
    num_layers: int = 61
    num_heads: int = 128
    max_seq_len: int = 163840
    norm_eps: float = 1e-6
    num_experts: int = 256
    expert_size: int = 2048
    num_dense: int = 3
    expert_groups: int = 8
    top_groups: int = 4
    weight_scale: float = 2.5
    rope_interleaved: bool = True

    @property
    def interleaves(self) -> bool:
        """True if adjacent dims are rotated as pairs."""
        return self.rope_interleaved


@dataclass(kw_only=True)
class DeepSeekV2Config(LatentConfig, SharedExpertsConfig):
    """Config of DeepSeek-V2; other fields are those of `LatentConfig` and `SharedExpertsConfig`."""

    family: ClassVar[str] = "deepseek_v2"
    scoring: ClassVar[Scoring] = "softmax"
    heads: ClassVar[dict[str, Head]] = llama_heads("DeepseekV2", classifiers=("sequence",))
    hf_names: ClassVar[dict[str, str]] = {
        **{k: v for k, v in SHARED_EXPERT_NAMES.items() if k != "normalize_weights"},
        **LATENT_NAMES,
    }
    hf_required: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_REQUIRED,
        "mlp_bias": (False, None),
        "norm_topk_prob": (False, None),
        "scoring_func": ("softmax", None),
    }
    # transformers' defaults, which differ from the published checkpoints.
    hf_defaults: ClassVar[dict[str, Any]] = {"num_dense": 0, "max_seq_len": 2048}
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "deepseek-v2": {"rope_scaling": _yarn(40.0)},
        "deepseek-v2-lite": {
            **_SMALL,
            "intermediate_size": 10944,
            "weight_scale": 1.0,
            "rope_scaling": _yarn(40.0, 0.707),
        },
    }
    hub_ids: ClassVar[dict[str, str]] = {
        "deepseek-v2": "deepseek-ai/DeepSeek-V2",
        "deepseek-v2-lite": "deepseek-ai/DeepSeek-V2-Lite",
    }

    vocab_size: int = 102400
    hidden_size: int = 5120
    intermediate_size: int = 12288
    num_layers: int = 60
    num_heads: int = 128
    max_seq_len: int = 163840
    norm_eps: float = 1e-6
    num_experts: int = 160
    experts_per_token: int = 6
    expert_size: int = 1536
    num_shared: int = 2
    num_dense: int = 1
    expert_groups: int = 8
    top_groups: int = 3
    normalize_weights: bool = False
    weight_scale: float = 16.0

    def problems(self) -> Iterator[str]:
        """Yield a message for each inconsistency among the fields."""
        yield from super().problems()
        if self.normalize_weights:
            yield "normalize_weights=True is not supported (allowed: False, as in transformers)"

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        method = raw.pop("topk_method", None) or "greedy"
        if method == "greedy":
            raw |= {"n_group": 1, "topk_group": 1}
        elif method != "group_limited_greedy":
            raw["topk_method"] = method  # refused as an unknown field
        return super()._read_special(raw)

    def _write_special(self) -> dict[str, Any]:
        out = super()._write_special()
        del out["num_nextn_predict_layers"]
        if self.expert_groups > 1:
            return {**out, "topk_method": "group_limited_greedy"}
        unread = {name: self.raw.get(name) for name in ("n_group", "topk_group")}
        return {**out, "topk_method": "greedy", **unread}


class DeepSeekV3(Latent, SharedExperts):
    """DeepSeek-V3 with a language-model head."""

    config_class = DeepSeekV3Config


class DeepSeekV2(Latent, SharedExperts):
    """DeepSeek-V2 with a language-model head."""

    config_class = DeepSeekV2Config
