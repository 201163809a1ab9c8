"""ModelCenter's decoders GPT2, GPTj, OPT and Llama, and its encoder-decoders T5 and CPM2."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from bmforge.compat.model_center.model.base import (
    BaseModel,
    TextInputs,
    lengths_to_mask,
    one_of,
    refuse_unused,
    spread_mask,
)
from bmforge.compat.model_center.model.config import (
    CPM2Config,
    GPT2Config,
    GPTjConfig,
    LlamaConfig,
    OPTConfig,
    T5Config,
)
from bmforge.compat.model_center.model.outputs import Seq2SeqModelOutput
from bmforge.infer.cache import KVCache
from bmforge.models import ModelOutput

__all__ = ["TextModel", "GPT2", "OPT", "GPTj", "Llama", "CPM2", "T5"]


class TextModel(BaseModel):
    """Base class of models with one text input: causal decoders, unless a subclass overrides it.

    Attributes:
        own_inputs: further arguments of `forward` that `_run` takes.
    """

    own_inputs: ClassVar[tuple[str, ...]] = ()

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
            token_type_ids: segment ids of an encoder (default: 0); ignored by decoders.
            position_ids: positions (default: counted).
            use_cache: return a KV cache.
            past_key_values: KV cache of an earlier call; it is extended in place.
            output_logits: compute logits now (True), never (False) or when they are read (None).
            output_hidden_states: return the hidden states of all layers.
            return_dict: return a `ModelOutput` instead of a tuple.
            return_logits: return only the logits, as early versions did.
            inputs_embeds: embeddings instead of `input_ids`.
            others: `output_pooler_output` (default: True) of an encoder, `global_attention_mask` of
                a Longformer, and arguments that ModelCenter accepted without using them.

        Shape:
            input_ids, token_type_ids: (B, T); attention_mask: (B, past + T) or (B, T, past + T);
            length: (B,)
        """
        own = {name: others.pop(name) for name in self.own_inputs if name in others}
        refuse_unused(others)
        text = self._take_text(input_ids, inputs_embeds, past_key_values, use_cache)
        if attention_mask is None and length is not None:
            attention_mask = lengths_to_mask(length, text.width)
        tokens = (token_type_ids, position_ids)
        outputs = self._run(text, attention_mask, *tokens, output_hidden_states, **own)
        return self.answer_text(
            outputs,
            text.cache,
            output_logits=output_logits,
            return_logits=return_logits,
            return_dict=return_dict,
        )

    def _run(
        self,
        text: TextInputs,
        mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        hidden_states: bool | None,
    ) -> Any:
        """Run the bmforge model; see `forward` for the arguments."""
        if mask is not None and mask.dim() == 3:
            mask = spread_mask(mask, text.given.shape[1])
        return self._read(text, mask, hidden_states, position_ids=position_ids)


class GPT2(TextModel):
    """GPT-2 model."""

    _CONFIG_TYPE = GPT2Config


class GPTj(TextModel):
    """GPT-J model."""

    _CONFIG_TYPE = GPTjConfig


class OPT(TextModel):
    """OPT model."""

    _CONFIG_TYPE = OPTConfig

    def _hidden_width(self) -> int:
        return int(self.model.config.embed_size or self.model.config.hidden_size)


class Llama(TextModel):
    """Llama model."""

    _CONFIG_TYPE = LlamaConfig


