"""Longformer (Beltagy et al., "Longformer: The Long-Document Transformer", 2020)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bmforge.device import reads_without_sync
from bmforge.errors import ShapeError
from bmforge.models.encoder import EncoderModel, EncoderSpec, encoder_block
from bmforge.models.encoder_config import EncoderConfig, encoder_size
from bmforge.models.heads import Head
from bmforge.models.roberta import roberta_heads
from bmforge.models.stack import find_differing_layers
from bmforge.models.traits import Traits
from bmforge.models.weights import WeightRule, linear_rules
from bmforge.nn.window_mask import build_window_mask

__all__ = ["Longformer", "LongformerConfig"]


@dataclass(kw_only=True)
class LongformerConfig(EncoderConfig):
    """Config of Longformer; other fields are those of `EncoderConfig`.

    Args:
        windows: window size of every layer, half on each side; a single number applies to all
            layers.
        sep_token_id: id of the separator after a question, whose tokens have global attention in
            question answering.
    """

    family: ClassVar[str] = "longformer"
    positions_skip_padding: ClassVar[bool] = True
    heads: ClassVar[dict[str, Head]] = roberta_heads("Longformer")
    hf_names: ClassVar[dict[str, str]] = {
        **{k: v for k, v in EncoderConfig.hf_names.items() if k != "classifier_dropout"},
        "sep_token_id": "sep_token_id",
    }
    # onnx_export selects one of two equivalent implementations.
    hf_ignored: ClassVar[frozenset[str]] = EncoderConfig.hf_ignored | {"onnx_export"}
    hf_required: ClassVar[dict[str, tuple[Any, ...]]] = {
        **EncoderConfig.hf_required,
        "attention_mode": ("longformer",),
        "ignore_attention_mask": (False,),
    }
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "longformer-base-4096": encoder_size(),
        "longformer-large-4096": encoder_size(1024, 24, 16),
        # Xiao et al., "Lawformer: A Pre-trained Language Model for Chinese Legal Long Documents"
        # (2021), initialized in its code from chinese-roberta-wwm with 4,098 position rows.
        "lawformer": {
            **encoder_size(),
            "vocab_size": 21128,
            "max_seq_len": 4097,
            "norm_eps": 1e-12,
            "num_segments": 2,
            "pad_token_id": 0,
        },
    }
    hub_ids: ClassVar[dict[str, str]] = {
        "longformer-base-4096": "allenai/longformer-base-4096",
        "longformer-large-4096": "allenai/longformer-large-4096",
        "lawformer": "thunlp/Lawformer",
    }

    vocab_size: int = 50265
    max_seq_len: int = 4096
    norm_eps: float = 1e-5
    num_segments: int = 1
    pad_token_id: int | None = 1
    windows: tuple[int, ...] = (512,)
    sep_token_id: int = 2

    def __post_init__(self) -> None:
        """Expand a single window size to all layers."""
        if len(self.windows) == 1:
            self.windows = self.windows * self.num_layers
        super().__post_init__()

    def problems(self) -> Iterator[str]:
        """Yield a message for each inconsistency among the fields."""
        yield from super().problems()
        if self.classifier_dropout is not None:
            yield (
                f"classifier_dropout={self.classifier_dropout} is not supported (allowed: None; "
                "the classifiers use `dropout`)"
            )
        if len(self.windows) != self.num_layers or any(w < 2 or w % 2 for w in self.windows):
            yield (
                f"windows={self.windows} must be one positive even number, or one for each of "
                f"num_layers={self.num_layers} layers"
            )

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        window = raw.pop("attention_window", 512)
        values, others = super()._read_special(raw)
        values["windows"] = tuple(window) if isinstance(window, list) else (window,)
        return values, others

    def _write_special(self) -> dict[str, Any]:
        return {**super()._write_special(), "attention_window": list(self.windows)}


class Longformer(EncoderModel):
    """Longformer with a masked-LM head, by default tied to the embedding."""

    config_class = LongformerConfig
    family_traits = Traits("bidirectional", "masked tokens", "learned", marks_between=2)
    hf_prefix = "longformer."
    # Poolers that no head uses, and the bias that transformers ignores if the decoder is not tied.
    hf_unused = ("longformer.pooler.dense.*", "pooler.dense.*", "lm_head.bias")
    hf_old_names = (
        ("lm_head.bias", "lm_head.decoder.bias"),
        ("lm_head.decoder.bias", "lm_head.bias"),
    )

    def __init__(self, config: LongformerConfig) -> None:
        blocks = [encoder_block(config, global_tokens=True, window=w) for w in config.windows]
        spec = EncoderSpec(
            blocks[0],
            find_differing_layers(blocks[0], blocks),
            position_offset=config.position_offset,
            embed_dropout=config.dropout,
            classifier_dropout=config.dropout,
            deep_classifier=True,
        )
        super().__init__(config, spec)

    def build_masks(
        self,
        inputs: Tensor,
        attention_mask: Tensor | None,
        document_ids: Tensor | None,
        global_attention_mask: Tensor | None = None,
        max_global_tokens: int | None = None,
    ) -> dict[int | None, Any]:
        """Return a dict from window size to attention mask.

        Args:
            inputs: token ids or embeddings.
            attention_mask: 1 for tokens, 0 for padding.
            document_ids: index of each token's document in packed sequences; tokens attend within
                their document.
            global_attention_mask: 1 for tokens with global attention. By default, these are the
                first token for sequence classification, the question (tokens before the first of
                three separators) for question answering, and otherwise none.
            max_global_tokens: maximum number of global tokens per sequence; a compiled model
                needs it for linear cost.

        Shape:
            inputs: (B, T) or (B, T, D); all other tensors: (B, T)
        """
        if global_attention_mask is None:
            global_attention_mask = self._default_globals(inputs)
            if self.config.head == "sequence_classification":
                max_global_tokens = 1
        return {
            window: build_window_mask(
                (inputs.shape[0], inputs.shape[1]),
                inputs.device,
                window,
                attention_mask=attention_mask,
                global_mask=global_attention_mask,
                document_ids=document_ids,
                max_global_tokens=max_global_tokens,
            )
            for window in {layer.attn.window for layer in self.layers.values() if layer.attn}
        }

    def _default_globals(self, inputs: Tensor) -> Tensor | None:
        """Return the default mask (B, T) of tokens with global attention, as in transformers."""
        position = torch.arange(inputs.shape[1], device=inputs.device).expand(inputs.shape[:2])
        if self.config.head == "sequence_classification":
            return position == 0
        if self.config.head != "question_answering":
            return None
        if inputs.dim() != 2:
            raise ShapeError(
                "the end of the question is located in input_ids, which is missing. With "
                "inputs_embeds, pass global_attention_mask."
            )
        separators = inputs == self.config.sep_token_id
        if reads_without_sync(inputs) and not bool((separators.sum(1) == 3).all()):
            raise ShapeError(
                "each sequence must have three separator tokens "
                f"(sep_token_id={self.config.sep_token_id}): after the question, before the text "
                f"and after the text, but the sequences have {separators.sum(1).tolist()}. Add "
                "separators, or pass global_attention_mask."
            )
        return position < separators.int().argmax(1, keepdim=True)

    def weight_rules(self) -> list[WeightRule]:
        """Map parameter names to transformers' names."""
        block = ("layers.{i}.attn.", "longformer.encoder.layer.{i}.attention.self.")
        projections = {"q": "query", "k": "key", "v": "value"}
        return super().weight_rules() + linear_rules(
            {f"{block[0]}{a}_global_proj": f"{block[1]}{b}_global" for a, b in projections.items()}
        )

    def tied_copies(self) -> dict[str, str]:
        """Return a dict from the name of the copied decoder bias to the name of its original."""
        return {"lm_head.decoder.bias": "lm_head.bias"}
