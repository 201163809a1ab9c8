"""SmolLM3 (Hugging Face, "SmolLM3: smol, multilingual, long-context reasoner", 2025).

The block is Llama's, without RoPE in every fourth layer (Yang et al., "RoPE to NoPE and back
again", arXiv 2501.18795).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from bmforge.models.causal_lm import DecoderSpec
from bmforge.models.heads import Head
from bmforge.models.llama_like import LlamaLike, LlamaLikeConfig, llama_heads, llama_names_with

__all__ = ["SmolLM3", "SmolLM3Config"]


@dataclass(kw_only=True)
class SmolLM3Config(LlamaLikeConfig):
    """Config of SmolLM3; other fields are those of `LlamaLikeConfig`.

    Args:
        attn_bias: use biases on q, k, v and o.
        mlp_bias: use biases in the MLP.
        unrotated_every: every `unrotated_every`-th layer does not use RoPE (NoPE).
        rotated_layers: one number per layer, 1 for RoPE or 0 for none; derived from
            `unrotated_every` if empty.
    """

    family: ClassVar[str] = "smollm3"
    default_theta: ClassVar[float] = 2e6
    heads: ClassVar[dict[str, Head]] = llama_heads("SmolLM3", question_prefix="transformer.")
    hf_names: ClassVar[dict[str, str]] = llama_names_with(
        attn_bias="attention_bias", mlp_bias="mlp_bias", unrotated_every="no_rope_layer_interval"
    )
    hf_required: ClassVar[dict[str, tuple[Any, ...]]] = {"use_sliding_window": (False, None)}
    hf_ignored: ClassVar[frozenset[str]] = frozenset({"sliding_window", "layer_types"})
    presets: ClassVar[dict[str, dict[str, Any]]] = {"smollm3-3b": {}}
    hub_ids: ClassVar[dict[str, str]] = {"smollm3-3b": "HuggingFaceTB/SmolLM3-3B"}

    vocab_size: int = 128256
    hidden_size: int = 2048
    intermediate_size: int = 11008
    num_layers: int = 36
    num_heads: int = 16
    num_kv_heads: int = 4
    max_seq_len: int = 65536
    rope_theta: float = 5e6
    tie_word_embeddings: bool = True
    attn_bias: bool = False
    mlp_bias: bool = False
    unrotated_every: int = 4
    rotated_layers: list[int] = field(default_factory=list)

    @property
    def unrotated(self) -> list[int]:
        """Indices of the layers without RoPE."""
        flags = self.rotated_layers or self._usual_flags(self.num_layers, self.unrotated_every)
        return [layer for layer, flag in enumerate(flags) if not flag]

    def problems(self) -> Iterator[str]:
        """Yield a message for each inconsistency among the fields."""
        yield from super().problems()
        flags = self.rotated_layers
        if flags and (len(flags) != self.num_layers or set(flags) - {0, 1}):
            yield (
                f"rotated_layers={flags} must have one entry, 0 or 1, for each of "
                f"num_layers={self.num_layers} layers"
            )
        if self.unrotated_every < 1:
            yield f"unrotated_every={self.unrotated_every} must be at least 1"

    @staticmethod
    def _usual_flags(num_layers: int, period: int) -> list[int]:
        return [int((layer + 1) % period != 0) for layer in range(num_layers)]

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        values, raw = super()._read_special(raw)
        layers = raw.get("num_hidden_layers", cls.num_layers)
        usual = cls._usual_flags(layers, raw.get("no_rope_layer_interval") or cls.unrotated_every)
        flags = [int(flag) for flag in raw.pop("no_rope_layers", None) or usual]
        return {**values, "rotated_layers": [] if flags == usual else flags}, raw

    def _write_special(self) -> dict[str, Any]:
        flags = [int(layer not in self.unrotated) for layer in range(self.num_layers)]
        kinds = ["full_attention"] * self.num_layers
        return {**super()._write_special(), "no_rope_layers": flags, "layer_types": kinds}


class SmolLM3(LlamaLike):
    """SmolLM3 with a language-model head."""

    config_class = SmolLM3Config

    @classmethod
    def make_spec(cls, config: SmolLM3Config) -> DecoderSpec:
        """Return the `DecoderSpec` of the model, with layers without RoPE."""
        spec = super().make_spec(config)
        assert spec.block.attn is not None
        plain = replace(spec.block, attn=replace(spec.block.attn, rotary="none"))
        return replace(spec, blocks=dict.fromkeys(config.unrotated, plain))
