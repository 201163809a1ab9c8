"""ModelCenter's decoders: GPT2, GPTj, OPT and Llama."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bmforge.compat.model_center.model.base import (
    BaseModel,
    lengths_to_mask,
    refuse_unused,
    spread_mask,
)
from bmforge.compat.model_center.model.config.families import (
    GPT2Config,
    GPTjConfig,
    LlamaConfig,
    OPTConfig,
)
from bmforge.infer.cache import KVCache

__all__ = [
    "DecoderModel",
    "GPT2",
    "OPT",
    "GPTj",
    "Llama",
]


class DecoderModel(BaseModel):
    """Base class of causal decoders."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        length: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        use_cache: bool = False,
        past_key_values: KVCache | None = None,
        output_logits: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool = True,
        return_logits: bool = False,
        inputs_embeds: Tensor | None = None,
        **others: Any,
    ) -> Any:
        """Run the model on a text, or on its next tokens with a cache.

        Args:
            input_ids: token ids.
            length: number of tokens per sequence, before padding.
            attention_mask: mask that replaces `length` (1 for tokens, 0 for padding), or pairwise
                mask that replaces the causal mask; cached tokens are included.
            token_type_ids: accepted and ignored.
            position_ids: positions (default: counted).
            use_cache: return a KV cache.
            past_key_values: KV cache of an earlier call; it is extended in place.
            output_logits: compute logits now (True), never (False) or when they are read (None).
            output_hidden_states: return the hidden states of all layers.
            return_dict: return a `ModelOutput` instead of a tuple.
            return_logits: return only the logits, as early versions did.
            inputs_embeds: embeddings instead of `input_ids`.
            others: arguments that ModelCenter accepted without using them.

        Shape:
            input_ids: (B, T); attention_mask: (B, past + T) or (B, T, past + T); length: (B,)
        """
        refuse_unused(others)
        text = self._take_text(input_ids, inputs_embeds, past_key_values, use_cache)
        if attention_mask is None and length is not None:
            attention_mask = lengths_to_mask(length, text.width)
        elif attention_mask is not None and attention_mask.dim() == 3:
            attention_mask = spread_mask(attention_mask, text.given.shape[1])
        outputs = self._read(text, attention_mask, output_hidden_states, position_ids=position_ids)
        return self.answer_text(
            outputs,
            text.cache,
            output_logits=output_logits,
            return_logits=return_logits,
            return_dict=return_dict,
        )


class GPT2(DecoderModel):
    """GPT-2 model."""

    _CONFIG_TYPE = GPT2Config


class GPTj(DecoderModel):
    """GPT-J model."""

    _CONFIG_TYPE = GPTjConfig


class OPT(DecoderModel):
    """OPT model."""

    _CONFIG_TYPE = OPTConfig

    def _hidden_width(self) -> int:
        return int(self.model.config.embed_size or self.model.config.hidden_size)


class Llama(DecoderModel):
    """Llama model."""

    _CONFIG_TYPE = LlamaConfig
