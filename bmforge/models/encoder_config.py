"""Config of the BERT-like encoders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from bmforge.models.config import ModelConfig
from bmforge.models.heads import Head, classifier_heads

__all__ = ["EncoderConfig", "encoder_heads", "encoder_size"]


def encoder_size(
    hidden_size: int = 768, num_layers: int = 12, num_heads: int = 12
) -> dict[str, Any]:
    """Return the size fields of a preset, with an MLP four times as wide as the hidden states."""
    return {
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
    }


def encoder_heads(stem: str, head: dict[str, str], sequence: dict[str, str]) -> dict[str, Head]:
    """Return a dict from head name to an encoder's heads; the first is the masked-LM head.

    Args:
        stem: prefix of the class names, such as ``"Bert"``.
        head: mapping from bmforge's name of each module of the masked-LM head to its name in
            checkpoints; the key ``"bias"`` is for the decoder's bias.
        sequence: mapping from bmforge's name of each module of the sequence classifier to its name
            in checkpoints.
    """
    kinds = ("weight", "bias")
    modules = [(f"mlm_head.{part}", head[part]) for part in ("dense", "norm", "decoder")]
    names = {f"{a}.{kind}": f"{b}.{kind}" for a, b in modules for kind in kinds}
    names["mlm_head.decoder.bias"] = head["bias"]
    linear = {f"{a}.{kind}": f"{b}.{kind}" for a, b in sequence.items() for kind in kinds}
    pooler = ("pooler.weight", "pooler.bias")
    return {
        "masked_lm": Head(f"{stem}ForMaskedLM", names, aliases=(f"{stem}ForPreTraining",)),
        "sequence_classification": Head(f"{stem}ForSequenceClassification", linear),
        **classifier_heads(stem, "", "classifier", "qa_outputs"),
        "none": Head(f"{stem}Model", prefix="", optional=pooler),
    }


@dataclass(kw_only=True)
class EncoderConfig(ModelConfig):
    """Config of a BERT-like encoder; other fields are those of `ModelConfig`.

    Args:
        num_segments: number of segment types.
        pad_token_id: token id of padding; its embedding gets no gradient.
        activation: activation of the MLP, such as gelu, gelu_new, relu or silu.
        dropout: dropout probability of embeddings and of each sublayer's output.
        attn_dropout: dropout probability of attention weights.
        classifier_dropout: dropout probability before a classifier; None means `dropout`.
    """

    # True if positions count only tokens that are not padding, starting after the padding's row.
    positions_skip_padding: ClassVar[bool] = False
    hf_names: ClassVar[dict[str, str]] = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "norm_eps": "layer_norm_eps",
        "num_segments": "type_vocab_size",
        "pad_token_id": "pad_token_id",
        "activation": "hidden_act",
        "dropout": "hidden_dropout_prob",
        "attn_dropout": "attention_probs_dropout_prob",
        "classifier_dropout": "classifier_dropout",
        "init_std": "initializer_range",
        "tie_word_embeddings": "tie_word_embeddings",
    }
    # The pooler_ fields are from Google's code; no field of this set affects a forward pass.
    hf_ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "directionality",
            "pooler_fc_size",
            "pooler_num_attention_heads",
            "pooler_num_fc_layers",
            "pooler_size_per_head",
            "pooler_type",
        }
    )
    hf_required: ClassVar[dict[str, tuple[Any, ...]]] = {
        "position_embedding_type": ("absolute", None),
        "is_decoder": (False, None),
        "add_cross_attention": (False, None),
    }
    hf_defaults: ClassVar[dict[str, Any]] = {
        "dropout": 0.1,
        "attn_dropout": 0.1,
        "num_segments": 2,
        "norm_eps": 1e-12,
        "vocab_size": 30522,
    }

    vocab_size: int = 30522
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_layers: int = 12
    num_heads: int = 12
    num_kv_heads: int = 0
    head_dim: int = 0
    max_seq_len: int = 512
    norm_eps: float = 1e-12
    num_segments: int = 2
    pad_token_id: int | None = 0
    activation: str = "gelu"
    dropout: float = 0.0
    attn_dropout: float = 0.0
    classifier_dropout: float | None = None

    def problems(self) -> Iterator[str]:
        """Yield a message for each inconsistency among the fields."""
        yield from super().problems()
        for name in ("max_seq_len", "num_segments"):
            if getattr(self, name) < 1:
                yield f"{name}={getattr(self, name)} must be a positive number"
        if self.pad_token_id is None and self.positions_skip_padding:
            yield "pad_token_id must be set, because positions are counted from it"
        elif not 0 <= (self.pad_token_id or 0) < self.vocab_size:
            yield f"pad_token_id={self.pad_token_id} must be below vocab_size={self.vocab_size}"

    @property
    def position_offset(self) -> int:
        """Index of the first position's row in the position table."""
        return (self.pad_token_id or 0) + 1 if self.positions_skip_padding else 0

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        pad = raw.get("pad_token_id", cls.pad_token_id)
        offset = (pad or 0) + 1 if cls.positions_skip_padding else 0
        # Transformers' default of the field.
        rows = raw.pop("max_position_embeddings", None) or 512
        return {"max_seq_len": rows - offset, "pad_token_id": pad}, raw

    def _write_special(self) -> dict[str, Any]:
        return {"max_position_embeddings": self.max_seq_len + self.position_offset}

    def kv_bytes_per_token(self, bytes_per_element: int = 2) -> int:
        """Return 0: an encoder has no KV cache."""
        return 0
