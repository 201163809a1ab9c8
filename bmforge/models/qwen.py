"""Qwen2, Qwen2.5 and Qwen3, dense models (Qwen team 2024, 2025).

Source: "Qwen2 Technical Report" (arXiv 2407.10671), "Qwen2.5 Technical Report" (2412.15115), "Qwen3
Technical Report" (2505.09388).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from bmforge.errors import ConfigError
from bmforge.models.causal_lm import DecoderSpec
from bmforge.models.heads import Head
from bmforge.models.llama_like import LlamaLike, LlamaLikeConfig, llama_heads, llama_names_with
from bmforge.nn import BlockSpec

__all__ = ["Qwen", "QwenConfig"]

_SLIDING, _FULL = "sliding_attention", "full_attention"


def _size(
    hidden: int, intermediate: int, layers: int, heads: int, kv: int, length: int
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv,
        "max_seq_len": length,
        "rope_theta": 1e6,
    }


_TIED = {"tie_word_embeddings": True}
_WIDE_VOCAB = {"vocab_size": 152064}
_QWEN3 = {"model_type": "qwen3", "head_dim": 128}
_128K, _40K = 131072, 40960


@dataclass(kw_only=True)
class QwenConfig(LlamaLikeConfig):
    """Config of Qwen; other fields are those of `LlamaLikeConfig`.

    Args:
        model_type: "qwen2" (also Qwen2.5) has biases on q, k and v; "qwen3" normalizes q and k.
        attn_bias: use biases on q, k, v and o (qwen3 only).
        window: size of the sliding window in `window_layers`, in tokens; 0 for no window.
        window_layers: indices of the layers with a window.
    """

    family: ClassVar[str] = "qwen2"
    model_types: ClassVar[tuple[str, ...]] = ("qwen2", "qwen3")
    heads: ClassVar[dict[str, Head]] = llama_heads("Qwen2", "transformer.", alias="Qwen3")
    hf_names: ClassVar[dict[str, str]] = llama_names_with(
        model_type="model_type", head_dim="head_dim", attn_bias="attention_bias"
    )
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "qwen2-0.5b": {**_size(896, 4864, 24, 14, 2, _128K), **_TIED},
        "qwen2-1.5b": {**_size(1536, 8960, 28, 12, 2, _128K), **_TIED},
        "qwen2-7b": {**_size(3584, 18944, 28, 28, 4, _128K), **_WIDE_VOCAB},
        "qwen2-72b": {**_size(8192, 29568, 80, 64, 8, _128K), **_WIDE_VOCAB, "norm_eps": 1e-5},
        "qwen2.5-0.5b": {**_size(896, 4864, 24, 14, 2, 32768), **_TIED},
        "qwen2.5-1.5b": {**_size(1536, 8960, 28, 12, 2, _128K), **_TIED},
        "qwen2.5-3b": {**_size(2048, 11008, 36, 16, 2, 32768), **_TIED},
        "qwen2.5-7b": {**_size(3584, 18944, 28, 28, 4, _128K), **_WIDE_VOCAB},
        "qwen2.5-14b": {**_size(5120, 13824, 48, 40, 8, _128K), **_WIDE_VOCAB, "norm_eps": 1e-5},
        "qwen2.5-32b": {**_size(5120, 27648, 64, 40, 8, _128K), **_WIDE_VOCAB, "norm_eps": 1e-5},
        "qwen2.5-72b": {**_size(8192, 29568, 80, 64, 8, _128K), **_WIDE_VOCAB, "norm_eps": 1e-5},
        "qwen3-0.6b": {**_size(1024, 3072, 28, 16, 8, _40K), **_QWEN3, **_TIED},
        "qwen3-1.7b": {**_size(2048, 6144, 28, 16, 8, _40K), **_QWEN3, **_TIED},
        "qwen3-4b": {**_size(2560, 9728, 36, 32, 8, _40K), **_QWEN3, **_TIED},
        "qwen3-8b": {**_size(4096, 12288, 36, 32, 8, _40K), **_QWEN3},
        "qwen3-14b": {**_size(5120, 17408, 40, 40, 8, _40K), **_QWEN3},
        "qwen3-32b": {**_size(5120, 25600, 64, 64, 8, _40K), **_QWEN3},
    }
    hub_ids: ClassVar[dict[str, str]] = {
        name: f"Qwen/Q{name[1:].replace('b', 'B')}" for name in presets
    }

    model_type: Literal["qwen2", "qwen3"] = "qwen2"
    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_layers: int = 32
    num_heads: int = 32
    max_seq_len: int = 32768
    attn_bias: bool = False
    window: int = 0
    window_layers: list[int] = field(default_factory=list)

    def problems(self) -> Iterator[str]:
        """Yield a message for each inconsistency among the fields."""
        yield from super().problems()
        if self.model_type not in ("qwen2", "qwen3"):
            yield f"model_type={self.model_type!r} must be 'qwen2' or 'qwen3'"
        if self.attn_bias and self.model_type == "qwen2":
            yield "attn_bias=True has no effect with qwen2, which always has biases"
        if bool(self.window) != bool(self.window_layers):
            layers = self.window_layers
            yield f"window={self.window} and window_layers={layers} must be set together"
        if not all(0 <= i < self.num_layers for i in self.window_layers):
            yield f"window_layers={self.window_layers} must be below num_layers={self.num_layers}"

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        values, raw = super()._read_special(raw)
        window = raw.pop("sliding_window", 4096)
        window = window if raw.pop("use_sliding_window", False) else None
        first, kinds = raw.pop("max_window_layers", 28), raw.pop("layer_types", None)
        if kinds is None:
            layers = raw.get("num_hidden_layers", cls.num_layers)
            kinds = [_FULL if window is None or i < first else _SLIDING for i in range(layers)]
        slides = [i for i, kind in enumerate(kinds) if kind == _SLIDING]
        if len(slides) + kinds.count(_FULL) != len(kinds) or (slides and window is None):
            raise ConfigError(
                f"QwenConfig: layer_types={kinds} with sliding_window={window} is not supported "
                f"(allowed: {_SLIDING} and {_FULL}; a sliding layer needs use_sliding_window "
                "and sliding_window)."
            )
        if slides:
            values |= {"window": window, "window_layers": slides}
        if raw.get("model_type") == "qwen3" and raw.get("head_dim") is None:
            values["head_dim"] = 128  # transformers' default
        return values, raw

    def _write_head(self) -> dict[str, Any]:
        out = super()._write_head()
        if self.model_type == "qwen3":
            out["architectures"] = [n.replace("Qwen2", "Qwen3") for n in out["architectures"]]
        return out

    def _write_special(self) -> dict[str, Any]:
        slides = set(self.window_layers)
        window = {"sliding_window": self.window} if slides else {}
        return {
            **super()._write_special(),
            **window,
            "use_sliding_window": bool(slides),
            "layer_types": [_SLIDING if i in slides else _FULL for i in range(self.num_layers)],
        }

    def to_hf(self) -> dict[str, Any]:
        """Return the contents of config.json, without fields that transformers' Qwen2 lacks."""
        out = super().to_hf()
        if self.model_type == "qwen2":
            implied = self.head_dim == self.hidden_size // self.num_heads
            for name, keep in (("attention_bias", False), ("head_dim", not implied)):
                if name not in self.raw and not keep:
                    del out[name]
        return out


class Qwen(LlamaLike):
    """Qwen2, Qwen2.5 or Qwen3."""

    config_class = QwenConfig

    @classmethod
    def make_block(cls, config: QwenConfig) -> BlockSpec:
        """Return the block spec: Llama's with biases on q, k and v, or norms of q and k (Qwen3)."""
        block = super().make_block(config)
        assert block.attn is not None
        if config.model_type == "qwen2":
            return replace(block, attn=replace(block.attn, qkv_bias=True))
        return replace(block, attn=replace(block.attn, qk_norm=block.norm))

    @classmethod
    def make_spec(cls, config: QwenConfig) -> DecoderSpec:
        """Return the `DecoderSpec` of the model, including the windows of its layers."""
        spec = super().make_spec(config)
        assert spec.block.attn is not None
        slides = replace(spec.block, attn=replace(spec.block.attn, window=config.window))
        return replace(spec, blocks=dict.fromkeys(config.window_layers, slides))
