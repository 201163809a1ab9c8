"""Bert, Roberta, Longformer and ViT as the old programs call them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.compat.model_center.model.base import (
    BaseModel,
    TextInputs,
    draw_model,
    lengths_to_mask,
    refuse_unused,
    spread_mask,
)
from bmforge.compat.model_center.model.config import (
    BertConfig,
    Config,
    LongformerConfig,
    RobertaConfig,
    ViTConfig,
)
from bmforge.compat.model_center.model.outputs import BaseModelOutputWithPooling
from bmforge.errors import ConfigError
from bmforge.infer.cache import KVCache
from bmforge.models import Model
from bmforge.models.formats.hf_format import WeightFiles, read_pickle
from bmforge.models.formats.model_center import load_model_center

__all__ = [
    "Bert",
    "Longformer",
    "Roberta",
    "ViT",
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
        output_logits: bool | None = None,
        output_pooler_output: bool = True,
        output_hidden_states: bool | None = None,
        return_dict: bool = True,
        return_logits: bool = False,
        inputs_embeds: Tensor | None = None,
        use_cache: bool = False,
        past_key_values: KVCache | None = None,
        **others: Any,
    ) -> Any:
        """Read a text, or the tokens after those read before, which do not see these.

        Args:
            input_ids: token ids.
            length: tokens of each row, padding behind them; or
            attention_mask: 1 for tokens, 0 for padding, the past included; or written out for every
                pair of tokens.
            token_type_ids: segment of every token; 0 when not given.
            position_ids: counted when not given.
            output_logits: make the logits; None makes them when they are read.
            output_pooler_output: make the pooler's output.
            output_hidden_states: return the hidden states of all layers.
            return_dict: an output with names; else its values as a plain tuple.
            return_logits: return the logits alone, as early versions did.
            inputs_embeds: taken instead of what the embedding makes of `input_ids`.
            use_cache: keep keys and values for later tokens.
            past_key_values: what an earlier call returned under this name; it is extended in place.
            others: of a Longformer `global_attention_mask`; and what the old models took without
                using it.

        Shape:
            input_ids, token_type_ids: (B, T); attention_mask: (B, past + T) or (B, T, past + T);
            length: (B,)
        """
        extra = {n: others.pop(n) for n in ("global_attention_mask",) if n in others}
        refuse_unused(others)
        text = self._take_text(input_ids, inputs_embeds, past_key_values, use_cache)
        if attention_mask is None and length is not None:
            attention_mask = lengths_to_mask(length, text.width)
        if text.cache is not None:
            extra["cache"] = text.cache
        found = self.model(
            text.ids,
            _pair_mask(attention_mask, text),
            token_type_ids,
            position_ids,
            output_hidden_states=bool(output_hidden_states),
            inputs_embeds=text.embeds,
            **extra,
        )
        last, layers = found.last_hidden_state, found.hidden_states
        pooled = found.pooler_output if output_pooler_output else None
        return self.answer(
            last,
            lambda logits: BaseModelOutputWithPooling(last, pooled, text.cache, logits, layers),
            output_logits=output_logits,
            return_logits=return_logits,
            return_dict=return_dict,
        )


def _pair_mask(attention_mask: Tensor | None, text: TextInputs) -> Tensor | None:
    """Return a mask as the zoo's models take it; beside a cache one for every pair of tokens."""
    mask, given = attention_mask, text.given
    if text.cache is not None:
        if mask is None:
            mask = given.new_ones(given.shape[0], text.width, dtype=torch.bool)
        if mask.dim() == 2:
            mask = mask[:, None].expand(-1, given.shape[1], -1)
    return spread_mask(mask, given.shape[1]) if mask is not None and mask.dim() == 3 else mask


def _add_head(bare: Model, words: Any) -> Model:
    """Put the head for masked words of one model on another, tied as it was."""
    head = words.mlm_head
    if words.config.tie_word_embeddings:
        head.decoder.weight = bare.embed.weight
    bare.mlm_head = head
    bare.config = bare.config.replace(tie_word_embeddings=words.config.tie_word_embeddings)
    return bare


class Bert(EncoderModel):
    """BERT."""

    _CONFIG_TYPE = BertConfig


class Roberta(EncoderModel):
    """RoBERTa."""

    _CONFIG_TYPE = RobertaConfig


class Longformer(EncoderModel):
    """Longformer."""

    _CONFIG_TYPE = LongformerConfig

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        length: Tensor | None = None,
        attention_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """As `EncoderModel`, with 1 in `global_attention_mask` (B, T) for what all see."""
        if options.get("use_cache") or options.get("past_key_values") is not None:
            raise ConfigError("a Longformer reads whole texts: leave out use_cache.")
        if global_attention_mask is not None:
            options["global_attention_mask"] = global_attention_mask
        texts = (input_ids, length, attention_mask, token_type_ids, position_ids)
        return super().forward(*texts, **options)


class ViT(BaseModel):
    """ViT with its classifier."""

    _CONFIG_TYPE = ViTConfig

    def _take_head(self) -> nn.Module | None:
        return None

    def forward(
        self,
        input_seq: Tensor | None = None,
        register_blk: int = -1,
        attention_mask: Tensor | None = None,
        *,
        x: Tensor | None = None,
    ) -> Tensor:
        """Return the scores of classes.

        Args:
            input_seq: the images, also as
            x: its earlier name.
            register_blk: not used.
            attention_mask: 1 for patches that are seen, 0 for others; the class token is the first.

        Shape:
            input_seq: (B, C, H, W); attention_mask: (B, patches + 1); returns (B, num_classes)
        """
        images = input_seq if x is None else x
        if images is None:
            raise TypeError("forward() needs input_seq, the images")
        logits: Tensor = self.model(images, attention_mask=attention_mask).logits
        return logits
