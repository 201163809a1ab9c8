"""Bert, Roberta, Longformer and ViT as the old programs call them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from bmforge.compat.model_center.model.base import (
    BaseModel,
    draw_model,
    lengths_to_mask,
    one_of,
    refuse_unused,
)
from bmforge.compat.model_center.model.config import Config
from bmforge.compat.model_center.model.outputs import BaseModelOutputWithPooling
from bmforge.models import Model
from bmforge.models.formats.hf_format import WeightFiles, read_pickle
from bmforge.models.formats.model_center import load_model_center
from bmforge.models.stack import given_inputs

__all__ = [
    "Bert",
    "BertConfig",
    "Longformer",
    "LongformerConfig",
    "Roberta",
    "RobertaConfig",
    "ViT",
    "ViTConfig",
]


class EncoderModel(BaseModel):
    """An encoder with its pooler, and its head for masked words where its checkpoint has one."""

    @classmethod
    def _draw(cls, config: Config) -> Model:
        native = config.native()
        bare = draw_model(config, native.replace(head="none"))
        return _add_head(bare, draw_model(config, native.replace(head="masked_lm")))

    @classmethod
    def _open(cls, family: type[Model], directory: Path, config: Config) -> Model:
        bare = family.from_pretrained(directory, dtype=config.dtype, head="none")
        head = family.config_class.heads["masked_lm"]
        if WeightFiles(directory).shapes.keys().isdisjoint(head.names.values()):
            return bare  # a checkpoint of the encoder alone
        words = family.from_pretrained(directory, dtype=config.dtype, head="masked_lm")
        return _add_head(bare, words)

    @classmethod
    def _open_old(cls, family: type[Model], directory: Path, config: Config) -> Model:
        words = load_model_center(directory, family=family.__name__, dtype=config.dtype)
        if words.config.head == "none":
            return words
        bare = family.from_config(
            words.config.replace(head="none"), device="meta", dtype=config.dtype
        )
        found = read_pickle(directory / "pytorch_model.pt")
        pooler = {
            f"pooler.{kind}": value.to(config.dtype)
            for name, value in found.items()
            for kind in ("weight", "bias")
            if name.endswith(f"pooler.dense.{kind}")
        }
        tensors = {**words.state_dict(keep_vars=True), **pooler}
        wanted = bare.state_dict()
        bare.load_state_dict({k: v for k, v in tensors.items() if k in wanted}, assign=True)
        if words.config.head == "masked_lm":
            return _add_head(bare, words)
        bare.classifier = words.classifier
        return bare

    def forward(
        self,
        input_ids: Tensor | None = None,
        length: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        output_logits: bool = False,
        output_pooler_output: bool = True,
        output_hidden_states: bool | None = None,
        return_dict: bool = True,
        return_logits: bool = False,
        inputs_embeds: Tensor | None = None,
        **others: Any,
    ) -> Any:
        """Read a text.

        Args:
            input_ids: token ids.
            length: tokens of each row, padding behind them; or
            attention_mask: 1 for tokens, 0 for padding.
            token_type_ids: segment of every token; 0 when not given.
            position_ids: counted when not given.
            output_logits: make the logits, too.
            output_pooler_output: make the pooler's output.
            output_hidden_states: return the hidden states of all layers.
            return_dict: an output with names; else its values as a plain tuple.
            return_logits: return the logits alone, as early versions did.
            inputs_embeds: taken instead of what the embedding makes of `input_ids`.
            others: of a Longformer `global_attention_mask`; and what the old models took without
                using it.

        Shape:
            input_ids, attention_mask, token_type_ids: (B, T); length: (B,)
        """
        extra = {n: others.pop(n) for n in ("global_attention_mask",) if n in others}
        refuse_unused(others)
        input_ids, inputs_embeds = one_of(input_ids, inputs_embeds)
        if attention_mask is None and length is not None:
            given = given_inputs(input_ids, inputs_embeds)
            attention_mask = lengths_to_mask(length, given.shape[1])
        found = self.model(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            output_hidden_states=bool(output_hidden_states),
            inputs_embeds=inputs_embeds,
            **extra,
        )
        last, layers = found.last_hidden_state, found.hidden_states
        pooled = found.pooler_output if output_pooler_output else None
        return self.answer(
            last,
            lambda logits: BaseModelOutputWithPooling(
                last, pooled, logits=logits, hidden_states=layers
            ),
            output_logits=output_logits,
            return_logits=return_logits,
            return_dict=return_dict,
        )


def _add_head(bare: Model, words: Any) -> Model:
    """Put the head for masked words of one model on another, tied as it was."""
    head = words.mlm_head
    if words.config.tie_word_embeddings:
        head.decoder.weight = bare.embed.weight
    bare.mlm_head = head
    bare.config = bare.config.replace(tie_word_embeddings=words.config.tie_word_embeddings)
    return bare


class BertConfig(Config):
    """Sizes of a BERT."""

    family = "Bert"


class Bert(EncoderModel):
    """BERT."""

    _CONFIG_TYPE = BertConfig


class RobertaConfig(Config):
    """Sizes of a RoBERTa."""

    family = "Roberta"


class Roberta(EncoderModel):
    """RoBERTa."""

    _CONFIG_TYPE = RobertaConfig


class LongformerConfig(Config):
    """Sizes of a Longformer."""

    family = "Longformer"


class Longformer(EncoderModel):
    """Longformer."""

    _CONFIG_TYPE = LongformerConfig


class ViTConfig(Config):
    """Sizes of a ViT."""

    family = "ViT"


class ViT(BaseModel):
    """ViT with its classifier."""

    _CONFIG_TYPE = ViTConfig

    def _take_head(self) -> nn.Module | None:
        return None

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of classes.

        Shape:
            x: (B, C, H, W); returns (B, num_classes)
        """
        logits: Tensor = self.model(x).logits
        return logits
