"""ModelCenter's encoders Bert, Roberta, Longformer and ViT."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.compat.model_center.model import config as configs
from bmforge.compat.model_center.model.base import BaseModel, define_model, init_model
from bmforge.compat.model_center.model.decoders import TextModel
from bmforge.compat.model_center.model.inputs import TextInputs, expand_mask
from bmforge.compat.model_center.model.outputs import BaseModelOutputWithPooling
from bmforge.errors import ConfigError
from bmforge.models import Model
from bmforge.models.formats.hf_format import WeightFiles, read_pickle
from bmforge.models.formats.model_center import load_model_center

__all__ = ["Bert", "Longformer", "Roberta", "ViT"]


class EncoderModel(TextModel):
    """Base class of encoders with pooler, and masked-LM head if the checkpoint has one.

    With a cache, `forward` encodes the next tokens of a text; cached tokens do not attend to them.
    """

    own_inputs = ("output_pooler_output", "global_attention_mask")

    @classmethod
    def _init_model(cls, config: configs.Config) -> Model:
        native = config.native()
        bare = init_model(config, native.replace(head="none"))
        return _add_head(bare, init_model(config, native.replace(head="masked_lm")))

    @classmethod
    def _open(cls, family: type[Model], directory: Path, config: configs.Config) -> Model:
        bare = family.from_pretrained(directory, dtype=config.dtype, head="none")
        head = family.config_class.heads["masked_lm"]
        if WeightFiles(directory).shapes.keys().isdisjoint(head.names.values()):
            return bare  # the checkpoint has no masked-LM head
        words = family.from_pretrained(directory, dtype=config.dtype, head="masked_lm")
        return _add_head(bare, words)

    @classmethod
    def _open_old(cls, family: type[Model], directory: Path, config: configs.Config) -> Model:
        words = load_model_center(directory, family=family.__name__, dtype=config.dtype)
        if words.config.head == "none":
            return words
        bare = family.from_config(
            words.config.replace(head="none"), device="meta", dtype=config.dtype
        )
        old_tensors = read_pickle(directory / "pytorch_model.pt")
        pooler = {
            f"pooler.{kind}": value.to(config.dtype)
            for name, value in old_tensors.items()
            for kind in ("weight", "bias")
            if name.endswith(f"pooler.dense.{kind}")
        }
        tensors = {**words.state_dict(keep_vars=True), **pooler}
        own_state = bare.state_dict()
        bare.load_state_dict({k: v for k, v in tensors.items() if k in own_state}, assign=True)
        if words.config.head == "masked_lm":
            return _add_head(bare, words)
        bare.classifier = words.classifier
        return bare

    def _run(
        self,
        text: TextInputs,
        mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        output_pooler_output: bool = True,
        **own: Any,
    ) -> Any:
        if text.cache is not None:
            own["cache"] = text.cache
        outputs = self.model(
            text.ids,
            _pair_mask(mask, text),
            token_type_ids,
            position_ids,
            output_hidden_states=bool(text.options.output_hidden_states),
            inputs_embeds=text.embeds,
            **own,
        )
        return outputs if output_pooler_output else outputs._replace(pooler_output=None)

    def build_text_output(self, outputs: Any, text: TextInputs) -> Any:
        """Build the result, with the pooler's output; see `build_output`."""
        last, pooled = outputs.last_hidden_state, outputs.pooler_output
        cache, layers = text.cache, outputs.hidden_states
        return self.build_output(
            last,
            lambda logits: BaseModelOutputWithPooling(last, pooled, cache, logits, layers),
            text.options,
        )


def _pair_mask(attention_mask: Tensor | None, text: TextInputs) -> Tensor | None:
    """Return the attention mask in bmforge's format; with a cache, a pairwise mask."""
    mask, inputs = attention_mask, text.inputs
    if text.cache is not None:
        if mask is None:
            mask = inputs.new_ones(inputs.shape[0], text.width, dtype=torch.bool)
        if mask.dim() == 2:
            mask = mask[:, None].expand(-1, inputs.shape[1], -1)
    return expand_mask(mask, inputs.shape[1]) if mask is not None and mask.dim() == 3 else mask


def _add_head(bare: Model, words: Any) -> Model:
    """Move the masked-LM head of `words` to `bare`; tie it to the embedding of `bare` if tied."""
    head = words.mlm_head
    if words.config.tie_word_embeddings:
        head.decoder.weight = bare.embed.weight
    bare.mlm_head = head
    bare.config = bare.config.replace(tie_word_embeddings=words.config.tie_word_embeddings)
    return bare


Bert = define_model("Bert", EncoderModel, configs.BertConfig)
Roberta = define_model("Roberta", EncoderModel, configs.RobertaConfig)


class Longformer(EncoderModel):
    """Longformer model."""

    _CONFIG_TYPE = configs.LongformerConfig

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
        """Run the model; `global_attention_mask` (B, T) is 1 for global tokens."""
        if options.get("use_cache") or options.get("past_key_values") is not None:
            raise ConfigError(
                "use_cache is not supported by a Longformer, which encodes a whole text at once. "
                "Leave it out."
            )
        if global_attention_mask is not None:
            options["global_attention_mask"] = global_attention_mask
        texts = (input_ids, length, attention_mask, token_type_ids, position_ids)
        return super().forward(*texts, **options)


class ViT(BaseModel):
    """ViT model with a classifier."""

    _CONFIG_TYPE = configs.ViTConfig

    @property
    def patch_embed(self) -> SimpleNamespace:
        """Patch embedding: the convolution `proj`, `cls_token` and `pos_embed`."""
        model: Any = self.model
        return SimpleNamespace(
            proj=model.embed_patches, cls_token=model.embed_class, pos_embed=model.embed_positions
        )

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
        """Return the class scores of images.

        Args:
            input_seq: images.
            x: earlier name of `input_seq`.
            register_blk: accepted and ignored.
            attention_mask: 1 for visible patches, 0 for others; the class token comes first.

        Shape:
            input_seq: (B, C, H, W); attention_mask: (B, patches + 1); returns (B, num_classes)
        """
        images = input_seq if x is None else x
        if images is None:
            raise TypeError("forward() needs input_seq, the tensor of images.")
        logits: Tensor = self.model(images, attention_mask=attention_mask).logits
        return logits
