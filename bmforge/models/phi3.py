"""Phi-3 and Phi-4 (Abdin et al., "Phi-3 Technical Report", arXiv 2404.14219; "Phi-4", 2412.08905).

The block is Llama's; published checkpoints fuse q, k, v and gate, up. Phi-4-mini rotates only some
dims of each head, and the long-context models use RoPE scaling (`longrope`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from bmforge.models.heads import Head
from bmforge.models.llama_like import (
    LlamaLike,
    PartialRotaryConfig,
    gate_up_rules,
    llama_heads,
    llama_names_with,
    llama_rules,
    preset_size,
)
from bmforge.models.weights import WeightRule
from bmforge.nn import BlockSpec

__all__ = ["Phi3", "Phi3Config"]


@dataclass(kw_only=True)
class Phi3Config(PartialRotaryConfig):
    """Config of Phi-3; other fields are those of `PartialRotaryConfig`.

    Args:
        window: size of the sliding window in tokens; 0 for no window.
        original_seq_len: context length in pretraining, used by `longrope`.
        dropout: dropout probability of the outputs of attention and MLP.
    """

    family: ClassVar[str] = "phi3"
    heads: ClassVar[dict[str, Head]] = llama_heads("Phi3", classifiers=("sequence", "token"))
    hf_names: ClassVar[dict[str, str]] = llama_names_with(
        dropout="resid_pdrop", original_seq_len="original_max_position_embeddings"
    )
    # transformers' code uses neither field.
    hf_ignored: ClassVar[frozenset[str]] = frozenset({"embd_pdrop", "attention_bias"})
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "phi-3-mini-4k": {"window": 2047},
        "phi-3-medium-4k": {**preset_size(5120, 17920, 40, 40, 10), "window": 2047},
        "phi-4": {
            **preset_size(5120, 17920, 40, 40, 10),
            "vocab_size": 100352,
            "max_seq_len": 16384,
            "original_seq_len": 16384,
            "rope_theta": 250000.0,
        },
    }
    hub_ids: ClassVar[dict[str, str]] = {
        "phi-3-mini-4k": "microsoft/Phi-3-mini-4k-instruct",
        "phi-3-medium-4k": "microsoft/Phi-3-medium-4k-instruct",
        "phi-4": "microsoft/phi-4",
    }

    vocab_size: int = 32064
    hidden_size: int = 3072
    intermediate_size: int = 8192
    num_layers: int = 32
    num_heads: int = 32
    max_seq_len: int = 4096
    original_seq_len: int = 4096
    norm_eps: float = 1e-5
    dropout: float = 0.0
    window: int = 0

    @property
    def pretraining_length(self) -> int:
        """Context length before `longrope` scaling, from the field `original_seq_len`."""
        return self.original_seq_len

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        for name in ("rope_parameters", "rope_scaling"):
            scaling = raw.get(name) or {}
            # Former names of longrope in published configs.
            kinds = {scaling.get(key) for key in ("type", "rope_type")}
            if kinds & {"su", "yarn"}:
                raw[name] = {**scaling, "rope_type": "longrope", "type": "longrope"}
        values, raw = super()._read_special(raw)
        return {**values, "window": raw.pop("sliding_window", None) or 0}, raw

    def _write_special(self) -> dict[str, Any]:
        return {**super()._write_special(), "sliding_window": self.window or None}


class Phi3(LlamaLike):
    """Phi-3 or Phi-4 with a language-model head."""

    config_class = Phi3Config

    @classmethod
    def make_block(cls, config: Phi3Config) -> BlockSpec:
        """Return the spec of Llama's block with Phi-3's window and dropout."""
        block = super().make_block(config)
        assert block.attn is not None
        window = config.window or None
        return replace(
            block, attn=replace(block.attn, window=window), residual_dropout=config.dropout
        )

    def weight_rules(self) -> list[WeightRule]:
        """Map parameter names to transformers' names; q, k, v and gate, up are fused."""
        config: Any = self.config
        head, sizes = config.head_dim, (config.num_heads, *[config.num_kv_heads] * 2)
        fused = "gate_proj", "up_proj", *(f"{part}_proj" for part in "qkv")
        rules = [r for r in llama_rules() if r.parameter.split(".")[-2] not in fused]
        rows, total = [head * count for count in sizes], head * sum(sizes)
        for number, part in enumerate("qkv"):
            rules.append(
                WeightRule(
                    f"layers.{{i}}.attn.{part}_proj.weight",
                    "model.layers.{i}.self_attn.qkv_proj.weight",
                    part=(sum(rows[:number]), total),
                )
            )
        return [*rules, *gate_up_rules(config.intermediate_size)]
