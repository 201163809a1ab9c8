"""StableLM 2 and StableLM 3B (Bellagamba et al., "Stable LM 2 1.6B Technical Report", 2402.17834).

StableLM 2 12B has parallel attention and MLP and normalizes q and k; it runs with transformers'
implementation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from bmforge.models.heads import Head
from bmforge.models.llama_like import (
    LlamaLike,
    PartialRotaryConfig,
    llama_heads,
    llama_names_with,
    llama_rules,
)
from bmforge.models.weights import WeightRule, linear_rules
from bmforge.nn import BlockSpec, NormSpec

__all__ = ["StableLM", "StableLMConfig"]


@dataclass(kw_only=True)
class StableLMConfig(PartialRotaryConfig):
    """Config of StableLM; other fields are those of `PartialRotaryConfig`.

    Args:
        qkv_bias: use biases on q, k and v.
    """

    family: ClassVar[str] = "stablelm"
    default_part: ClassVar[float] = 0.25
    heads: ClassVar[dict[str, Head]] = llama_heads("StableLm", classifiers=("sequence", "token"))
    hf_names: ClassVar[dict[str, str]] = llama_names_with(
        norm_eps="layer_norm_eps", qkv_bias="use_qkv_bias"
    )
    hf_required: ClassVar[dict[str, tuple[Any, ...]]] = {
        **dict.fromkeys(("qk_layernorm", "use_parallel_residual"), (False, None)),
        "hidden_dropout": (0, 0.0),
    }
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "stablelm-3b": {},
        "stablelm-2-1.6b": {
            "vocab_size": 100352,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_layers": 24,
            "qkv_bias": True,
        },
    }
    hub_ids: ClassVar[dict[str, str]] = {
        "stablelm-3b": "stabilityai/stablelm-3b-4e1t",
        "stablelm-2-1.6b": "stabilityai/stablelm-2-1_6b",
    }

    vocab_size: int = 50304
    hidden_size: int = 2560
    intermediate_size: int = 6912
    num_layers: int = 32
    num_heads: int = 32
    max_seq_len: int = 4096
    norm_eps: float = 1e-5
    rotary_part: float = 0.25
    qkv_bias: bool = False

    @classmethod
    def opens(cls, raw: dict[str, Any]) -> bool:
        """Return True for a config.json of this family that is supported.

        Parallel blocks and norms of q and k are not supported.
        """
        return super().opens(raw) and not any(raw.get(name) for name in cls.hf_required)


class StableLM(LlamaLike):
    """StableLM with a language-model head."""

    config_class = StableLMConfig

    @classmethod
    def make_block(cls, config: StableLMConfig) -> BlockSpec:
        """Return the spec of Llama's block with layer norms."""
        block = super().make_block(config)
        assert block.attn is not None
        return replace(
            block,
            attn=replace(block.attn, qkv_bias=config.qkv_bias),
            norm=NormSpec("layer", config.norm_eps),
        )

    def weight_rules(self) -> list[WeightRule]:
        """Map parameter names to transformers' names: Llama's, and biases of norms."""
        return layer_norm_rules()


def layer_norm_rules() -> list[WeightRule]:
    """Map parameter names to Llama's names, for a model whose norms have biases."""
    rules = llama_rules()
    norms = {r.parameter: r.source for r in rules if r.parameter.endswith("norm.weight")}
    norms = {o: t for o, t in norms.items() if ".attn." not in o}
    stems = {o.removesuffix(".weight"): t.removesuffix(".weight") for o, t in norms.items()}
    return [*rules, *linear_rules(stems, ("bias",))]
