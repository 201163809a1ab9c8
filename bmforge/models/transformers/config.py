"""Config of a model that transformers implements: its sizes and the original config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from bmforge.errors import ConfigError
from bmforge.models.changes import (
    CHANGES_KEY,
    QUANTIZATION_KEY,
    changes_from_json,
    changes_to_json,
    quantization_to_json,
)
from bmforge.models.config import ModelConfig, without_changes
from bmforge.models.heads import Head
from bmforge.models.traits import AttentionPattern, Objective, Traits
from bmforge.models.transformers.library import (
    AUTO_CLASSES,
    config_from_json,
    find_auto_class,
    is_supported_type,
)

__all__ = ["TransformersConfig", "TransformersTraits", "own_config"]

# bmforge's field -> its names in transformers configs, most common first.
_NAMES = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim", "embed_dim"),
    "intermediate_size": (
        "intermediate_size", "n_inner", "ffn_dim", "d_ff", "decoder_ffn_dim", "ffn_hidden_size",
    ),
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"),
    "num_heads": (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
    ),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv"),
    "head_dim": ("head_dim", "d_kv", "attention_head_dim"),
    "max_seq_len": (
        "max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "seq_length",
        "max_seq_len", "max_target_positions",
    ),
}  # fmt: skip
_ENCODER_DECODER_HEADS = ("sequence_to_sequence", "speech_to_text")
_IMAGE_HEAD = "image_text_to_text"
_GENERATION_HEADS = ("language_model", "sequence_to_sequence", _IMAGE_HEAD)
# Layers of these kinds have a state of constant size, or none, instead of a KV cache.
_RECURRENT = ("mamba", "linear_attention", "conv", "recurrent", "ssm", "moe", "mlp")


@dataclass(frozen=True)
class TransformersTraits(Traits):
    """`Traits` of a transformers model, which depend on its head."""

    def of(self, config: Any) -> Traits:
        """Return the `Traits` of the model that `config` describes."""
        attention: AttentionPattern = "bidirectional"
        objective: Objective = "masked tokens"
        if config.head in _ENCODER_DECODER_HEADS:
            attention, objective = "encoder-decoder", "spans"
        elif config.head in ("language_model", _IMAGE_HEAD):
            attention, objective = "causal", "next token"
        return replace(
            self,
            attention=attention,
            objective=objective,
            positions="learned" if config.learned_positions else "rotary",
            has_images=config.head == "image_classification",
            has_audio=config.head == "speech_to_text",
            can_generate=config.head in _GENERATION_HEADS,
            own_generation_head=_IMAGE_HEAD if config.head == _IMAGE_HEAD else "",
            position_limit=config.max_seq_len if config.learned_positions else None,
        )


@dataclass(kw_only=True)
class TransformersConfig(ModelConfig):
    """Config of a model that transformers implements.

    The sizes are used to plan memory and for reports. The model itself is built from `source`,
    which only transformers interprets.

    Args:
        model_type: `model_type` in config.json.
        source: contents of config.json as JSON text.
        learned_positions: True if the model has a position table, which limits the input length.
        gated: True if the MLP has a gate.
        decoder_start_token_id: first target token of an encoder-decoder; None for other models.
    """

    family: ClassVar[str] = "transformers"
    heads: ClassVar[dict[str, Head]] = {
        head: Head(auto) for head, (auto, _) in AUTO_CLASSES.items()
    }

    vocab_size: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    num_layers: int = 0
    num_heads: int = 1
    num_kv_heads: int = 0
    head_dim: int = 0
    max_seq_len: int = 0
    norm_eps: float = 1e-6
    model_type: str = ""
    source: str = field(default="", repr=False)
    learned_positions: bool = False
    gated: bool = True
    decoder_start_token_id: int | None = None

    @classmethod
    def opens(cls, raw: dict[str, Any]) -> bool:
        """Return True for every architecture that the installed transformers supports."""
        return is_supported_type(str(raw.get("model_type")))

    @classmethod
    def from_hf(
        cls, raw: dict[str, Any], allow_unknown: tuple[str, ...] = ()
    ) -> TransformersConfig:
        """Convert the contents of a config.json, which transformers validates.

        Args:
            raw: contents of config.json.
            allow_unknown: ignored, because transformers accepts unknown fields.

        Raises:
            ConfigError: transformers does not support the model, or rejects a field.
        """
        plain = without_changes(raw)
        hf = config_from_json(plain)
        values = _read_sizes(hf)
        if CHANGES_KEY in raw:
            values["changes"] = changes_from_json(raw[CHANGES_KEY], cls.__name__)
        return cls(
            **values,
            **cls._take_labels(plain),
            head=find_auto_class(plain),
            model_type=str(raw.get("model_type")),
            source=json.dumps(plain),
            raw=dict(raw),
        )

    @classmethod
    def _take_labels(cls, raw: dict[str, Any]) -> dict[str, Any]:
        labels = raw.get("id2label") or {}
        return {
            "num_labels": len(labels) or raw.get("num_labels") or 2,
            "problem_type": raw.get("problem_type") or "",
        }

    @property
    def is_gated(self) -> bool:
        """True if the MLP has a gate."""
        return self.gated

    def build_config(self) -> Any:
        """Build the transformers config, including changes of this config's fields."""
        if not self.source:
            raise ConfigError(
                "the transformers backend can build a model only from an existing config.json. "
                "Pass the directory of a model."
            )
        hf = config_from_json(json.loads(self.source))
        if bool(getattr(hf, "tie_word_embeddings", False)) != self.tie_word_embeddings:
            for part in {id(c): c for c in (hf, hf.get_text_config(decoder=True))}.values():
                part.tie_word_embeddings = self.tie_word_embeddings
        if self.head in ("sequence_classification", "token_classification", "image_classification"):
            hf.num_labels = self.num_labels
            hf.problem_type = self.problem_type or None
        return hf

    def to_hf(self) -> dict[str, Any]:
        """Return the original contents of config.json, updated with this config's fields."""
        out = dict(json.loads(self.source))
        if self.tie_word_embeddings != bool(_read_tie(out)):
            out["tie_word_embeddings"] = self.tie_word_embeddings
        if self.head != find_auto_class(out):
            out["architectures"] = [_class_name(self)]
        if self._take_labels(out)["num_labels"] != self.num_labels:
            out["id2label"] = {str(i): f"LABEL_{i}" for i in range(self.num_labels)}
            out["label2id"] = {f"LABEL_{i}": i for i in range(self.num_labels)}
        if self.changes:
            # A native family cannot load this, because changed modules have transformers' names.
            out[CHANGES_KEY] = {**changes_to_json(self.changes), "backend": "transformers"}
        packed = quantization_to_json(self.changes)
        return out if packed is None else {**out, QUANTIZATION_KEY: packed}

    def with_vocab_size(self, size: int) -> TransformersConfig:
        """Return a copy with a different vocabulary size (that of the text model, if nested)."""
        raw = json.loads(self.source)
        hf = config_from_json(raw)
        text = own_config(hf)
        nested = [n for n, v in vars(hf).items() if v is text and isinstance(raw.get(n), dict)]
        (raw[nested[0]] if nested else raw)["vocab_size"] = size
        if _read_sizes(config_from_json(raw))["vocab_size"] != size:
            raise ConfigError(
                f"the config of model_type={self.model_type!r} has no vocab_size, so the "
                "vocabulary of this model cannot be resized. Use a tokenizer without new "
                "tokens."
            )
        return self.replace(vocab_size=size, source=json.dumps(raw))

    def kv_bytes_per_token(self, bytes_per_element: int = 2) -> int:
        """Return the KV cache bytes per token; layers without a KV cache are not counted."""
        hf = own_config(self.build_config())
        kinds = getattr(hf, "layer_types", None) or getattr(hf, "layers_block_type", None)
        count = self.num_layers
        if kinds:
            count = sum(not any(word in str(kind) for word in _RECURRENT) for kind in kinds)
        elif not self.max_seq_len:
            count = 0
        width = 2 * self.num_kv_heads * self.head_dim
        if rank := getattr(hf, "kv_lora_rank", None):
            key = getattr(hf, "qk_head_dim", None) or hf.qk_nope_head_dim + hf.qk_rope_head_dim
            width = self.num_heads * (key + hf.v_head_dim) if rank else width
        return count * width * bytes_per_element