class Seq2SeqModel(BaseModel):
    """Base class of encoder-decoders."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        length: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_length: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        *,
        encoder_outputs: Tensor | None = None,
        use_cache: bool = False,
        past_key_values: KVCache | None = None,
        output_logits: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool = True,
        return_logits: bool = False,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        **others: Any,
    ) -> Any:
        """Run the model on source and target.

        Args:
            input_ids: token ids of the source; not needed with `encoder_outputs`.
            length: number of tokens per source, before padding.
            attention_mask: 1 for source tokens, 0 for padding, instead of `length`.
            decoder_input_ids: token ids of the target.
            decoder_length: number of tokens per target, before padding.
            decoder_attention_mask: 1 for target tokens, 0 for padding, cached tokens included.
            encoder_outputs: `encoder_last_hidden_state` of an earlier call.
            use_cache: return a KV cache.
            past_key_values: KV cache of an earlier call; it is extended in place.
            output_logits: compute logits now (True), never (False) or when they are read (None).
            output_hidden_states: return the hidden states of all layers.
            return_dict: return a `ModelOutput` instead of a tuple.
            return_logits: return only the logits, as early versions did.
            inputs_embeds: embeddings instead of `input_ids`.
            decoder_inputs_embeds: embeddings instead of `decoder_input_ids`.
            others: arguments that ModelCenter accepted without using them.

        Shape:
            input_ids, attention_mask: (B, S); decoder_input_ids: (B, T); length,
            decoder_length: (B,); encoder_outputs: (B, S, D)
        """
        refuse_unused(others)
        input_ids, inputs_embeds = one_of(input_ids, inputs_embeds)
        target, begun = one_of(decoder_input_ids, decoder_inputs_embeds)
        past = past_key_values.length if past_key_values is not None else 0
        width = past + next((t.shape[1] for t in (target, begun) if t is not None), 0)
        texts = (encoder_outputs, input_ids, inputs_embeds)
        source = next((text for text in texts if text is not None), None)
        if attention_mask is None and length is not None and source is not None:
            attention_mask = lengths_to_mask(length, source.shape[1])
        if decoder_attention_mask is None and decoder_length is not None:
            decoder_attention_mask = lengths_to_mask(decoder_length, width)
        cache = self._open_cache(past_key_values, use_cache, width)
        given_outputs = None
        if encoder_outputs is not None:
            given_outputs = ModelOutput(last_hidden_state=encoder_outputs)
        outputs = self.model(
            None if given_outputs else input_ids,
            attention_mask,
            target,
            decoder_attention_mask,
            encoder_outputs=given_outputs,
            cache=cache,
            output_hidden_states=bool(output_hidden_states),
            inputs_embeds=None if given_outputs else inputs_embeds,
            decoder_inputs_embeds=begun,
        )
        return self.answer(
            outputs.last_hidden_state,
            lambda logits: Seq2SeqModelOutput(
                outputs.last_hidden_state,
                outputs.encoder_last_hidden_state,
                cache,
                logits,
                outputs.encoder_hidden_states,
                outputs.hidden_states,
            ),
            output_logits=output_logits,
            return_logits=return_logits,
            return_dict=return_dict,
        )


class T5(Seq2SeqModel):
    """T5 model, in all versions."""

    _CONFIG_TYPE = T5Config


class CPM2(Seq2SeqModel):
    """CPM-2 model."""

    _CONFIG_TYPE = CPM2Config

    def forward(  # type: ignore[override]
        self,
        enc_input: Tensor | None = None,
        enc_length: Tensor | None = None,
        dec_input: Tensor | None = None,
        dec_length: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Run the model on source and target.

        A call with `input_ids` returns a `ModelOutput`. A call with positional arguments, or with
        the argument names below, returns the logits, as before version 1.0 and in ModelCenter's
        examples.

        Args:
            enc_input: token ids of the source.
            enc_length: number of tokens per source.
            dec_input: token ids of the target.
            dec_length: number of tokens per target.
            options: see `Seq2SeqModel`.

        Shape:
            enc_input: (B, S); dec_input: (B, T); lengths: (B,); returns (B, T, V)
        """
        if enc_input is not None:
            options.setdefault("return_logits", True)
            options["input_ids"] = enc_input
        old = {"length": enc_length, "decoder_input_ids": dec_input, "decoder_length": dec_length}
        return super().forward(**{n: v for n, v in old.items() if v is not None}, **options)
