"""BERT (Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from bmforge.models.encoder import EncoderModel, EncoderSpec, encoder_block
from bmforge.models.encoder_config import EncoderConfig, encoder_heads, encoder_size
from bmforge.models.heads import Head
from bmforge.models.traits import Traits

__all__ = ["Bert", "BertConfig"]

_TRANSFORM = "cls.predictions.transform"
_LARGE = encoder_size(1024, 24, 16)


@dataclass(kw_only=True)
class BertConfig(EncoderConfig):
    """Config of BERT; the fields are those of `EncoderConfig`."""

    family: ClassVar[str] = "bert"
    heads: ClassVar[dict[str, Head]] = encoder_heads(
        "Bert",
        {
            "dense": f"{_TRANSFORM}.dense",
            "norm": f"{_TRANSFORM}.LayerNorm",
            "decoder": "cls.predictions.decoder",
            "bias": "cls.predictions.bias",
        },
        {"pooler": "bert.pooler.dense", "classifier": "classifier"},
    )
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "bert-base-uncased": encoder_size(),
        "bert-large-uncased": _LARGE,
        "bert-base-cased": {**encoder_size(), "vocab_size": 28996},
        "bert-large-cased": {**_LARGE, "vocab_size": 28996},
        "bert-base-chinese": {**encoder_size(), "vocab_size": 21128},
        "bert-base-multilingual-cased": {**encoder_size(), "vocab_size": 119547},
        # Zeng et al., "A deep-learning system bridging molecule structure and biomedical text with
        # comprehension comparable to human professionals" (2022): sizes of bert-base-uncased.
        "kv-plm": encoder_size(),
        # Cui et al., "Pre-Training with Whole Word Masking for Chinese BERT" (2019).
        "chinese-roberta-wwm": {**encoder_size(), "vocab_size": 21128},
    }
    hub_ids: ClassVar[dict[str, str]] = {
        "bert-base-uncased": "google-bert/bert-base-uncased",
        "bert-large-uncased": "google-bert/bert-large-uncased",
        "bert-base-cased": "google-bert/bert-base-cased",
        "bert-large-cased": "google-bert/bert-large-cased",
        "bert-base-chinese": "google-bert/bert-base-chinese",
        "bert-base-multilingual-cased": "google-bert/bert-base-multilingual-cased",
        "chinese-roberta-wwm": "hfl/chinese-roberta-wwm-ext",
    }


class Bert(EncoderModel):
    """BERT with a masked-LM head, by default tied to the embedding."""

    config_class = BertConfig
    family_traits = Traits("bidirectional", "masked tokens", "learned")
    hf_prefix = "bert."
    # The next-sentence head, poolers that no head uses, and the bias that transformers ignores if
    # the decoder is not tied.
    hf_unused = (
        "cls.seq_relationship.*",
        "bert.pooler.dense.*",
        "pooler.dense.*",
        "cls.predictions.bias",
    )
    # Names in TensorFlow checkpoints, and in checkpoints that store the bias under one name only.
    hf_old_names = (
        ("LayerNorm.weight", "LayerNorm.gamma"),
        ("LayerNorm.bias", "LayerNorm.beta"),
        ("cls.predictions.bias", "cls.predictions.decoder.bias"),
        ("cls.predictions.decoder.bias", "cls.predictions.bias"),
    )

    def __init__(self, config: BertConfig) -> None:
        dropout = config.classifier_dropout
        spec = EncoderSpec(
            encoder_block(config),
            embed_dropout=config.dropout,
            classifier_dropout=config.dropout if dropout is None else dropout,
            head_activation=config.activation,
        )
        super().__init__(config, spec)

    def tied_copies(self) -> dict[str, str]:
        """Return a dict from the name of the copied decoder bias to the name of its original."""
        return {"cls.predictions.decoder.bias": "cls.predictions.bias"}
