"""Base classes of decoders in which some layers have a sliding window or other RoPE settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from bmforge.errors import ConfigError
from bmforge.models.causal_lm import DecoderSpec
from bmforge.models.llama_like import LlamaLike, LlamaLikeConfig
from bmforge.nn import RopeSpec

__all__ = ["LayerTypes", "LayerTypesConfig", "LocalRotaryConfig"]

_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass(kw_only=True)
class LayerTypesConfig(LlamaLikeConfig):
    """Config of a family in which some layers have a sliding window.

    Args:
        window: number of tokens to which a token attends in the layers with a sliding window.
        layer_types: "sliding_attention" or "full_attention" for every layer; empty if every
            `full_every`-th layer attends to all tokens and the others have the window.
    """

    full_every: ClassVar[int] = 2
    # True if layers without a window have rotary positions.
    rotates_full: ClassVar[bool] = True
    default_window: ClassVar[int] = 4096

    window: int = 4096
    layer_types: list[str] = field(default_factory=list)

    @property
    def sliding_layers(self) -> list[int]:
        """Indices of the layers with a window."""
        kinds = self.layer_types or self._usual_types(self.num_layers, self.full_every)
        return [layer for layer, kind in enumerate(kinds) if kind == _SLIDING]

    def problems(self) -> Iterator[str]:
        """Yield a message for each inconsistency among the fields."""
        yield from super().problems()
        kinds = self.layer_types
        if kinds and (len(kinds) != self.num_layers or set(kinds) - {_SLIDING, _FULL}):
            yield (
                f"layer_types={kinds} must have one entry, {_SLIDING!r} or {_FULL!r}, for each of "
                f"num_layers={self.num_layers} layers"
            )
        if self.sliding_layers and self.window < 1:
            yield f"window={self.window} must be a positive number"

    @staticmethod
    def _usual_types(num_layers: int, period: int) -> list[str]:
        return [_SLIDING if (i + 1) % period else _FULL for i in range(num_layers)]

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        values, raw = super()._read_special(raw)
        window = raw.pop("sliding_window", cls.default_window) or 0
        period = raw.pop("sliding_window_pattern", None) or cls.full_every
        raw.pop("_sliding_window_pattern", None)
        layers = raw.get("num_hidden_layers", cls.num_layers)  # type: ignore[misc]
        kinds = raw.pop("layer_types", None) or cls._usual_types(layers, period)
        is_usual = kinds == cls._usual_types(layers, cls.full_every)
        return {**values, "window": window, "layer_types": [] if is_usual else kinds}, raw

    def _write_special(self) -> dict[str, Any]:
        slides = set(self.sliding_layers)
        kinds = [_SLIDING if i in slides else _FULL for i in range(self.num_layers)]
        return {**super()._write_special(), "sliding_window": self.window, "layer_types": kinds}


@dataclass(kw_only=True)
class LocalRotaryConfig(LayerTypesConfig):
    """Config of a family in which layers with a sliding window have another rotary base.

    `rope_theta` and `rope_scaling` apply to the layers that attend to all tokens.

    Args:
        local_rope_theta: base of the rotary frequencies of the layers with a window.
    """

    default_local_theta: ClassVar[float] = 10000.0

    local_rope_theta: float = 10000.0

    def local_rope_spec(self) -> RopeSpec:
        """Return the `RopeSpec` of the layers with a window."""
        return RopeSpec(self.head_dim, self.local_rope_theta, max_seq_len=self.max_seq_len)

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        theta = raw.pop("rope_local_base_freq", None) or cls.default_local_theta
        tables = raw.get("rope_parameters") or {}
        if _FULL in tables or _SLIDING in tables:
            local = dict(tables.get(_SLIDING) or {})
            theta = local.pop("rope_theta", theta)
            if local.pop("rope_type", "default") != "default" or local:
                raise ConfigError(
                    f"{cls.__name__}: rope_parameters[{_SLIDING!r}]={tables[_SLIDING]} is not "
                    "supported (supported: rope_type 'default' with rope_theta). Correct "
                    "config.json, or use another model."
                )
            raw["rope_parameters"] = tables.get(_FULL)
        values, raw = super()._read_special(raw)
        return {**values, "local_rope_theta": float(theta)}, raw

    def to_hf(self) -> dict[str, Any]:
        """Return the contents of config.json, with rotary fields per layer type."""
        out = super().to_hf()
        out.pop("rope_local_base_freq", None)
        scaling = out.pop("rope_scaling") or {"rope_type": "default"}
        del out["rope_theta"]
        out["rope_parameters"] = {
            _SLIDING: {"rope_type": "default", "rope_theta": self.local_rope_theta},
            _FULL: {**scaling, "rope_theta": self.rope_theta},
        }
        return out


class LayerTypes(LlamaLike):
    """Decoder in which some layers have a sliding window."""

    @classmethod
    def make_spec(cls, config: Any) -> DecoderSpec:
        """Return the `DecoderSpec` of the model, including the windows of its layers."""
        spec, local = super().make_spec(config), None
        attn = spec.block.attn
        assert attn is not None
        attn = replace(attn, window=config.window)
        if isinstance(config, LocalRotaryConfig):
            attn, local = replace(attn, rotary="local"), config.local_rope_spec()
        slides = replace(spec.block, attn=attn)
        blocks = dict.fromkeys(config.sliding_layers, slides)
        if not config.rotates_full:
            full = replace(attn, window=None, rotary="none")
            spec = replace(spec, block=replace(spec.block, attn=full))
        return replace(spec, blocks=blocks, local_rope=local)
