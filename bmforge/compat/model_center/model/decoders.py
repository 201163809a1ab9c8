"""ModelCenter's decoders GPT2, GPTj, OPT and Llama, and its encoder-decoders T5 and CPM2."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from bmforge.compat.model_center.model import config as configs
from bmforge.compat.model_center.model.base import BaseModel, define_model
from bmforge.compat.model_center.model.inputs import (
    CallOptions,
    TextInputs,
    expand_mask,
    lengths_to_mask,
    one_of,
)
from bmforge.compat.model_center.model.outputs import Seq2SeqModelOutput
from bmforge.models import ModelOutput

__all__ = ["TextModel", "GPT2", "OPT", "GPTj", "Llama", "CPM2", "T5"]


class TextModel(BaseModel):
    """Base class of models with one text input: by default, causal decoders.

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
        **options: Any,
    ) -> Any:
        """Run the model on a text, or on its next tokens with a cache.

        Args:
            input_ids: token ids.
            length: number of tokens per sequence, before padding.
            attention_mask: mask that replaces `length` (1 for tokens, 0 for padding), or pairwise
                mask that replaces the causal mask; cached tokens are included.
            token_type_ids: segment ids of an encoder (default: 0); ignored by decoders.
            position_ids: positions (default: counted).
            options: fields of `CallOptions`; `output_pooler_output` (default: True) of an encoder;
                `global_attention_mask` of a Longformer; arguments that ModelCenter ignored.

        Shape:
            input_ids, token_type_ids: (B, T); attention_mask: (B, past + T) or (B, T, past + T);
            length: (B,)
        """
        own = {name: options.pop(name) for name in self.own_inputs if name in options}
        text = self._take_text(input_ids, options)
        if attention_mask is None and length is not None:
            attention_mask = lengths_to_mask(length, text.width)
        return self.build_text_output(
            self._run(text, attention_mask, token_type_ids, position_ids, **own), text
        )

    def _run(
        self,
        text: TextInputs,
        mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
    ) -> Any:
        """Run the bmforge model; see `forward` for the arguments."""
        if mask is not None and mask.dim() == 3:
            mask = expand_mask(mask, text.inputs.shape[1])
        return self._run_model(text, mask, position_ids=position_ids)


GPT2 = define_model("GPT2", TextModel, configs.GPT2Config)
GPTj = define_model("GPTj", TextModel, configs.GPTjConfig)
OPT = define_model("OPT", TextModel, configs.OPTConfig)
Llama = define_model("Llama", TextModel, configs.LlamaConfig)


def _width_of(*texts: Tensor | None) -> int:
    """Return the length of the first tensor that is not None; 0 if all are None."""
    return next((text.shape[1] for text in texts if text is not None), 0)


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
        decoder_inputs_embeds: Tensor | None = None,
        **options: Any,
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
            decoder_inputs_embeds: embeddings instead of `decoder_input_ids`.
            options: fields of `CallOptions`, and arguments that ModelCenter ignored.

        Shape:
            input_ids, attention_mask: (B, S); decoder_input_ids: (B, T); length,
            decoder_length: (B,); encoder_outputs: (B, S, D)
        """
        chosen = CallOptions.read(options)
        input_ids, inputs_embeds = one_of(input_ids, chosen.inputs_embeds)
        target, begun = one_of(decoder_input_ids, decoder_inputs_embeds)
        width = chosen.past + _width_of(target, begun)
        source = _width_of(encoder_outputs, input_ids, inputs_embeds)
        if attention_mask is None and length is not None and source:
            attention_mask = lengths_to_mask(length, source)
        if decoder_attention_mask is None and decoder_length is not None:
            decoder_attention_mask = lengths_to_mask(decoder_length, width)
        cache = self._open_cache(chosen, width)
        has_states = encoder_outputs is not None
        outputs = self.model(
            None if has_states else input_ids,
            attention_mask,
            target,
            decoder_attention_mask,
            encoder_outputs=ModelOutput(last_hidden_state=encoder_outputs) if has_states else None,
            cache=cache,
            output_hidden_states=bool(chosen.output_hidden_states),
            inputs_embeds=None if has_states else inputs_embeds,
            decoder_inputs_embeds=begun,
        )
        last, encoded = outputs.last_hidden_state, outputs.encoder_last_hidden_state
        layers = outputs.encoder_hidden_states, outputs.hidden_states
        return self.build_output(
            last, lambda logits: Seq2SeqModelOutput(last, encoded, cache, logits, *layers), chosen
        )


T5 = define_model("T5", Seq2SeqModel, configs.T5Config)


class CPM2(Seq2SeqModel):
    """CPM-2 model."""

    _CONFIG_TYPE = configs.CPM2Config

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
