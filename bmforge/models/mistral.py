"""Mistral and Ministral (Jiang et al., "Mistral 7B", arXiv 2310.06825).

The block is Llama's with a sliding window: in all layers of Mistral, and in some layers of
Ministral (`layer_types`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from bmforge.errors import ConfigError
from bmforge.models.causal_lm import DecoderSpec
from bmforge.models.heads import Head
from bmforge.models.llama_like import LlamaLike, LlamaLikeConfig, llama_heads, llama_names_with

__all__ = ["Mistral", "MistralConfig"]

_SLIDING, _FULL = "sliding_attention", "full_attention"


def _size(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_layers", "num_heads")
    return dict(zip(names, (hidden, intermediate, layers, heads), strict=True))


@dataclass(kw_only=True)
class MistralConfig(LlamaLikeConfig):
    """Config of Mistral; other fields are those of `LlamaLikeConfig`.

    Args:
        model_type: "mistral", or "ministral" if layers differ.
        window: size of the sliding window in `window_layers`, in tokens; 0 for no window.
        window_layers: indices of the layers with a window; empty means all layers.
    """

    family: ClassVar[str] = "mistral"
    model_types: ClassVar[tuple[str, ...]] = ("mistral", "ministral")
    heads: ClassVar[dict[str, Head]] = llama_heads("Mistral", alias="Ministral")
    hf_names: ClassVar[dict[str, str]] = llama_names_with(
        head_dim="head_dim", model_type="model_type"
    )
    hf_defaults: ClassVar[dict[str, Any]] = {"num_kv_heads": 8}
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "mistral-7b-v0.1": {"window": 4096},
        "mistral-7b-v0.3": {"vocab_size": 32768, "rope_theta": 1e6},
        "mistral-nemo-12b": {
            **_size(5120, 14336, 40, 32),
            "vocab_size": 131072,
            "head_dim": 128,
            "rope_theta": 1e6,
            "max_seq_len": 131072,
        },
        "mistral-small-24b": {
            **_size(5120, 32768, 40, 32),
            "vocab_size": 131072,
            "head_dim": 128,
            "rope_theta": 1e8,
        },
    }
    hub_ids: ClassVar[dict[str, str]] = {
        "mistral-7b-v0.1": "mistralai/Mistral-7B-v0.1",
        "mistral-7b-v0.3": "mistralai/Mistral-7B-v0.3",
        "mistral-nemo-12b": "mistralai/Mistral-Nemo-Base-2407",
        "mistral-small-24b": "mistralai/Mistral-Small-24B-Base-2501",
    }

    model_type: Literal["mistral", "ministral"] = "mistral"
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 8
    max_seq_len: int = 32768
    norm_eps: float = 1e-5
    window: int = 0
    window_layers: list[int] = field(default_factory=list)

    def problems(self) -> Iterator[str]:
        """Yield a message for each inconsistency among the fields."""
        yield from super().problems()
        if self.model_type not in self.model_types:
            yield f"model_type={self.model_type!r} must be 'mistral' or 'ministral'"
        if self.window_layers and (not self.window or self.model_type == "mistral"):
            yield (
                f"window_layers={self.window_layers} needs window (got {self.window}) and "
                f"model_type='ministral' (got {self.model_type!r})"
            )
        if not all(0 <= i < self.num_layers for i in self.window_layers):
            yield f"window_layers={self.window_layers} must be below num_layers={self.num_layers}"

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        values, raw = super()._read_special(raw)
        window, kinds = raw.pop("sliding_window", 4096) or 0, raw.pop("layer_types", None)
        if kinds is None:
            return {**values, "window": window}, raw
        slides = [i for i, kind in enumerate(kinds) if kind == _SLIDING]
        if len(slides) + kinds.count(_FULL) != len(kinds) or (slides and not window):
            raise ConfigError(
                f"MistralConfig: layer_types={kinds} with sliding_window={window} is not "
                f"supported (allowed: {_SLIDING} and {_FULL}; a sliding layer needs "
                "sliding_window)."
            )
        values["model_type"] = "ministral"  # how transformers loads Mistral with layer_types
        raw["model_type"] = "ministral"
        is_mixed = 0 < len(slides) < len(kinds)
        values |= {"window": window if slides else 0, "window_layers": slides if is_mixed else []}
        return values, raw

    def _write_head(self) -> dict[str, Any]:
        out = super()._write_head()
        if self.model_type == "ministral":
            names = [n.replace("Mistral", "Ministral") for n in out["architectures"]]
            out["architectures"] = names
        return out

    def _write_special(self) -> dict[str, Any]:
        out = {**super()._write_special(), "sliding_window": self.window or None}
        if self.model_type == "ministral":
            slides = set(self.window_layers or range(self.num_layers)) if self.window else set()
            out["layer_types"] = [
                _SLIDING if i in slides else _FULL for i in range(self.num_layers)
            ]
        return out


class Mistral(LlamaLike):
    """Mistral or Ministral with a language-model head."""

    config_class = MistralConfig

    @classmethod
    def make_spec(cls, config: MistralConfig) -> DecoderSpec:
        """Return the `DecoderSpec` of the model, including the layers' windows."""
        spec = super().make_spec(config)
        block = spec.block
        assert block.attn is not None
        slides = replace(block, attn=replace(block.attn, window=config.window or None))
        if not config.window_layers:
            return replace(spec, block=slides)
        return replace(spec, blocks=dict.fromkeys(config.window_layers, slides))
