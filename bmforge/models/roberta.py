"""RoBERTa (Liu et al., "RoBERTa: A Robustly Optimized BERT Pretraining Approach", 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from bmforge.models.encoder import EncoderModel, EncoderSpec, encoder_block
from bmforge.models.encoder_config import EncoderConfig, encoder_heads, encoder_size
from bmforge.models.heads import Head
from bmforge.models.traits import Traits

__all__ = ["Roberta", "RobertaConfig", "roberta_heads"]


def roberta_heads(stem: str) -> dict[str, Head]:
    """Return a dict from head name to head for RoBERTa and families that are derived from it.

    Args:
        stem: prefix of transformers' class names.
    """
    return encoder_heads(
        stem,
        {
            "dense": "lm_head.dense",
            "norm": "lm_head.layer_norm",
            "decoder": "lm_head.decoder",
            "bias": "lm_head.bias",
        },
        {"classifier.dense": "classifier.dense", "classifier.out": "classifier.out_proj"},
    )


@dataclass(kw_only=True)
class RobertaConfig(EncoderConfig):
    """Config of RoBERTa; the fields are those of `EncoderConfig`.

    Positions count only tokens, not padding; `max_seq_len` is the maximum input length, and the
    position table has `pad_token_id` + 1 more rows.
    """

    family: ClassVar[str] = "roberta"
    positions_skip_padding: ClassVar[bool] = True
    heads: ClassVar[dict[str, Head]] = roberta_heads("Roberta")
    hf_defaults: ClassVar[dict[str, Any]] = {**EncoderConfig.hf_defaults, "vocab_size": 50265}
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "roberta-base": encoder_size(),
        "roberta-large": encoder_size(1024, 24, 16),
    }
    hub_ids: ClassVar[dict[str, str]] = {
        "roberta-base": "FacebookAI/roberta-base",
        "roberta-large": "FacebookAI/roberta-large",
    }

    vocab_size: int = 50265
    norm_eps: float = 1e-5
    num_segments: int = 1
    pad_token_id: int | None = 1


class Roberta(EncoderModel):
    """RoBERTa with a masked-LM head, by default tied to the embedding."""

    config_class = RobertaConfig
    family_traits = Traits("bidirectional", "masked tokens", "learned", marks_between=2)
    hf_prefix = "roberta."
    # Poolers that no head uses, and the bias that transformers ignores if the decoder is not tied.
    hf_unused = ("roberta.pooler.dense.*", "pooler.dense.*", "lm_head.bias")
    hf_old_names = (
        ("lm_head.bias", "lm_head.decoder.bias"),
        ("lm_head.decoder.bias", "lm_head.bias"),
    )

    def __init__(self, config: RobertaConfig) -> None:
        dropout = config.classifier_dropout
        spec = EncoderSpec(
            encoder_block(config),
            position_offset=config.position_offset,
            embed_dropout=config.dropout,
            classifier_dropout=config.dropout if dropout is None else dropout,
            deep_classifier=True,
        )
        super().__init__(config, spec)

    def tied_copies(self) -> dict[str, str]:
        """Return a dict from the name of the copied decoder bias to the name of its original."""
        return {"lm_head.decoder.bias": "lm_head.bias"}
