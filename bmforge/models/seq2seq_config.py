"""Config classes of encoder-decoders, and the hyperparameters that CPM-2 and EVA share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from bmforge.models.config import ModelConfig
from bmforge.models.seq2seq_stack import Seq2SeqSpec
from bmforge.models.sizes import LayerSizes
from bmforge.nn import AttentionSpec, BlockSpec, MLPSpec, MoESpec, NormSpec

__all__ = ["EncoderDecoderConfig", "Seq2SeqConfig", "make_spec"]

# Options of the original programs without effect on results: there are no absolute positions, the
# MLP is a gated GELU for any `feed_forward_proj`, and both stacks have `num_layers` blocks.
_IGNORED_FIELDS = """
    feed_forward_proj max_position_embeddings use_scaled_init_for_output_weights is_encoder_decoder
    num_decoder_layers init_method_std initializer_factor
"""


@dataclass(kw_only=True)
class EncoderDecoderConfig(ModelConfig):
    """Config of an encoder-decoder with `num_layers` blocks in the encoder.

    FLOPs and KV cache are counted per pair of a source token in the encoder and a target token in
    the decoder and head.
    """

    def to_hf(self) -> dict[str, Any]:
        """Return the contents of config.json, with the original field names."""
        out = super().to_hf()
        if "initializer_range" not in self.raw:
            del out["initializer_range"]
        return out

    def own_sizes(self) -> dict[str, list[LayerSizes]]:
        """Return the layer sizes of both stacks; decoder layers have cross-attention."""
        layer = self.layer_sizes()
        num_decoder_layers = getattr(self, "num_decoder_layers", self.num_layers)
        return {
            "encoder.layers": [layer] * self.num_layers,
            "decoder.layers": [replace(layer, cross=True)] * num_decoder_layers,
        }


@dataclass(kw_only=True)
class Seq2SeqConfig(EncoderDecoderConfig):
    """Config of an encoder-decoder with T5's relative positions, as in CPM-2 and EVA.

    Relative positions have no maximum; `max_seq_len` is the training length.

    Args:
        num_layers: number of blocks of the encoder, and also of the decoder.
        num_buckets: number of relative position buckets; distances of 128 and more share the
            last bucket.
        dropout: dropout probability of all dropout layers.
        decoder_start_token_id: first token of every target.
        pad_token_id: id of padding tokens.
        eos_token_id: token that ends a target.
    """

    hf_names: ClassVar[dict[str, str]] = {
        "vocab_size": "vocab_size",
        "hidden_size": "d_model",
        "intermediate_size": "d_ff",
        "num_layers": "num_layers",
        "num_heads": "num_heads",
        "head_dim": "d_kv",
        "norm_eps": "layer_norm_epsilon",
        "num_buckets": "relative_attention_num_buckets",
        "dropout": "dropout_rate",
        "pad_token_id": "pad_token_id",
        "eos_token_id": "eos_token_id",
    }
    hf_ignored: ClassVar[frozenset[str]] = frozenset(_IGNORED_FIELDS.split())
    hf_required: ClassVar[dict[str, tuple[Any, ...]]] = {
        "do_dim_trick": (False,),
        "tie_word_embeddings": (False, None),
    }
    # Default of EVA's classes for an absent field; the published configs contain 0.0.
    hf_defaults: ClassVar[dict[str, Any]] = {"dropout": 0.1}

    num_kv_heads: int = 0
    head_dim: int = 64
    max_seq_len: int = 512
    norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    num_buckets: int = 32
    dropout: float = 0.0
    pad_token_id: int = 5

    def problems(self) -> Iterator[str]:
        """Yield a message for each inconsistency among the fields."""
        yield from super().problems()
        if self.tie_word_embeddings:
            yield "tie_word_embeddings=True is not supported (allowed: False)"

    @property
    def is_gated(self) -> bool:
        """Always True: the MLP has a gate."""
        return True

    def _write_special(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "num_decoder_layers": self.num_layers,
            "tie_word_embeddings": False,
            "is_encoder_decoder": True,
        }
        if self.max_seq_len != (self.raw.get("max_position_embeddings") or 512):
            fields["max_position_embeddings"] = self.max_seq_len
        return fields

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"max_seq_len": raw.get("max_position_embeddings") or 512}, raw


def make_spec(
    config: Any, activation: str, scale: float | None, moe: MoESpec | None = None
) -> Seq2SeqSpec:
    """Return the hyperparameters of an encoder-decoder with pre-norm blocks and gated MLPs.

    Args:
        config: `Seq2SeqConfig` of the model.
        activation: activation of the MLP's gate.
        scale: factor on attention scores; None for 1/sqrt(H).
        moe: spec of the experts that replace the MLP; None for an MLP.
    """
    heads, dropout = config.num_heads, config.dropout
    block = BlockSpec(
        config.hidden_size,
        AttentionSpec(heads, heads, config.head_dim, False, False, scale, dropout),
        moe or MLPSpec(config.intermediate_size, activation, True, False, dropout),
        norm=NormSpec("rms", config.norm_eps),
        residual_dropout=dropout,
    )
    return Seq2SeqSpec(
        block,
        config.num_layers,
        config.num_layers,
        num_buckets=config.num_buckets,
        dropout=dropout,
    )