def own_config(hf: Any) -> Any:
    """Return the config of the text decoder, which multimodal transformers configs nest."""
    return hf.get_text_config(decoder=True)


def _class_name(config: TransformersConfig) -> str:
    from bmforge.models.transformers.build import find_class

    return find_class(config.build_config(), config.head).__name__


def _read_tie(raw: dict[str, Any]) -> bool:
    return bool(getattr(config_from_json(raw), "tie_word_embeddings", False))


def _pick(hf: Any, names: tuple[str, ...]) -> int:
    """Return the first integer field (of a list, the maximum); 0 if there is none."""
    for name in names:
        try:
            value = getattr(hf, name, None)
        except Exception:  # per-layer fields raise on access
            continue
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
            return max(value)
    return 0


def _read_sizes(hf: Any) -> dict[str, Any]:
    text = own_config(hf)
    values: dict[str, Any] = {name: _pick(text, names) for name, names in _NAMES.items()}
    values["num_heads"] = values["num_heads"] or 1
    if values["num_kv_heads"] and values["num_heads"] % values["num_kv_heads"]:
        values["num_kv_heads"] = 0
    rotary = hasattr(text, "rope_parameters") or any(
        getattr(text, name, None) for name in ("rotary_dim", "alibi", "rotary", "use_alibi")
    )
    relative = hasattr(text, "relative_attention_num_buckets") or text.model_type == "bloom"
    limit = values["max_seq_len"]
    return {
        **values,
        "learned_positions": bool(limit) and not rotary and not relative,
        "gated": str(getattr(text, "hidden_act", "silu")) in ("silu", "swish"),
        "tie_word_embeddings": bool(getattr(hf, "tie_word_embeddings", False)),
        "init_std": float(getattr(text, "initializer_range", None) or 0.02),
        "decoder_start_token_id": getattr(hf, "decoder_start_token_id", None),
    }
