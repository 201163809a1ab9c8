"""What the configs of CPM-2 and EVA share, and the encoder-decoder that both are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from bmforge.errors import ConfigError
from bmforge.models.config import ModelConfig
from bmforge.models.seq2seq_stack import Seq2SeqSpec
from bmforge.models.sizes import LayerSizes
from bmforge.nn import AttentionSpec, BlockSpec, MLPSpec, MoESpec, NormSpec

__all__ = ["Seq2SeqConfig", "make_spec"]

# They steer the original programs, not the numbers: there are no absolute positions, the MLP is a
# gated GELU whatever `feed_forward_proj` says, and both stacks have `num_layers` blocks.
_IGNORED_FIELDS = """
    feed_forward_proj max_position_embeddings use_scaled_init_for_output_weights is_encoder_decoder
    num_decoder_layers init_method_std initializer_factor
"""


@dataclass(kw_only=True)
class Seq2SeqConfig(ModelConfig):
    """Fields of an encoder-decoder with T5's relative positions, in the originals' names.

    There is no longest context: relative positions go on. `max_seq_len` is what it was trained on.

    Args:
        num_layers: blocks of the encoder, and of the decoder.
        num_buckets: of relative positions; distances of 128 and more share the last.
        dropout: wherever there is one.
        decoder_start_token_id: what every target starts with.
        pad_token_id: padding.
        eos_token_id: ends a target.
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
    # EVA's classes take an absent dropout for 0.1; the published files have 0.0.
    hf_defaults: ClassVar[dict[str, Any]] = {"dropout": 0.1}

    num_kv_heads: int = 0
    head_dim: int = 64
    max_seq_len: int = 512
    norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    num_buckets: int = 32
    dropout: float = 0.0
    pad_token_id: int = 5

    def check(self) -> None:
        """Check the fields against each other."""
        super().check()
        if self.tie_word_embeddings or self.num_kv_heads != self.num_heads:
            raise ConfigError(
                f"{type(self).__name__}: tie_word_embeddings={self.tie_word_embeddings} must be "
                f"False and num_kv_heads={self.num_kv_heads} must be num_heads={self.num_heads}."
            )

    @property
    def is_gated(self) -> bool:
        """The MLP has a gate."""
        return True

    def _give_special(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "num_decoder_layers": self.num_layers,
            "tie_word_embeddings": False,
            "is_encoder_decoder": True,
        }
        if self.max_seq_len != (self.raw.get("max_position_embeddings") or 512):
            fields["max_position_embeddings"] = self.max_seq_len
        return fields

    @classmethod
    def _take_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"max_seq_len": raw.get("max_position_embeddings") or 512}, raw

    def to_hf(self) -> dict[str, Any]:
        """Return the config under the original names."""
        out = super().to_hf()
        if "initializer_range" not in self.raw:
            del out["initializer_range"]
        return out

    def flops_per_token(self, seq_len: int) -> float:
        """Floating-point operations of forward and backward for one pair of tokens.

        That is one token of the source, through the encoder, and one of the target, through the
        decoder and the head, in a row of `seq_len` of each. Counted as in `ModelConfig`.
        """
        return super().flops_per_token(seq_len)

    def own_sizes(self) -> dict[str, list[LayerSizes]]:
        """Both stacks' layers; the decoder's attend to the source as well."""
        layer = self.layer_sizes()
        return {
            "encoder.layers": [layer] * self.num_layers,
            "decoder.layers": [replace(layer, cross=True)] * self.num_layers,
        }

    def kv_bytes_per_token(self, bytes_per_element: int = 2) -> int:
        """Bytes of keys and values that one pair of tokens leaves in the cache.

        The target's token leaves its own in every layer, the source's token those that the decoder
        attends to.
        """
        return super().kv_bytes_per_token(bytes_per_element)


def make_spec(
    config: Any, activation: str, scale: float | None, moe: MoESpec | None = None
) -> Seq2SeqSpec:
    """Return the encoder-decoder of a config: RMS norms before the parts, gated MLPs, no biases.

    Args:
        config: a `Seq2SeqConfig`.
        activation: of the MLP's gate.
        scale: of attention's scores; None is 1/sqrt(H).
        moe: experts in the place of the MLP.
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
